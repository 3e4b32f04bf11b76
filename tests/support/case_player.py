# SPDX-License-Identifier: Apache-2.0
"""What a well-behaved model says to the prompt of a conformance case: it looks the answer up (`CasePlayer`).

The case is the one whose user message stands last in the prompt, and the turn follows from the messages and tool
results after it. So it plays behind any server, as long as the server shows the model its messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_structural_tags.conformance._case import Case

__all__ = ["CasePlayer", "Speech", "shown"]


@dataclass(frozen=True)
class Speech:
    """What the model says: reasoning, text, and calls as `(name, arguments)`, the arguments as JSON text."""

    #: The copy that is played, with its number filled in.
    case: Case
    #: From 0.
    turn: int
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class _Prompt:
    text: str
    case: Case
    turn: int


class CasePlayer:
    """Plays the `reference` of these cases."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self._prompts: list[_Prompt] = []
        for case in cases:
            for number in range(1, case.copies + 1):
                copy = case.numbered(number)
                first = _first_prompt(copy)
                texts = ([(0, first)] if first else []) + [(i, turn.user) for i, turn in enumerate(copy.then, 1)]
                self._prompts += [_Prompt(text.strip(), copy, turn) for turn, text in texts if text]

    def from_messages(self, messages: Sequence[Mapping[str, Any]]) -> Speech | None:
        """Say what follows these messages of chat completions; see `from_text`."""
        return self.from_text(shown(messages))

    def from_text(self, prompt: str) -> Speech | None:
        """Say what follows a prompt, however it was rendered; None where no case's user message stands in it."""
        places = ((prompt.rfind(known.text), known) for known in self._prompts)
        place, known = max(places, key=lambda found: found[0], default=(-1, None))
        if known is None or place < 0:
            return None
        case, turn = known.case, known.turn
        place += len(known.text)
        # A turn that brings results alone shows by them.
        while turn < len(case.then) and case.then[turn].user is None and case.then[turn].results:
            for result in case.then[turn].results:
                place = prompt.find(result.strip(), place)
                if place < 0:
                    return _speech(case, turn, prompt)
            turn += 1
        return _speech(case, turn, prompt)


def shown(messages: Sequence[Mapping[str, Any]]) -> str:
    """Put messages in one text, as a chat template would: what the fake model reads."""
    parts = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
        called = message.get("tool_calls") or () if message.get("role") == "assistant" else ()
        functions = [call["function"] for call in called if isinstance(call, Mapping) and "function" in call]
        calls = "".join(f"\n{json.dumps(function, ensure_ascii=False)}" for function in functions)
        parts.append(f"{message.get('role')}: {'' if content is None else content}{calls}")
    return "\n".join(parts)


def _first_prompt(case: Case) -> str | None:
    """Return the last user message of the first turn, or None."""
    before = len([turn for turn in case.then if turn.user is not None])
    prompts = list(case.prompts())
    return prompts[0] if len(prompts) > before else None


def _speech(case: Case, turn: int, prompt: str) -> Speech:
    if turn >= len(case.reference):
        return Speech(case, turn, "I do not know.")
    said = case.reference[turn]
    if not all(word in prompt for word in said.get("if_seen", ())):
        return Speech(case, turn, "I do not know.")
    calls = tuple((call["name"], _text(call.get("arguments", {}))) for call in said.get("calls", ()))
    return Speech(case, turn, said.get("text", ""), said.get("reasoning", ""), calls)


def _text(arguments: Any) -> str:
    # A string is JSON text already: for what YAML cannot say.
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
