# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, each with a type: a refused request, arguments a format cannot write, a broken call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CallError", "CallErrorKind", "RequestError", "StructuralTagsError", "ToolCallError", "UnrepresentableError"]

CallErrorKind = Literal[
    "undeclared_tool",  # the model named a tool that the request does not offer
    "invalid_arguments",  # the arguments break the tool's schema
    "malformed_call",  # the text after a call's opening marker is not a call of this format
    "truncated_call",  # the answer ended inside a call
    "missing_call",  # a call was required and none was made
    "unexpected_call",  # a call where the request forbids one, or a second one where one is allowed
]


class StructuralTagsError(Exception):
    """Base of this package's errors."""


class RequestError(StructuralTagsError, ValueError):
    """A request that is refused before anything is generated: HTTP 400. The message begins with the JSON path."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        #: Where in the request the fault is, as in `tools[0].function.parameters.properties.city.type`.
        self.path = path
        #: What is wrong there, with the value.
        self.reason = message


class UnrepresentableError(StructuralTagsError, ValueError):
    """Arguments that a format has no text for, such as a raw string that holds the text which ends it."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path
        self.reason = message


@dataclass(frozen=True)
class CallError:
    """What is wrong with one call of an answer."""

    kind: CallErrorKind
    #: One sentence that names the tool and the value.
    message: str
    #: The tool's name as the model wrote it; None where the answer ended or broke before it was complete.
    tool: str | None = None
    #: Position of the call in the answer, from 0.
    index: int = 0
    #: JSON path inside the arguments, as in `items[2].price`; empty where the call as a whole is meant.
    path: str = ""


class ToolCallError(StructuralTagsError):
    """An answer with a broken call, under the policy `error`."""

    def __init__(self, error: CallError) -> None:
        super().__init__(f"{error.kind}: {error.message}")
        self.error = error
