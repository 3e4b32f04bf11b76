# SPDX-License-Identifier: Apache-2.0
"""Each patch is reverted alone in the environment, and exactly its own file's `installed` tests fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serving_stack.patches import apply_all, load_all, missing, revert_all

PATCHES = [patch.name for patch in load_all()]
FILES = {
    name: file
    for file in sorted(Path(__file__).parent.glob("test_*.py"))
    for name in re.findall(r'^PATCH = "(.+)"$', file.read_text("utf-8"), re.MULTILINE)
}


@pytest.mark.parametrize("patch", PATCHES)
def test_without_a_patch_its_own_tests_fail_and_no_others(patch: str, forks: str) -> None:
    assert missing() == [], "nothing can be said unless every patch is applied"
    # ai-dynamo brings plugins for pytest that import vLLM.
    environment = {**os.environ, "SERVING_STACK_TEST_FORKS": forks, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def outcome(file: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "installed", str(file)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert [done.name for done in revert_all(patch=patch)] == [patch]
    try:
        with ThreadPoolExecutor(2) as pool:
            outcomes = dict(zip(FILES, pool.map(outcome, FILES.values()), strict=True))
    finally:
        apply_all(patch=patch)
    said = "\n".join(done.stdout for done in outcomes.values())
    assert {name: done.returncode for name, done in outcomes.items()} == {
        name: pytest.ExitCode.TESTS_FAILED if name == patch else pytest.ExitCode.OK for name in FILES
    }, said
