"""Dynamic sparse attention for a whole model: `attn_implementation="flashmask_hash"` and `"flashmask_qk"`.

The two patterns of Pagliardini et al. 2023 (`sparse.py`) with what chooses their buckets and dropped rows, as functions
of transformers' `AttentionInterface`. Masks are those of "flashmask" (`backend.py`), as long as they are causal ones of
the form n = 1: packed documents, trees, padding and sliding windows.

Options are a dict, in the model's config under the implementation's name, where `save_pretrained` keeps it and
`from_pretrained` and `set_attn_implementation` find it; or a keyword of the model's call, which wins:

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="flashmask_hash",
                                                 flashmask_hash={"n_buckets": 16})
    model.config.flashmask_qk = {"drop": 0.3}
    model.set_attn_implementation("flashmask_qk")
    model(**batch, flashmask_qk={"drop": 0.5})

Of a model with a `text_config` they are that config's: `text_config={"flashmask_hash": {"n_buckets": 16}}`. `generate`
takes them from the config only. Under tensor parallelism the heads of each process are hashed as if they were all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flashmask_hf import ops
from flashmask_hf.attention import flashmask_attention
from flashmask_hf.backend import visible
from flashmask_hf.mask import FlashMask
from flashmask_hf.sparse import hash_sparse_attention, qk_sparse_attention
from flashmask_hf.sparse_ops import nearest
from flashmask_hf.upstream import HASH, QK
from flashmask_hf.windows import Windowed

__all__ = ["hash_attention_forward", "qk_attention_forward"]

_KEEPS = ("q_keep", "k_keep")
_WORD = 2**32 - 1


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
    """Attention of one layer within hash buckets, in training and in evaluation (Pagliardini et al. 2023, section 4.2).

    Queries and keys fall into the buckets of `lsh_buckets`, as they come, after rotary embedding, by the same random
    directions. Each key-value head of each layer has directions of its own, which its query heads share. They depend on
    the seed, the layer's index and the numbers of heads, dimensions and buckets alone, so every forward, its
    recomputation in a backward, every step of generation and every process has the same ones, and they are no part of
    the state dict. With a cache, the keys in it are hashed again at every step.

    Args:
        module: the attention layer; `layer_idx`, `config`, `is_causal` and `training` are read.
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Skv, D].
        value: [B, Hkv, Skv, Dv].
        attention_mask: what `mask_hook` returned, or None.
        scaling: factor on the scores; None is D ** -0.5.
        dropout: must be 0 in training.
        kwargs: as in `backend.attention_forward`, and `flashmask_hash`, the options in place of the config's:
            `n_buckets` (even, at least 2); `seed` (0 unless given) of the directions; `exclude_self` (False unless
            given), whether a query does not see its own key (the paper excludes it, as Reformer does, because its
            queries are its keys and would see little else); `shared_qk` (False unless given), whether every key points
            where the query at its place does, as a normalised query does, so that its bucket is that one's and is found
            once (where there are as many queries as keys, which with a cache there are not).

    Returns:
        out [B, Sq, Hq, Dv], 0 where a query sees no key, and None: attention weights do not exist here.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is missing, unknown or out of range; or as in `backend.attention_forward`.
        NotImplementedError: the mask is not a causal one of the form n = 1; or as in `backend.attention_forward`.
    """
    options = _options(
        HASH, module, kwargs, {"n_buckets": None, "seed": 0, "exclude_self": False, "shared_qk": False}
    )  # fmt: skip
    n_buckets = _int(HASH, options, "n_buckets")
    if n_buckets < 2 or n_buckets % 2:
        raise ValueError(
            f"{HASH}['n_buckets'] must be even and at least 2, since directions come in pairs, got {n_buckets}; use "
            "attn_implementation='flashmask' for one bucket, which is full attention"
        )
    seed = _int(HASH, options, "seed")
    if not 0 <= seed < 2**32:
        raise ValueError(f"{HASH}['seed'] must lie in 0..2**32 - 1, got {seed}")
    for option in ("exclude_self", "shared_qk"):
        if not isinstance(options[option], bool):
            raise TypeError(f"{HASH}[{option!r}] must be a bool, got {type(options[option]).__name__}")
    mask = _mask(HASH, visible(module, query, key, attention_mask, dropout, kwargs, HASH, frozenset({HASH})))
    layer = getattr(module, "layer_idx", None) or 0
    directions = ops.call(lsh_directions, key.detach(), seed, layer, n_buckets // 2)
    once = options["shared_qk"] and query.shape == key.shape
    q_bucket = ops.call(nearest, query.detach(), directions)
    out = hash_sparse_attention(
        query,
        key,
        value,
        q_bucket,
        q_bucket if once else ops.call(nearest, key.detach(), directions),
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
    """Attention of one layer with dropped queries and keys (Pagliardini et al. 2023, section 4.3).

    In training every head of every row drops queries and keys at random, each independently of the others, anew at
    every call. In evaluation nothing is dropped, which is "flashmask". The draws come from torch's generator of the
    device, as those of dropout: a recomputation under gradient checkpointing repeats them, because checkpointing
    restores its state (`preserve_rng_state`, on unless told otherwise).

    Args:
        module: as in `hash_attention_forward`.
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Skv, D].
        value: [B, Hkv, Skv, Dv].
        attention_mask: what `mask_hook` returned, or None.
        scaling: factor on the scores; None is D ** -0.5.
        dropout: must be 0 in training.
        kwargs: as in `backend.attention_forward`, and `flashmask_qk`, the options in place of the config's: `drop`, the
            probability in 0..1 that a query is dropped, and a key. Or `q_keep` [B, Hq, Sq] and `k_keep` [B, Hkv, Skv],
            bool, what all layers keep: nothing is drawn then, and evaluation drops, too.

    Returns:
        out [B, Sq, Hq, Dv], 0 where a query is dropped or sees no key, and None: attention weights do not exist here.

    Raises:
        TypeError: `drop` is not a number, or a keep not a bool tensor.
        ValueError: an option is missing, unknown or out of range; only one keep is given, or its shape or device does
            not fit; or as in `backend.attention_forward`.
        NotImplementedError: rows are dropped under a mask that is not a causal one of the form n = 1; or as in
            `backend.attention_forward`.
    """
    seen = visible(module, query, key, attention_mask, dropout, kwargs, QK, frozenset({QK, *_KEEPS}))
    q_keep, k_keep = (kwargs.get(name) for name in _KEEPS)
    if (q_keep is None) != (k_keep is None):
        raise ValueError("q_keep and k_keep belong together, but one is missing; pass an all-True tensor for it")
    more: dict[str, Any] = {"scale": scaling, "softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux")}
    if q_keep is None or k_keep is None:
        drop = _drop(module, kwargs)
        if drop == 0:
            out = flashmask_attention(query, seen.columns(key), seen.columns(value), seen.mask, **more)
            return out.transpose(1, 2), None
        q_keep, k_keep = (torch.rand(x.shape[:3], device=x.device) >= drop for x in (query, key))
    out = qk_sparse_attention(query, key, value, q_keep, k_keep, mask=_mask(QK, seen), **more)
    return out.transpose(1, 2), None


def _drop(module: nn.Module, kwargs: dict[str, Any]) -> float:
    """With which probability to drop. An evaluation, which drops nothing, needs no option, but a right one if any."""
    if not module.training and _given(QK, module, kwargs) is None:
        return 0.0
    drop = _options(QK, module, kwargs, {"drop": None})["drop"]
    if not isinstance(drop, (int, float)) or isinstance(drop, bool):
        raise TypeError(f"{QK}['drop'] must be a number, got {type(drop).__name__}")
    if not 0 <= drop <= 1:
        raise ValueError(f"{QK}['drop'] is a probability and must lie in 0..1, got {drop}")
    return drop if module.training else 0.0


def _given(name: str, module: nn.Module, kwargs: dict[str, Any]) -> Any:
    options = kwargs.get(name)
    return getattr(getattr(module, "config", None), name, None) if options is None else options


def _options(name: str, module: nn.Module, kwargs: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The options of the call or else of the config; one whose default is None must be given."""
    given = _given(name, module, kwargs)
    required = [option for option, default in defaults.items() if default is None]
    way_out = f"set config.{name} = {{{required[0]!r}: ...}} of the attention's config, or pass {name}={{...}}"
    inside = " (inside text_config={...} if the model has one)"
    if given is None:
        raise ValueError(
            f"attn_implementation='{name}' has no {required[0]!r}; {way_out} to a call or to from_pretrained{inside}"
        )
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict of options, got {type(given).__name__}; {way_out}")
    for option in given:
        if option not in defaults:
            raise ValueError(f"{name} has no option {option!r}; it takes {', '.join(map(repr, defaults))}")
    for option in required:
        if given.get(option) is None:
            raise ValueError(f"{name} lacks {option!r}; {way_out}")
    return {**defaults, **given}


