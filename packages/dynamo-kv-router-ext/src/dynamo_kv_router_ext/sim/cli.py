# SPDX-License-Identifier: Apache-2.0
"""The command ``kv-router-sim``: policies side by side on a trace, a decision explained, a profile fitted.

    kv-router-sim run --trace conversation.jsonl.gz --prefill 4 --decode 2 --timing profile:NAME --html report.html
    kv-router-sim explain --trace conversation.jsonl.gz --prefill 4 --decode 2 --timing profile:NAME --request request-7
    kv-router-sim fit --timing table:measured.npz --name mine --out mine.json

Exit status: 0, or 2 where an argument or a file is wrong; the message names both.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from .. import __version__
from .._profile import Profile, ProfileError, load_profile, shipped_profiles
from .._types import NoWorkerError
from .fleet import Arrival, FleetSpec, Result, simulate
from .report import MISSING, Recorder, Run, explanation_table, table, write_html
from .scenario import (
    LIKE,
    POLICIES,
    Fleet,
    Pool,
    ScenarioError,
    fitted_profile,
    links_of,
    make_policy,
    make_timing,
    read_fleet,
    timing_profile,
)
from .timing import TimingError
from .traces import FORMATS, TraceError, arrivals

__all__ = ["main"]


class _Fault(Exception):
    """What is wrong with an option: `--NAME VALUE: why`."""

    def __init__(self, option: str, value: object, why: object) -> None:
        text = why.strerror if isinstance(why, OSError) and why.strerror else why
        super().__init__(f"{option} {value}: {text}")


def _number(least: float, *, above: bool = False, below: float = math.inf) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) or value < least or (above and value == least):
            raise argparse.ArgumentTypeError(f"must be {'above' if above else 'at least'} {least:g}, not {text}")
        if value >= below:
            raise argparse.ArgumentTypeError(f"must be below {below:g}, not {text}")
        return value

    read.__name__ = "number"
    return read


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


_count.__name__ = "count"


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    root = argparse.ArgumentParser(prog="kv-router-sim", description="Simulate where requests are placed.")
    root.add_argument("--version", action="version", version=__version__)
    commands = root.add_subparsers(dest="command", required=True)

    inputs = argparse.ArgumentParser(add_help=False)
    group = inputs.add_argument_group("the requests")
    group.add_argument("--trace", required=True, metavar="FILE", help="a trace; for weka also a folder")
    group.add_argument("--format", choices=FORMATS, default="mooncake", help="what it is written in (%(default)s)")
    group.add_argument("--limit", type=_count, metavar="N", help="only the first N requests, or weka conversations")
    group.add_argument("--speedup", type=_number(0, above=True), default=1.0, metavar="X", help="X times as fast")
    group.add_argument(
        "--every", type=_number(0), default=10.0, metavar="S", help="a weka conversation begins every S s (%(default)s)"
    )
    group = inputs.add_argument_group("the fleet")
    group.add_argument("--fleet", metavar="FILE", help="a fleet file; instead of the next five")
    for role, what in (("prefill", "prefill"), ("decode", "decode"), ("both", "aggregated")):
        group.add_argument(f"--{role}", type=_count, metavar="N", help=f"N {what} workers")
    group.add_argument("--capacity-tokens", type=_count, metavar="N", help="tokens of KV of each worker (1000000)")
    group.add_argument("--block-size", type=_count, metavar="N", help="tokens in a block (64)")
    group.add_argument(
        "--timing",
        required=True,
        metavar="T",
        help="how long steps last: profile:NAME, table:FILE, ais:model=…,system=… or polynomial",
    )
    group.add_argument(
        "--speed-spread",
        type=_number(0, below=1),
        default=0.0,
        metavar="X",
        help="speeds drift between 1 - X and 1 + X (0)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the drift (0)")
    group = inputs.add_argument_group("the policy")
    group.add_argument(
        "--profile",
        metavar="P",
        help=f"what ours starts from: a file, or {', '.join(shipped_profiles())}; left out, it is fitted to the timing",
    )

    run = commands.add_parser("run", parents=[inputs], help="simulate policies side by side")
    run.add_argument(
        "--policy",
        action="append",
        metavar="P[:K=V,…]",
        help=f"a policy with its settings; may be repeated ({', '.join(POLICIES)})",
    )
    run.add_argument("--html", metavar="FILE", help="write a report with plots")
    run.add_argument("--json", metavar="FILE", help="write the figures")

    explain = commands.add_parser("explain", parents=[inputs], help="show the candidates of one request")
    explain.add_argument("--request", required=True, metavar="ID", help="its id, such as request-7")
    explain.add_argument("--policy", default="ours", metavar="ours[:K=V,…]", help="ours, with its settings")

    fit = commands.add_parser("fit", help="fit a profile to a timing")
    fit.add_argument("--timing", required=True, metavar="T", help="as above")
    fit.add_argument("--name", required=True, metavar="NAME", help="the profile's name")
    fit.add_argument(
        "--like", default=LIKE, metavar="P", help="the profile whose transfer and tiers it takes (%(default)s)"
    )
    fit.add_argument("--out", required=True, metavar="FILE", help="where it is written")
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = {"run": _run, "explain": _explain, "fit": _fit}[options.command]
    try:
        return command(options)
    except _Fault as fault:
        print(f"kv-router-sim: {fault}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # a reader that saw enough
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace) -> int:
    used = {Path(one).resolve() for one in (options.trace, options.fleet, options.profile) if one is not None}
    for option in ("html", "json"):  # said before the run, not after it
        value = getattr(options, option)
        if value is None:
            continue
        if Path(value).is_dir() or not Path(value).parent.is_dir():
            raise _Fault(f"--{option}", value, "a folder, or in none that exists")
        if Path(value).resolve() in used:
            raise _Fault(f"--{option}", value, "another option's file")
        used.add(Path(value).resolve())
    if options.html is not None and find_spec("matplotlib") is None:
        raise _Fault("--html", options.html, MISSING)
    requests, spec, profile = _scenario(options)
    texts = options.policy or list(POLICIES)
    makers = []
    for text in texts:
        if texts.count(text) > 1:
            raise _Fault("--policy", text, "given twice")
        try:
            makers.append(make_policy(text, profile, spec.block_size))
        except ScenarioError as error:
            raise _Fault("--policy", text, error) from error
    runs = []
    for text, make in zip(texts, makers, strict=True):
        recorder = Recorder(make())
        runs.append(Run(text, _simulate(options, spec, requests, recorder), recorder.decisions))
    facts = {
        "trace": f"{Path(options.trace).name}, {len(requests)} requests, {options.speedup:g} times as fast",
        "fleet": ", ".join(_described(spec)),
        "timing": options.timing,
        "ours starts from": profile.name,
        "speeds": f"within {options.speed_spread:.0%}, seed {options.seed}" if options.speed_spread else "as given",
    }
    for name, value in facts.items():
        print(f"{name}: {value}")
    print()
    print(table([(run.label, run.summary) for run in runs]))
    for run in runs:
        why = next((request.error for request in run.result.requests if request.error), "")
        if why:
            print(f"{run.label}: {run.summary.failed} failed, the first because: {why}")
    if options.json is not None:
        document = {"facts": facts, "policies": {run.label: run.summary.as_json() for run in runs}}
        _write("--json", options.json, json.dumps(document, indent=2) + "\n")
    if options.html is not None:
        try:
            facts[f"profile {profile.name}"] = profile.source
            write_html(options.html, "Where requests were placed", facts, runs)
        except (RuntimeError, OSError) as error:
            raise _Fault("--html", options.html, error) from error
    return 0


def _explain(options: argparse.Namespace) -> int:
    if options.policy.partition(":")[0] != "ours":
        raise _Fault("--policy", options.policy, "only ours has candidates with terms")
    requests, spec, profile = _scenario(options)
    if options.request not in {request.id for request in requests}:
        raise _Fault("--request", options.request, f"not in {options.trace}; the first is {requests[0].id}")
    try:
        recorder = Recorder(make_policy(options.policy, profile, spec.block_size)(), options.request)
    except ScenarioError as error:
        raise _Fault("--policy", options.policy, error) from error
    _simulate(options, spec, requests, recorder)
    for now, explanation in recorder.explanations:
        print(f"{explanation.request}, {explanation.role}, at {now:.3f} s")
        print(explanation_table(explanation))
        print()
    return 0


def _fit(options: argparse.Namespace) -> int:
    if not options.name.strip():
        raise _Fault("--name", repr(options.name), "a profile needs a name")
    try:
        timing = make_timing(options.timing)
    except (ScenarioError, ProfileError, OSError, ValueError, RuntimeError) as error:
        raise _Fault("--timing", options.timing, error) from error
    try:
        profile = fitted_profile(timing, options.timing, options.name, options.like)
    except ProfileError as error:
        raise _Fault("--like", options.like, error) from error
    except TimingError as error:
        raise _Fault("--timing", options.timing, error) from error
    _write("--out", options.out, msgspec.json.format(msgspec.json.encode(profile)).decode() + "\n")
    print(f"{profile.name}: {profile.source}")
    return 0


def _scenario(options: argparse.Namespace) -> tuple[list[Arrival], FleetSpec, Profile]:
    """Return the requests, the fleet, and the profile that the policy starts from."""
    fleet = _fleet(options)
    capacity = max(pool.capacity_tokens for pool in fleet.pools)
    try:
        timing = make_timing(options.timing, capacity)
    except (ScenarioError, ProfileError, OSError, ValueError, RuntimeError) as error:
        raise _Fault("--timing", options.timing, error) from error
    try:
        if options.profile is not None:
            profile = load_profile(options.profile)
        else:
            profile = timing_profile(options.timing, timing)
    except ProfileError as error:
        raise _Fault("--profile", options.profile, error) from error
    except TimingError as error:
        raise _Fault("--timing", options.timing, f"{error}; another one can be given by --profile") from error
    try:
        spec = fleet.spec(timing, links_of(options.timing), speed_spread=options.speed_spread, seed=options.seed)
    except ScenarioError as error:
        raise _Fault(*_fleet_given(options), error) from error
    try:
        requests = arrivals(
            options.trace,
            options.format,
            block_size=fleet.block_size,
            speedup=options.speedup,
            every_s=options.every,
            limit=options.limit,
        )
    except (TraceError, ValueError, OSError) as error:
        raise _Fault("--trace", options.trace, error) from error
    if not requests:
        raise _Fault("--trace", options.trace, "holds no request")
    return requests, spec, profile


#: The options that make a fleet without a file.
_FLEET_FLAGS = ("prefill", "decode", "both", "capacity_tokens", "block_size")


def _fleet_given(options: argparse.Namespace) -> tuple[str, str]:
    """Return the option that gives the fleet and its value, or all of them."""
    if options.fleet is not None:
        return "--fleet", options.fleet
    given = {name: getattr(options, name) for name in _FLEET_FLAGS if getattr(options, name) is not None}
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
    option, _, value = (words or "--prefill, --decode, --both none").rpartition(" ")
    return option, value


def _fleet(options: argparse.Namespace) -> Fleet:
    given = [f"--{name.replace('_', '-')}" for name in _FLEET_FLAGS if getattr(options, name) is not None]
    if options.fleet is not None:
        if given:
            raise _Fault("--fleet", options.fleet, f"and {given[0]}: one of the two")
        try:
            fleet = read_fleet(options.fleet)
        except (ScenarioError, OSError) as error:
            raise _Fault("--fleet", options.fleet, error) from error
    else:
        capacity = options.capacity_tokens or 1_000_000
        pools = tuple(
            Pool(role=role, count=getattr(options, role), capacity_tokens=capacity)
            for role in ("prefill", "decode", "both")
            if getattr(options, role) is not None
        )
        fleet = Fleet(pools=pools, block_size=options.block_size or 64)
    roles = {pool.role for pool in fleet.pools}
    if roles not in ({"both"}, {"prefill", "decode"}):
        found = ", ".join(sorted(roles)) or "no worker"
        raise _Fault(
            *_fleet_given(options), f"a fleet has prefill and decode workers, or those that do both, not {found}"
        )
    return fleet


def _simulate(options: argparse.Namespace, spec: FleetSpec, requests: list[Arrival], policy: Recorder) -> Result:
    try:
        return simulate(spec, requests, policy)
    except TimingError as error:
        raise _Fault("--timing", options.timing, error) from error
    except (ValueError, NoWorkerError) as error:
        raise _Fault("--trace", options.trace, error) from error


def _described(spec: FleetSpec) -> list[str]:
    counts: dict[str, int] = {}
    for one in spec.workers:
        worker = one.worker
        ranks = f" of {worker.ranks} ranks" if worker.ranks > 1 else ""
        what = f"{worker.role}{ranks}, {worker.capacity_tokens} tokens"
        counts[what] = counts.get(what, 0) + 1
    return [f"{count} {what}" for what, count in counts.items()]


def _write(option: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _Fault(option, path, error) from error


if __name__ == "__main__":
    sys.exit(main())
