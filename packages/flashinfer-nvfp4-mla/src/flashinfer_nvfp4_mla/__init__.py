# SPDX-License-Identifier: Apache-2.0
"""4-bit latent KV cache (352-byte rows) with native sparse-MLA decode: GPU kernels and a fast CPU kernel.

Status: planned. Nothing is registered yet: importing this package changes nothing, and it has no entry point.

It will:

- quantize, dequantize and append rows, bit-exact with vLLM's writer, with several scale choices that keep the format;
- fold a power of two per layer out of the latent norm at load, and make the exponents part of the cache's identity;
- offer `nvfp4_sparse_mla_decode`, call-compatible with FlashInfer's, on a tuned reference, a C++ CPU kernel and GPU
  kernels;
- let vLLM serve from 352-byte rows on a CPU, through one registered attention backend that passes every other dtype
  on;
- state the limits of the machine beside every measured time.

Until then the package offers its version, the upstream versions it is written for (`SUPPORTED`), and `check()`, which
refuses an installed upstream outside them.
"""

from ._compat import SUPPORTED, UnsupportedUpstreamError, check
from .version import __version__

__all__ = ["SUPPORTED", "UnsupportedUpstreamError", "__version__", "check"]