def _int(name: str, options: dict[str, Any], option: str) -> int:
    number = options[option]
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{name}[{option!r}] must be an int, got {type(number).__name__}")
    return number


def _mask(name: str, seen: Windowed) -> FlashMask:
    mask = seen.mask
    if seen.keys is not None or not mask.causal or mask.indices.shape[-1] != 1:
        kind = "causal" if mask.causal else "not causal"
        raise NotImplementedError(
            f"attn_implementation='{name}' takes causal masks with n = 1 column (packed documents, trees, padding, "
            f"windows counted in rows), but this layer's is {kind} and has n = {mask.indices.shape[-1]}; use "
            "attn_implementation='flashmask' for it (a static cache makes such masks, a dynamic one does not)"
        )
    return mask


def _lsh_directions(x: Tensor, seed: int, layer: int, count: int) -> Tensor:
    """Random directions of a layer for vectors x [B, H, S, D]: [H, D, count] in their dtype, on their device.

    All have length 1, or the longer ones would draw more vectors. They come from hashes of their places, not from a
    generator, so that a device need not wait for another, a CUDA graph can draw them, and they are the same everywhere
    up to the rounding of a logarithm and a cosine in float64.
    """
    shape = (x.shape[1], x.shape[3], count)
    keys = [key & _WORD for key in (seed * 0x85EBCA77 + layer * 0xC2B2AE3D, seed * 0x27D4EB2F + layer, layer)]
    if ops.runs_kernels(x.device):
        from flashmask_hf.kernels.lsh import fill_directions

        return fill_directions(x.new_empty(shape), keys)
    return torch.nn.functional.normalize(_normal(math.prod(shape), keys, x.device).view(shape), dim=1).to(x.dtype)


def _normal(count: int, keys: Sequence[int], device: torch.device) -> Tensor:
    """Standard normal numbers, float64 [count], by Box and Muller's method from hashes of their places."""
    x = torch.arange(2 * count, device=device)
    for key, factor in zip(keys, (0x7FEB352D, 0x2C1B3C6D, 0x297A2D39), strict=True):
        x = (x + key) & _WORD
        x = (x ^ (x >> 16)) * factor & _WORD  # a factor below 2**31, so that the product fits
    angle, radius = (((x ^ (x >> 15)).double() + 0.5) / 2**32).chunk(2)
    return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()


# An operator also because a compiler would do the arithmetic of `_normal` in 32 bits.
lsh_directions = ops.as_operator("lsh_directions", _lsh_directions)


@torch.library.register_fake("flashmask_hf::lsh_directions")
def _(x: Tensor, seed: int, layer: int, count: int) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[3], count)
