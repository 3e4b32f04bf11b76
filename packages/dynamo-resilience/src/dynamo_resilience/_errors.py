# SPDX-License-Identifier: Apache-2.0
"""What the gateway raises."""

from __future__ import annotations

__all__ = ["ConfigError", "GatewayError", "LeaseLost", "Rejected", "StoreUnavailable"]


class GatewayError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(GatewayError):
    """A configuration that cannot be used; the message names the file, the key and the value."""


class StoreUnavailable(GatewayError):
    """The shared store did not answer in time, or not at all; the message says what was asked and what came instead."""


class LeaseLost(GatewayError):
    """The capacity a request was admitted on is no longer held: admit it again before sending."""


class Rejected(GatewayError):
    """A request was not admitted: the queue is full, its deadline is too near or has passed, or the gateway drains.

    Args:
        reason: one of `queue_full`, `deadline`, `draining`, `no_capacity`.
        message: for the client.
        retry_after_s: when to come again, from the pool's measured drain rate; None where nothing is known.
    """

    def __init__(self, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s
