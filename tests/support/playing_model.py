# SPDX-License-Identifier: Apache-2.0
"""A fake for a model that was trained for tools: the tiny one, made to say what a conformance case's reference says.

A logits processor of vLLM's (`--logits-processors support.playing_model:PlayingModel`). It finds in a request's prompt
which case of `tool-conformance` is asked (`case_player`), writes what a well-behaved model would answer in the model's
own format, and adds a large number to the logit of that text's next token. A grammar still wins: what it has masked
stays masked. Where that leaves none of the text's tokens, an end is played that is open: of the answer, the argument,
the call.

Of cases that a grammar forces (`needs: [forced]`) the end of the reasoning alone is played, after what the reference
has of it, unless the file `PLAYED` says `forced`: random weights answer them.

Not a measure of any model: it shows what servers make of the answers of one that means and writes everything right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from dynamo_structural_tags import Format, RequestError, ToolPolicy, UnrepresentableError, get_format, read_request
from dynamo_structural_tags.conformance._case import load_cases
from support.case_player import CasePlayer, Speech
from support.three_servers import PLAYED

__all__ = ["PlayingModel", "texts"]

#: Added to a logit. The tiny model's own are below 100.
BIAS = 1e4


def texts(form: Format, speech: Speech, thinks: bool, forced: bool = False) -> tuple[list[str], bool]:
    """Return the texts that say the same, in the order of preference, and whether the answer ends with them.

    The first is in the model's own format, the second leaves out the words before the calls. The others are the JSON
    that some servers' grammars demand instead: of required calls, and of a named one.

    Args:
        form: The model's format.
        speech: What is to be said.
        thinks: The prompt ends inside the reasoning.
        forced: Say what a grammar forces, too; without, of such a case the reasoning alone.
    """
    begin = f"{speech.reasoning}{form.think[1]}{form.reasoning_separator}" if thinks else ""
    if not forced and "forced" in speech.case.needs and speech.case.needs <= {"forced", "reasoning"}:
        return ([begin] if thinks else []), False
    if not speech.calls:
        return [begin + speech.text], True
    separated = form.content_separator if speech.text or form.separator_always else ""
    try:
        calls = form.render_calls(speech.calls, policy=_policy(speech.case.request))
    except UnrepresentableError as error:
        return [f"{begin}I cannot write that: {error}"], True
    alone = (form.content_separator if form.separator_always else "") + calls
    required = ", ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in speech.calls)
    written = (speech.text + separated + calls, alone, f"[{required}]", speech.calls[0][1])
    return [begin + one for one in written], True


def _policy(request: Any) -> ToolPolicy | None:
    try:
        return read_request({"tools": request.get("tools")})
    except RequestError:
        return None


@dataclass
class _Script:
    """What one request's generation is to be."""

    #: The tokens so far; vLLM adds to it.
    output: list[int]
    #: Tokens of the texts that are still possible.
    left: list[list[int]]
    #: After the text comes the end, not whatever the model likes.
    ends: bool
    #: Tokens of what may end an answer that has left all texts.
    closings: list[list[int]]
    #: So many tokens of the output were compared.
    read: int = field(default=0)

    def next(self, ends: Sequence[int]) -> Iterator[int]:
        """Yield the tokens one of which is to come next, the best first: what is taken must be open."""
        new = self.output[self.read :]
        self.left = [one for one in self.left if one[self.read : self.read + len(new)] == new]
        self.read += len(new)
        for one in self.left:
            yield from one[self.read : self.read + 1] or (ends if self.ends else ())
        if self.ends:
            # None of them was.
            self.left = [self.output + closing for closing in self.closings]
            yield from ends
            yield from (closing[0] for closing in self.closings)


class PlayingModel(LogitsProcessor):  # type: ignore[misc]
    """The logits processor; vLLM makes one in each worker."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        folder = Path(vllm_config.model_config.model)
        self._told = folder / PLAYED
        self._form = get_format(json.loads(self._told.read_text("utf-8"))["format"])
        self._ends: list[int] = json.loads((folder / "generation_config.json").read_text("utf-8"))["eos_token_id"]
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        call_end, arg_end = self._form.call_end, self._form.arg_end
        closings = (*((arg_end + call_end,) if arg_end else ()), f'"}}{call_end}', f"}}{call_end}", call_end)
        self._closings = [self._encode(text) for text in closings]
        self._player = CasePlayer(load_cases())
        self._scripts: dict[int, _Script] = {}

    def is_argmax_invariant(self) -> bool:
        """Say no: it decides what comes next."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Take requests that come, go and move."""
        process_dict_updates(self._scripts, batch_update, self._script)

    def apply(self, logits: Any) -> Any:
        """Raise the logit of each text's next token, of shape [requests, vocabulary]."""
        for row, script in self._scripts.items():
            for token in script.next(self._ends):
                if logits[row, token] > float("-inf"):
                    logits[row, token] += BIAS
                    break
        return logits

    def _script(self, _: Any, prompt: list[int] | None, output: list[int]) -> _Script | None:
        text = self._tokenizer.decode(prompt or [], skip_special_tokens=False)
        speech = self._player.from_text(text)
        if speech is None:
            return None
        thinks = text.rstrip().endswith(self._form.think[0])
        forced = json.loads(self._told.read_text("utf-8"))["forced"]  # it may change while a server runs
        said, ends = texts(self._form, speech, thinks, forced)
        return _Script(output, [self._encode(one) for one in said], ends, self._closings)

    def _encode(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found
