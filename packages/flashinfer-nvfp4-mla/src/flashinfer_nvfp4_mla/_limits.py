# SPDX-License-Identifier: Apache-2.0
"""How fast decode over 352-byte rows can be at best, so that any measured time prints beside its limit."""

from __future__ import annotations

from dataclasses import dataclass

_ROW_BYTES, _GRANULE = 352, 64
_SCORED, _WEIGHTED = 576, 512


@dataclass(frozen=True)
class Device:
    """What a machine can do: memory in bytes per second, multiply and add as two operations per second."""

    name: str
    bytes_per_s: float
    flops_per_s: float


#: GPUs by name: memory as specified; dense 16-bit products as specified, on H200 as measured (79 % of that).
DEVICES = {
    device.name: device
    for device in (Device("h200", 4.8e12, 790e12), Device("gb200", 8e12, 2.5e15), Device("b300", 8e12, 2.5e15))
}


@dataclass(frozen=True)
class Limits:
    """What a launch has to move and to compute, and the seconds that takes at least, each alone."""

    #: Bytes of the rows; and as memory hands them out, in pieces of 64: six of them per row.
    bytes: int
    granule_bytes: int
    #: Operations of both products.
    flops: int
    memory_s: float
    granule_s: float
    compute_s: float

    @property
    def bound(self) -> str:
        """What takes longer: "memory" (the bytes of the rows) or "compute"."""
        return "memory" if self.memory_s >= self.compute_s else "compute"

    @property
    def seconds(self) -> float:
        """The limit: whichever takes longer."""
        return max(self.memory_s, self.compute_s)


def limits(tokens: int, heads: int, topk: int, device: str | Device) -> Limits:
    """Return the roofline of `nvfp4_sparse_mla_decode`: `tokens * topk` rows read once from memory, nothing else.

    Args:
        tokens: Query tokens.
        heads: Heads of each; all of them share its rows.
        topk: Rows of each token.
        device: A name from `DEVICES`, or a `Device` with what was measured, as on a CPU.

    Raises:
        TypeError: a number is not an int, or the device is neither of these.
        ValueError: a number is negative, or the device is unknown.
    """
    for name, number in (("tokens", tokens), ("heads", heads), ("topk", topk)):
        if not isinstance(number, int):
            raise TypeError(f"{name} must be an int, got {number!r}")
        if number < 0:
            raise ValueError(f"{name} must not be negative, got {number}")
    if isinstance(device, str):
        if device not in DEVICES:
            raise ValueError(f"device must be one of {', '.join(DEVICES)}, or a Device, got {device!r}")
        device = DEVICES[device]
    if not isinstance(device, Device):
        raise TypeError(f"device must be one of {', '.join(DEVICES)}, or a Device, got {device!r}")
    rows = tokens * topk
    read, granules = rows * _ROW_BYTES, rows * -(-_ROW_BYTES // _GRANULE) * _GRANULE
    flops = 2 * rows * (_SCORED + _WEIGHTED) * heads
    return Limits(
        bytes=read,
        granule_bytes=granules,
        flops=flops,
        memory_s=read / device.bytes_per_s,
        granule_s=granules / device.bytes_per_s,
        compute_s=flops / device.flops_per_s,
    )
