# SPDX-License-Identifier: Apache-2.0
"""Results as JUnit XML, for the test page of a CI system."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from ._results import ABSENT, CaseResult, Run
from ._text import literal, printable

__all__ = ["junit"]


def junit(run: Run) -> str:
    """A `<testsuite>` for each area, a `<testcase>` for each case; to be written as UTF-8.

    A case that failed is a `<failure>`. An inconclusive one is `<skipped>` where the profile does not require it; where
    it does, it is an `<error>`, because it was not passed and a CI system must not show it as if it were. What XML
    cannot carry is escaped as in JSON. Elements and attributes are those of the schema of Ant's JUnit task
    (https://github.com/windyroad/JUnit-Schema, JUnit.xsd), the strictest of those in use.
    """
    root = ElementTree.Element("testsuites")
    areas: dict[str, list[CaseResult]] = {}
    for result in run.results:
        areas.setdefault(result.area, []).append(result)
    for number, (area, results) in enumerate(areas.items()):
        _suite(root, run, number, area, results)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _suite(root: ElementTree.Element, run: Run, number: int, area: str, results: Sequence[CaseResult]) -> None:
    inconclusive = [result for result in results if result.verdict == "inconclusive"]
    errors = sum(result.required for result in inconclusive)
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        name=printable(area),
        package="tool-conformance",
        id=str(number),
        tests=str(len(results)),
        failures=str(sum(result.verdict == "fail" for result in results)),
        errors=str(errors),
        skipped=str(len(inconclusive) - errors),
        time=f"{sum(result.seconds for result in results):.3f}",
        timestamp=run.started.removesuffix("Z"),  # the schema has no time zone; it is UTC
        hostname="localhost",  # the schema's word for "not told"; whom the run asked is a property
    )
    facts = {
        "base_url": run.endpoint.base_url,
        "model": run.endpoint.model,
        "api": run.endpoint.api,
        "profile": run.profile,
        "version": run.version,
    }
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in facts.items():
        ElementTree.SubElement(properties, "property", name=name, value=printable(value))
    for result in results:
        _case(suite, result)
    ElementTree.SubElement(suite, "system-out")
    ElementTree.SubElement(suite, "system-err")


def _case(suite: ElementTree.Element, result: CaseResult) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=f"tool-conformance.{printable(result.area)}",
        name=printable(result.case.partition("/")[2] or result.case),
        time=f"{result.seconds:.3f}",
    )
    if result.verdict == "pass":
        return
    kind = "failure" if result.verdict == "fail" else "error" if result.required else "skipped"
    outcome = ElementTree.SubElement(case, kind, message=printable(result.remark))
    if kind != "skipped":
        outcome.set("type", result.verdict)
    lines = [result.fault, result.remark]
    for exchange in result.exchanges:
        for difference in exchange.differences:
            lines.append(f"{exchange.label}: {difference.message}")
            for name, value in (("expected", difference.expected), ("got", difference.got)):
                if value is not ABSENT:
                    lines.append(f"  {name}: {literal(value)}")
    outcome.text = "\n".join(printable(line, keep="\n") for line in lines)
