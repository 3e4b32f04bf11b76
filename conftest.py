# SPDX-License-Identifier: Apache-2.0
"""With CI=true a test that skips has failed: what it misses should have been installed.

One thing cannot be installed, the processor: a reason that begins with `processor:` remains a skip.
Machines are noisy, so no example of Hypothesis fails by the time that it takes, with or without CI.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("noisy", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("noisy")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure that says why it skipped; an expected failure stays what it is."""
    report = yield
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        if not str(reason).startswith("Skipped: processor:"):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} skipped in CI: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for a whole module that skips itself."""
    report = yield
    if os.environ.get("CI") == "true" and report.outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} skipped in CI: {reason}"
    return report
