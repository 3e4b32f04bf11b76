# SPDX-License-Identifier: Apache-2.0
"""What a worker's failure means to a request: try elsewhere, leave it, or tell the client.

A Dynamo client hands on the type of what a worker raised for `InvalidArgument` alone. Everything else comes as a
`ValueError`, from the call itself as an `Exception`, whose text begins with the kind: "Unavailable: Stream ended before
generation completed". Of an `HttpError` the text goes on with its message and its status in JSON.
"""

from __future__ import annotations

import json
import re

__all__ = ["BadRequest", "Refused", "SendError", "WorkerError", "interrupted", "sort_out", "to_client"]

#: How the text of an error begins.
_KIND = re.compile(r"([A-Z][A-Za-z]+): (.*)", re.DOTALL)
#: Kinds that are the client's fault, and the HTTP status of each.
_CLIENT = {
    "InvalidRequest": 400,
    "Unauthenticated": 401,
    "PermissionDenied": 403,
    "NotFound": 404,
    "PayloadTooLarge": 413,
    "UnsupportedMedia": 415,
    "NotImplemented": 501,
}
#: Kinds by which a worker says that it is full.
_FULL = {"RateLimited": 429, "CapacityExhausted": 529, "ResourceExhausted": 529}
#: All others.
_FAILED = {"DeadlineExceeded": 504, "Unavailable": 503}


class SendError(Exception):
    """A worker did not do what it was asked; the message says why.

    Args:
        reason: the message.
        status: the HTTP status a client gets where nothing else helps; None: the class's own.
    """

    status = 500

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        if status is not None:
            self.status = status


class WorkerError(SendError):
    """The worker failed: the request goes elsewhere, and it counts against the worker."""


class Refused(SendError):
    """The worker is full or leaves: the request goes elsewhere, and nothing counts against the worker."""

    status = 503


class BadRequest(SendError):
    """The client's fault: it is told so, nothing is tried again, and nothing counts against the worker."""

    status = 400


def sort_out(error: Exception) -> SendError:
    """Return what an exception out of a call to a worker, or out of its stream, means."""
    if isinstance(error, SendError):
        return error
    text = str(error) or repr(error)
    if type(error).__name__ == "InvalidArgument":
        return BadRequest(text)
    match = _KIND.match(text)
    if match is None:
        return WorkerError(text)
    kind, message = match.groups()
    status = None
    if message.startswith("{"):
        try:
            told = json.loads(message)
            message, status = str(told["message"]), int(told["code"])
        except (ValueError, TypeError, KeyError):
            pass  # not that of an HttpError
    if kind in _CLIENT:
        return BadRequest(message, status or _CLIENT[kind])
    if kind in _FULL:
        return Refused(message, status or _FULL[kind])
    # A worker that says 503 is there and takes no more; one that has left since is no failure either.
    if kind == "Unavailable" and (status == 503 or (message.startswith("instance_id=") and "not found" in message)):
        return Refused(message)
    return WorkerError(message, status or _FAILED.get(kind))


def to_client(error: SendError) -> Exception:
    """Return the exception that makes Dynamo's frontend answer a client with the error's status.

    The message goes along for a bad request alone; of others the frontend says what the status means.
    """
    from dynamo.llm.exceptions import HttpError, InvalidArgument

    if isinstance(error, BadRequest) and error.status in (400, 422):
        wrong: Exception = InvalidArgument(str(error))
        return wrong
    other: Exception = HttpError(error.status, str(error))
    return other


def interrupted(reason: str) -> Exception:
    """Return the exception on which a frontend with `--migration-limit` has the answer carried on.

    `Disconnected`, as the frontend shuns the sender of a `StreamIncomplete` or an `EngineShutdown` for some seconds.
    """
    from dynamo.llm.exceptions import Disconnected

    broken: Exception = Disconnected(reason)
    return broken
