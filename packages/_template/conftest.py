# SPDX-License-Identifier: Apache-2.0
"""The template is not installed, so its tests are not collected; a copy of it deletes this file."""

from pathlib import Path

collect_ignore_glob = ["tests/*"] if Path(__file__).parent.name == "_template" else []
