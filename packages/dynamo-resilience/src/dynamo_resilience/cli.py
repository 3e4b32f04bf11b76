# SPDX-License-Identifier: Apache-2.0
"""The command `dynamo-gateway`."""

from __future__ import annotations

import argparse
import gc
import logging
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from ._errors import ConfigError
from .gateway import Gateway, check
from .version import __version__

__all__ = ["main"]

_LEVELS = ("debug", "info", "warning", "error")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 0, 1 for a fault at run time, 2 for a configuration or arguments."""
    parser = argparse.ArgumentParser(
        prog="dynamo-gateway",
        description="The gateway in front of one or more sites of Dynamo frontends.",
        epilog="SIGHUP, or a change of the file, reloads it; SIGTERM drains and stops, a second one stops at once.",
    )
    parser.add_argument("--config", metavar="FILE", type=Path, required=True, help="the configuration, YAML")
    parser.add_argument("--check", action="store_true", help="only check the file, and print what it would serve")
    parser.add_argument("--replica", metavar="NAME", help="this replica's name; the host's by default")
    parser.add_argument("--log-level", metavar="LEVEL", choices=_LEVELS, default="info", help=", ".join(_LEVELS))
    parser.add_argument("--version", action="version", version=f"dynamo-gateway {__version__}")
    options = parser.parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("dynamo_resilience").setLevel(options.log_level.upper())
    try:
        if options.check:
            print(uvloop.run(check(options.config)))
        else:
            _raise_open_files()
            # Nearly everything a request makes is gone with its last reference. Looking for cycles at every 700 new
            # objects, with thousands of requests open, would take a good part of the processor time.
            gc.freeze()
            gc.set_threshold(20_000, 20, 100)
            uvloop.run(_run(options.config, options.replica))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"dynamo-gateway: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before it served: afterwards SIGINT is a drain
        return 1
    return 0


async def _run(path: Path, name: str | None) -> None:
    await Gateway(path, name=name).run()


def _raise_open_files() -> None:
    """Take as many open files as the system gives: a stream needs two, and the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2**20 if hard == resource.RLIM_INFINITY else min(hard, 2**20)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


if __name__ == "__main__":
    sys.exit(main())
