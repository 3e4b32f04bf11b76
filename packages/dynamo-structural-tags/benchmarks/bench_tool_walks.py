# SPDX-License-Identifier: Apache-2.0
"""Random walks under xgrammar's mask: finished calls of each format, read by the parser and by a second reading."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from dynamo_structural_tags.formats import FORMATS
from support.bench import Bench
from support.tool_walks import LIMIT, Tally, tally

#: Finished calls of each format.
CALLS, QUICK_CALLS = 10_000, 300
SEED = 6


def walked(name: str, calls: int) -> Tally:
    return tally(FORMATS[name], SEED, calls)


def run(bench: Bench) -> None:
    calls = QUICK_CALLS if bench.quick else CALLS
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        walks = {name: pool.submit(walked, name, calls) for name in FORMATS}
        for name, walk in walks.items():
            _record(bench, name, walk.result(), calls)
    bench.note(
        f"Each walk: at most {LIMIT} tokens of the embedded model's tokenizer, drawn evenly from the mask; with a "
        "probability of 0.02, 0.1 or 0.3 per token a text that closes something is begun."
    )


def _record(bench: Bench, name: str, found: Tally, calls: int) -> None:
    bench.row(f"{name}: finished calls", "", ours=[found.calls], aim=f">= {calls}")
    bench.row(f"{name}: walks that finish", "", ours=[found.finish_rate], aim=">= 0.90")
    bench.row(f"{name}: undeclared names", "", ours=[found.undeclared], aim="== 0")
    bench.row(f"{name}: schema violations", "", ours=[found.violations], aim="== 0")
    bench.row(f"{name}: disagreements", "", ours=[found.disagreements], aim="== 0")
    bench.note(
        f"{name}: {found.walks} walks, {found.tokens / max(found.walks, 1):.0f} tokens each; refused because no "
        f"grammar excludes them: {found.duplicates} answers with a duplicate key, {found.replaced} that are too long "
        f"where bytes became U+FFFD; {found.unrepresentable} requests refused at once."
    )
    for example in found.examples:
        bench.note(f"{name}: {example}")
