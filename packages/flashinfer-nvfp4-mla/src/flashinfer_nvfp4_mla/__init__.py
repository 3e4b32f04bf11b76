# SPDX-License-Identifier: Apache-2.0
"""4-bit latent KV cache (352-byte rows) with native sparse-MLA decode: a fast CPU kernel, and vLLM serving from it.

In vLLM, on a CPU, nothing has to be written: the package registers itself (entry point `vllm.general_plugins`), and an
engine started with `--kv-cache-dtype nvfp4_ds_mla` keeps its latent cache in rows of 352 bytes. Engines with another
type of cache are left alone.

======================================  ============================================================================
variable                                meaning
======================================  ============================================================================
`FLASHINFER_NVFP4_MLA`                  0: the plugin registers nothing
`FLASHINFER_NVFP4_MLA_FOLDING`          0: weights are left as they are; both ends of a transfer need the same
`FLASHINFER_NVFP4_MLA_SCALES`           `amax` (the default, vLLM's own arithmetic), `4over6` or `mse`: see `quantize`
`FLASHINFER_NVFP4_MLA_CHECK_INDICES`    1: a row outside the cache is an error, in every call
`FLASHINFER_NVFP4_MLA_ISA`              the CPU kernel's path: `amx`, `avx512_bf16`, `avx2` or `portable`
`FLASHINFER_NVFP4_MLA_CACHE`            where the kernel that was compiled on first use is kept
======================================  ============================================================================

By hand::

    rows = quantize(latents, rope)                                     # [..., 512] and [..., 64] -> [..., 352]
    out = nvfp4_sparse_mla_decode(query, rows, indices, bmm1_scale)    # [tokens, heads, 512]

The functions need torch, which the package does not bring: it comes with vLLM or FlashInfer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._compat import SUPPORTED, UnsupportedUpstreamError, check, folding
from .version import __version__

if TYPE_CHECKING:
    from ._folding import choose_exponent, fold, fold_model, identity
    from ._format import append, convert, dequantize, quantize
    from ._limits import DEVICES, Device, Limits, limits
    from ._op import nvfp4_sparse_mla_decode

__all__ = [
    "DEVICES",
    "SUPPORTED",
    "Device",
    "Limits",
    "UnsupportedUpstreamError",
    "__version__",
    "append",
    "check",
    "choose_exponent",
    "convert",
    "dequantize",
    "fold",
    "fold_model",
    "folding",
    "identity",
    "limits",
    "nvfp4_sparse_mla_decode",
    "quantize",
]

#: What is imported when it is asked for: it needs torch.
_LATER = {
    **dict.fromkeys(("choose_exponent", "fold", "fold_model", "identity"), "_folding"),
    **dict.fromkeys(("append", "convert", "dequantize", "quantize"), "_format"),
    **dict.fromkeys(("DEVICES", "Device", "Limits", "limits"), "_limits"),
    "nvfp4_sparse_mla_decode": "_op",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{_LATER[name]}", __name__)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"{__name__}.{name} needs torch, which vLLM or FlashInfer bring") from error
    return getattr(module, name)
