# SPDX-License-Identifier: Apache-2.0
"""Check what a reader would copy or click: links, anchors, shell blocks, `serving-stack` and `nox` commands.

Usage: `python docs/check.py`, in an environment where `serving-stack` and `markdown-it-py` are installed. Prints each
fault as `file:line: text` and exits with 1 if there is one. Addresses on other hosts are not visited.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

#: What is checked, relative to the repository's root.
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "packages/*/README.md",
    "integration/README.md",
    "patches/*.md",
)

#: Info strings of the code blocks that are taken for shell.
SHELL = {"bash", "sh", "console"}

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_BEFORE_A_COMMAND = {"env", "exec", "sudo", "time", "!", "if", "then", "else", "while", "until", "do"}
_HERE_DOCUMENT = re.compile(r"(?<!<)<<(?!<)-?\s*(['\"]?)(\w+)\1")
_HTML_ANCHOR = re.compile(r"<[^>]*\b(?:id|name)=[\"']([^\"']+)[\"']")
_MYST_TARGET = re.compile(r"^\(([^()\s]+)\)=$", re.MULTILINE)


class Fault(NamedTuple):
    """One thing that is wrong, and where: `line` counts from 1 in the file `page`."""

    page: Path
    line: int
    text: str


class Command(NamedTuple):
    """One simple command of a shell script: its words without assignments and redirections; `line` counts from 0."""

    line: int
    words: list[str]


def parse(text: str) -> list[Token]:
    """Return the tokens of a Markdown text (CommonMark with tables)."""
    return MarkdownIt("commonmark").enable("table").parse(text)


def slug(title: str) -> str:
    """Return the anchor that GitHub and MyST give a heading."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Return every anchor of a Markdown text: headings (a repeated one gets `-1`, `-2`, …), HTML ids, MyST targets."""
    found: set[str] = set()
    tokens = parse(text)
    for number, token in enumerate(tokens):
        if token.type == "heading_open":
            children = tokens[number + 1].children or []
            base = slug("".join(child.content for child in children if child.type in ("text", "code_inline")))
            name, repeat = base, 0
            while name in found:
                repeat += 1
                name = f"{base}-{repeat}"
            found.add(name)
        for part in (token, *(token.children or [])):
            if part.type in ("html_block", "html_inline"):
                found.update(_HTML_ANCHOR.findall(part.content))
        if token.type == "inline":
            found.update(_MYST_TARGET.findall(token.content))
    return found


def inline(tokens: Sequence[Token]) -> Iterator[tuple[int, Token]]:
    """Yield each inline token with its line, counted from 1."""
    for token in tokens:
        if token.children:
            line = token.map[0] + 1 if token.map else 1
            for child in token.children:
                if child.type in ("softbreak", "hardbreak"):
                    line += 1
                yield line, child


def check_links(root: Path, page: Path, tokens: Sequence[Token]) -> Iterator[Fault]:
    """Yield a fault for each relative link or image of `page` whose file or anchor does not exist under `root`."""
    for line, token in inline(tokens):
        target = str(token.attrGet("href") or token.attrGet("src") or "")
        if token.type not in ("link_open", "image"):
            continue
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        if parts.path.startswith("/"):
            yield Fault(page, line, f"link {target!r} is absolute: it works on no checkout")
            continue
        file = (page.parent / unquote(parts.path)).resolve() if parts.path else page.resolve()
        if not file.is_relative_to(root.resolve()):
            yield Fault(page, line, f"link {target!r} leaves the repository")
        elif not file.exists():
            yield Fault(page, line, f"link {target!r}: no such file")
        elif parts.fragment and file.suffix == ".md":
            if unquote(parts.fragment) not in anchors(file.read_text(encoding="utf-8")):
                yield Fault(page, line, f"link {target!r}: no such heading or anchor in {file.name}")
        elif not target:
            yield Fault(page, line, "link without a target")


def shell_blocks(tokens: Sequence[Token]) -> Iterator[tuple[int, str]]:
    """Yield each shell block as (line of its first line, counted from 1; script, line for line).

    Of a `console` block only what follows a `$ ` prompt, or a continued line's `> `, is script; output becomes blank
    lines.
    """
    for token in tokens:
        words = token.info.split() if token.type == "fence" else []
        if not words or words[0] not in SHELL or token.map is None:
            continue
        script = token.content
        if words[0] == "console":
            lines: list[str] = []
            for line in script.splitlines():
                continues = bool(lines) and lines[-1].endswith("\\")
                if line.startswith("$ "):
                    lines.append(line[2:])
                else:
                    lines.append(line.removeprefix("> ") if continues else "")
            script = "\n".join(lines) + "\n"
        yield token.map[0] + 2, script


def check_syntax(page: Path, first: int, script: str) -> Iterator[Fault]:
    """Yield a fault if a block is empty of commands or `bash -n` refuses it."""
    if not script.strip():
        yield Fault(page, first, "shell block without a command (a console block marks commands with '$ ')")
        return
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=30)
    complaint = done.stderr.strip()
    if done.returncode or complaint:
        text = complaint.splitlines()[0] if complaint else f"bash -n exits with {done.returncode}"
        number = re.search(r"line (\d+): (.*)", text)
        line, text = (int(number[1]), number[2]) if number else (1, text)
        yield Fault(page, first + line - 1, f"shell: {text}")


