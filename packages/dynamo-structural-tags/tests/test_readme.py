# SPDX-License-Identifier: Apache-2.0
"""The README says what the code does: its tables of keywords and formats, and its example."""

from __future__ import annotations

import re
from pathlib import Path

from dynamo_structural_tags import FORMATS
from dynamo_structural_tags._schema import CHECKED, ENFORCED

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


def table(head: str) -> dict[str, str]:
    """Return a table of the README, first column without its quotes -> second."""
    lines = README[README.index(head) :].splitlines()[2:]
    rows = (line.strip("| ").split(" | ") for line in lines[: lines.index("")])
    return {row[0].strip("`"): row[1] for row in rows}


def test_the_tables_of_keywords_are_those_of_the_code() -> None:
    assert table("| enforced in generation |") == ENFORCED
    assert table("| checked after generation |") == CHECKED
    assert not set(ENFORCED) & set(CHECKED)


def test_the_table_of_formats_is_complete() -> None:
    assert list(table("| name | models |")) == list(FORMATS)


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(code, {})  # the README's own text
