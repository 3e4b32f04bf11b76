# SPDX-License-Identifier: Apache-2.0
"""Compile the CPU kernel into the wheel, where there is a compiler: such a wheel needs none where it is installed."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledKernel(BuildHookInterface):  # type: ignore[misc]  # hatchling is not in the environment of mypy
    """Hatchling's hook: adds the library, and names the platform it is for. An editable install compiles on first use.

    The library does not depend on the version of Python, and asks the processor at run time what it may use.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, before the wheel's files are collected."""
        if self.target_name != "wheel" or version == "editable":
            return
        package = Path(self.root) / "src" / "flashinfer_nvfp4_mla"
        spec = importlib.util.spec_from_file_location("_build", package / "_build.py")
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        self.folder = tempfile.mkdtemp()
        try:
            build.compiler()
            library = build.compile_in(Path(self.folder))
        except build.BuildError as error:
            self.app.display_warning(f"{error}. This wheel compiles its kernel on first use")
            return
        build_data["force_include"][str(library)] = f"{package.name}/{build.LIBRARY}"
        build_data["pure_python"] = False
        # For machines like this one: PEP 600 lists neither of libgomp.so.1 and libtvm_ffi.so, which the library needs.
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what the compiler left."""
        shutil.rmtree(getattr(self, "folder", ""), ignore_errors=True)