def _tokens(text: str) -> list[str]:
    text = re.sub(r"(?<!\S)\d+(?=[<>])", "", text)  # the file descriptor of `2>`
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def _split(words: Sequence[str]) -> Iterator[list[str]]:
    """Split one line's tokens at operators; drop redirections, assignments and words that only introduce a command."""
    command: list[str] = []
    skip = False
    for word in (*words, ";"):
        if skip:
            skip = False
        elif set(word) <= set("<>&|") and set(word) & set("<>"):
            skip = True
        elif word and set(word) <= set("();&|"):
            while command and (_ASSIGNMENT.match(command[0]) or command[0] in _BEFORE_A_COMMAND):
                command.pop(0)
            if command:
                yield command
            command = []
        else:
            command.append(word)


def commands(script: str) -> Iterator[Command]:
    """Yield the simple commands of a shell script.

    A small reader, enough for documentation: it expands nothing and skips here-documents.
    """
    lines = script.splitlines()
    number = 0
    while number < len(lines):
        start, text = number, lines[number]
        number += 1
        while number < len(lines) and text.endswith("\\"):
            text = text[:-1] + lines[number]
            number += 1
        while True:
            try:
                words = _tokens(text)
                break
            except ValueError:  # a quotation that goes on in the next line
                if number == len(lines):
                    words = []
                    break
                text += "\n" + lines[number]
                number += 1
        for command in _split(words):
            yield Command(start, command)
        for _, end in _HERE_DOCUMENT.findall(text):
            while number < len(lines) and lines[number].strip() != end:
                number += 1
            number += 1


def arguments(words: Sequence[str], name: str) -> list[str] | None:
    """Return what follows `name` where the command calls it (by any path, or as `python -m`), otherwise None."""
    if Path(words[0]).name == name:
        return list(words[1:])
    if Path(words[0]).name.startswith("python") and list(words[1:3]) == ["-m", name.replace("-", "_")]:
        return list(words[3:])
    return None


def check_serving_stack(words: Sequence[str], parser: argparse.ArgumentParser) -> str | None:
    """Return what the command line's own parser says against `words`, or None."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(io.StringIO()):
            parser.parse_args(list(words))
    except SystemExit as stop:
        if stop.code not in (0, None):
            lines = complaint.getvalue().strip().splitlines() or [f"exit status {stop.code}"]
            return lines[-1]
    return None


def nox_sessions(noxfile: Path) -> set[str]:
    """Return the session names that a noxfile declares, read without running it."""
    names = set()
    for node in ast.walk(ast.parse(noxfile.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            if ast.unparse(call.func if call else decorator) not in ("nox.session", "session"):
                continue
            given = [word.value for word in call.keywords if word.arg == "name"] if call else []
            names.add(str(ast.literal_eval(given[0])) if given else node.name)
    return names


def check_nox(words: Sequence[str], sessions: Collection[str]) -> str | None:
    """Return a message if the words after `nox` ask for a session that is not in `sessions`, or None."""
    asked: list[str] = []
    taking = False
    for word in words:
        if word == "--":
            break
        if word.startswith("-"):
            taking = word in ("-s", "--session", "--sessions", "-e")
        elif taking:
            asked.append(re.sub(r"(-\d[\d.]*)?(\(.*\))?$", "", word))  # tests-3.11, tests(lowest)
    unknown = [name for name in asked if name not in sessions]
    return f"nox has no session {unknown[0]!r}" if unknown else None


def check_page(root: Path, page: Path, parser: argparse.ArgumentParser, sessions: Collection[str]) -> Iterator[Fault]:
    """Yield the faults of one page.

    Parameters:
        root: the repository; links may not leave it.
        page: a Markdown file.
        parser: the command line of `serving-stack`.
        sessions: the names that `nox -s` may ask for.
    """
    tokens = parse(page.read_text(encoding="utf-8"))
    yield from check_links(root, page, tokens)
    for first, script in shell_blocks(tokens):
        yield from check_syntax(page, first, script)
        for command in commands(script):
            yield from _check_command(page, first + command.line, command.words, parser, sessions, whole=True)
    for line, token in inline(tokens):
        if token.type == "code_inline":
            yield from _check_command(page, line, token.content.split() or [""], parser, sessions, whole=False)


def _check_command(
    page: Path,
    line: int,
    words: Sequence[str],
    parser: argparse.ArgumentParser,
    sessions: Collection[str],
    *,
    whole: bool,
) -> Iterator[Fault]:
    """Check one command. In running text (`whole` is false) it may be a synopsis: only the sub-command counts."""
    given = arguments(words, "serving-stack")
    if given is not None:
        said = None
        if whole:
            said = check_serving_stack(given, parser)
        elif given and re.fullmatch(r"[a-z][\w-]*", given[0]):
            said = check_serving_stack([given[0], "--help"], parser)
        if said:
            yield Fault(page, line, f"serving-stack: {said}")
    given = arguments(words, "nox")
    if given is not None and (said := check_nox(given, sessions)):
        yield Fault(page, line, said)


def check(root: Path, parser: argparse.ArgumentParser, sessions: Collection[str]) -> list[Fault]:
    """Return the faults of every page under `root`, in the order of `PAGES`."""
    pages = [page for pattern in PAGES for page in sorted(root.glob(pattern))]
    return [fault for page in pages for fault in check_page(root, page, parser, sessions)]


def main(argv: Sequence[str] | None = None) -> int:
    """Check the repository; return 1 if there is a fault, otherwise 0."""
    options = argparse.ArgumentParser(description="Check links, shell blocks and commands in the documentation.")
    options.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the repository")
    root: Path = options.parse_args(argv).root
    from serving_stack.cli import parser

    faults = check(root, parser(), nox_sessions(root / "noxfile.py"))
    for fault in faults:
        print(f"{fault.page.relative_to(root)}:{fault.line}: {fault.text}")
    print(f"docs/check: {len(faults)} fault(s)", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
