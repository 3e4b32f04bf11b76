# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration. Build: `sphinx-build -W --keep-going -n -b html docs docs/_build/html`."""

from __future__ import annotations

project = "serving-stack"
author = "The serving-stack authors"
project_copyright = author

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # the anchors that GitHub gives, so that a link works in both places

html_theme = "furo"
html_title = project
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "native"
