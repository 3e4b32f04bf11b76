# SPDX-License-Identifier: Apache-2.0
"""The plugin template's README holds the commands that make a plugin of it: followed, they leave a working package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_the_readmes_commands_turn_the_template_into_a_plugin(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "packages" / "_template", tmp_path / "packages" / "_template")
    readme = (REPOSITORY / "packages" / "_template" / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```bash\n(.*?)```", readme, re.DOTALL)
    assert block is not None
    subprocess.run(["bash", "-euo", "pipefail", "-c", block[1]], cwd=tmp_path, check=True, timeout=60)

    plugin = tmp_path / "packages" / "vllm-example-plugin"
    files = [path for path in plugin.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    left = [path for path in files if re.search(r"plugin[-_]template", str(path) + path.read_text(encoding="utf-8"))]
    assert left == []
    assert 'name = "vllm-example-plugin"' in (plugin / "pyproject.toml").read_text(encoding="utf-8")
    code = "import vllm_example_plugin as p; p.check(); print(p.__version__)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=plugin / "src", check=True, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.strip()
