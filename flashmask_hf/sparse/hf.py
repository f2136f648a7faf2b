"""Dynamic sparse attention for a whole model: `attn_implementation="flashmask_hash"` and `"flashmask_qk"`.

The two patterns of Pagliardini et al. 2023. They take causal masks with n = 1 bound: packed documents, trees, padding
and sliding windows.

Options are a dict in the (text) config under the implementation's name, such as `flashmask_hash={"n_buckets": 16}` or
`flashmask_qk={"drop": 0.3}`, or a keyword of that name in the model call. `generate` reads the config only. Under
tensor parallelism each rank hashes its heads as if they were all heads.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import PreTrainedModel

from flashmask_hf._numbers import as_integer, check_bool
from flashmask_hf.hf.attention import check_layer, layer_mask
from flashmask_hf.hf.layer_mask import LayerMask
from flashmask_hf.hf.models import state_of
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import HASH, QK
from flashmask_hf.sparse import hash_sparse_attention, qk_sparse_attention
from flashmask_hf.sparse.directions import lsh_directions
from flashmask_hf.sparse.operators import nearest


def hash_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention of one layer within hash buckets (Pagliardini et al. 2023, section 4.2).

    Queries and keys are hashed after rotary embedding, as by `lsh_buckets`. Each key-value head of each layer has its
    own directions (`lsh_directions`). Cached keys are hashed again at every step.

    Arguments as in `hf.attention.attention_forward`; the keyword `flashmask_hash` replaces the options of the config:

    * `n_buckets`: even, at least 2.
    * `seed` (default 0): chooses the directions, 0..2**32 - 1.
    * `exclude_self` (default False): whether a query ignores its own key, as in the paper and Reformer.
    * `shared_qk` (default False): whether every key has the direction of its token's query, to hash once.

    Returns:
        out [B, Sq, Hq, D of value], 0 where a query sees no key; and None for the attention weights.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is missing, unknown or out of range.
        NotImplementedError: the mask is not causal with n = 1 bound.
    """
    options = _options(
        HASH, module, kwargs, {"n_buckets": None, "seed": 0, "exclude_self": False, "shared_qk": False}
    )  # fmt: skip
    one = "use attn_implementation='flashmask' for one bucket, which is full attention"
    n_buckets = as_integer(f"{HASH}['n_buckets']", options["n_buckets"], 2, why=one)
    if n_buckets % 2:
        raise ValueError(f"{HASH}['n_buckets'] must be even, got {n_buckets}")
    seed = as_integer(f"{HASH}['seed']", options["seed"], 0, 2**32 - 1)
    for option in ("exclude_self", "shared_qk"):
        check_bool(f"{HASH}[{option!r}]", options[option])
    _check_layer(module, dropout, kwargs, HASH)
    layer = layer_mask(module, query, key, attention_mask, kwargs)
    mask = _sortable_mask(HASH, layer)
    directions = lsh_directions(key.detach(), seed, getattr(module, "layer_idx", None) or 0, n_buckets // 2)
    q_bucket = nearest(query.detach(), directions)
    same_buckets = options["shared_qk"] and query.shape == key.shape
    out = hash_sparse_attention(
        query,
        key,
        value,
        q_bucket,
        q_bucket if same_buckets else nearest(key.detach(), directions),
        scale=scaling,
        exclude_self=options["exclude_self"],
        mask=mask,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        n_buckets=n_buckets,
    )
    return out.transpose(1, 2), None


def qk_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention of one layer with dropped queries and keys (Pagliardini et al. 2023, section 4.3).

    In training every head drops queries and keys at random, by torch's generator of the device. Evaluation drops
    nothing.

    Arguments as in `hf.attention.attention_forward`; the keyword `flashmask_qk` replaces the options of the config:
    `drop`, the probability of dropping a query, and a key. The keywords `q_keep` [B, Hq, Sq] and `k_keep`
    [B, Hkv, Skv], bool, replace the draws, also in evaluation.

    Returns:
        out [B, Sq, Hq, D of value], 0 where a query is dropped or sees no key; and None for the attention weights.

    Raises:
        TypeError: `drop` or a keep has the wrong type.
        ValueError: an option is missing, unknown or out of range; or one keep is missing or does not fit.
        NotImplementedError: rows are dropped under a mask that is not causal with n = 1 bound.
    """
    _check_layer(module, dropout, kwargs, QK)
    layer = layer_mask(module, query, key, attention_mask, kwargs)
    q_keep, k_keep = (kwargs.get(name) for name in ("q_keep", "k_keep"))
    if (q_keep is None) != (k_keep is None):
        raise ValueError("q_keep and k_keep must be given together; pass an all-True tensor for the missing one")
    settings: dict[str, Any] = {"scale": scaling, "softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux")}
    if q_keep is None or k_keep is None:
        drop = _drop_probability(module, kwargs)
        if drop == 0:
            out = layer.attend(query, key, value, **settings)
            return out.transpose(1, 2), None
        q_keep, k_keep = (torch.rand(x.shape[:3], device=x.device) >= drop for x in (query, key))
    out = qk_sparse_attention(query, key, value, q_keep, k_keep, mask=_sortable_mask(QK, layer), **settings)
    return out.transpose(1, 2), None


def _check_layer(module: nn.Module, dropout: float, kwargs: dict[str, Any], implementation: str) -> None:
    """Refuse dropout in training; then as `check_layer`."""
    if dropout > 0 and module.training:
        raise NotImplementedError(
            f"dropout={dropout} is not implemented by attn_implementation='{implementation}'; load the model with "
            "attention dropout 0, or use 'flashmask'"
        )
    check_layer(module, kwargs, implementation)


def warn_of_unread_options(model: PreTrainedModel) -> None:
    """Warn, once per model, if its attention ignores options of sparse attention in its config.

    `save_pretrained` does not save the name of the attention.
    """
    config: Any = model.config
    asked, names = config._attn_implementation, (HASH, QK) if model.training else (HASH,)
    unread = [name for name in names if getattr(config, name, None) is not None]
    if not unread or asked in (HASH, QK) or is_compiling() or state_of(model).has_warned:
        return
    state_of(model).has_warned = True
    warnings.warn(
        f"config.{unread[0]} has options of sparse attention, but attn_implementation='{asked}' is full attention; "
        f"call model.set_attn_implementation('{unread[0]}'), or set config.{unread[0]} to None for full attention",
        stacklevel=2,
    )


def _drop_probability(module: nn.Module, kwargs: dict[str, Any]) -> float:
    """Return the probability of dropping a row: 0 in evaluation, where options may be missing but not wrong."""
    drop = _options(QK, module, kwargs, {"drop": None if module.training else 0.0})["drop"]
    if not isinstance(drop, (int, float)) or isinstance(drop, bool):
        raise TypeError(f"{QK}['drop'] must be a number, got {type(drop).__name__}")
    if not 0 <= drop <= 1:
        raise ValueError(f"{QK}['drop'] is a probability, must be in 0..1, got {drop}")
    return drop if module.training else 0.0


def _options(name: str, module: nn.Module, kwargs: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the checked options of the call, else of the config. The first is required if its default is None."""
    given = kwargs.get(name)
    given = getattr(getattr(module, "config", None), name, None) if given is None else given
    first = next(iter(defaults))
    way_out = f"set config.{name} = {{{first!r}: ...}}, or pass {name}={{...}}"
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict of options, got {type(given).__name__}; {way_out}")
    options = {**defaults, **(given or {})}
    if len(options) > len(defaults):
        unknown = next(option for option in options if option not in defaults)
        raise ValueError(f"{name} has no option {unknown!r}; it takes {', '.join(map(repr, defaults))}")
    if options[first] is None:
        raise ValueError(
            f"{name} lacks {first!r}; {way_out} to a call or from_pretrained (inside text_config={{...}} if the model "
            "has one)"
        )
    return options


def _sortable_mask(name: str, layer: LayerMask) -> FlashMask:
    """Return the mask of a layer, or raise if sorted rows cannot have it."""
    mask = layer.mask
    if layer.keys is not None or not mask.causal or mask.indices.shape[-1] != 1:
        kind = "causal" if mask.causal else "not causal"
        raise NotImplementedError(
            f"'{name}' takes causal masks with n = 1 bound, got {kind}, n = {mask.indices.shape[-1]}; use 'flashmask' "
            "(a static cache makes such masks, as do trees deeper than a sliding window)"
        )
    return mask
