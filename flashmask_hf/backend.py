"""The transformers backend behind `attn_implementation="flashmask"`: registration and the attention function.

The dynamic sparse attention of `sparse_backend.py` is registered with it, and reads its masks here.

The mask hook (`mask_compiler.py`) turns what transformers knows of a mask into int32 columns, once per forward and mask
type. The attention function turns them, or the `startend_row_indices` that the caller supplies, into a `FlashMask` that
all layers share.
The interfaces are `AttentionMaskInterface` (`transformers/masking_utils.py`) and `AttentionInterface`
(`transformers/modeling_utils.py`).
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils.output_capturing import _active_collector

from flashmask_hf import upstream
from flashmask_hf.attention import flashmask_attention
from flashmask_hf.mask import FlashMask, is_one_of
from flashmask_hf.mask_compiler import NAME, VECTORS, mask_hook
from flashmask_hf.mask_reader import FAR, document_starts, next_true
from flashmask_hf.ops import device_assert, is_capturing, stream_of
from flashmask_hf.windows import Windowed, windowed

__all__ = ["attention_forward", "register", "visible"]

_USED = {"cu_seq_lens_q", "is_causal", "position_ids", "s_aux", "sliding_window", "softcap", VECTORS}

_REFUSED = {
    "alibi",
    "alibi_slopes",
    "attention_bias",
    "attn_bias",
    "block_indices",
    "block_mask",
    "block_table",
    "cache",
    "head_mask",
    "indices",
    "mask_mod",
    "position_bias",
    "score_mod",
    "sinks",
    "window_size",
}
"""Keywords of attention in transformers that change the result and are not implemented."""

_HARMLESS = {
    "cache_position",
    "completion_mask",
    "cu_seq_lens_k",
    "deterministic",
    "inputs_embeds",
    "is_first_iteration",
    "labels",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "packed_index",
    "past_key_values",
    "position_embeddings",
    "return_dict",
    "return_loss",
    "seq_idx",
    "shift_labels",
    "token_type_ids",
    "use_cache",
}
"""Keywords of models and trainers that reach attention on their way elsewhere and do not change its result."""

_TOWER = "attn_implementation={'text_config': 'flashmask', 'vision_config': 'sdpa'}"
"""A way out where one part of a model does not take the backend."""

_WINDOW_IN_MASK = {"phimoe", "qwen2_moe"}
"""Types of models whose attention is not told of its sliding window."""

_MAX_SHARED = 64  # masks kept at a time; far more than one training step has

_warned: set[str] = set()

T = TypeVar("T")


def register() -> None:
    """Make `attn_implementation="flashmask"`, "flashmask_hash" and "flashmask_qk" known to transformers.

    Importing `flashmask_hf` does it; repeating it is fine. Registers `attention_forward` and the functions of
    `sparse_backend.py` with `AttentionInterface` and `mask_hook` with `AttentionMaskInterface`, and adapts transformers
    to them (`upstream.py`).

    Raises:
        RuntimeError: this version of transformers is not one that the package knows how to adapt.
    """
    from flashmask_hf import sparse_backend  # which builds on this module

    upstream.adapt()
    forwards = (attention_forward, sparse_backend.hash_attention_forward, sparse_backend.qk_attention_forward)
    for name, forward in zip(upstream.NAMES, forwards, strict=True):
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, mask_hook)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer; the signature is that of `sdpa_attention_forward` in `transformers/integrations`.

    The mask is, in this order: the caller's `startend_row_indices`, intersected with the layer's `sliding_window`,
    which is measured by position; what `mask_hook` returned; or, if no hook ran, causal or full by `is_causal`.

    Args:
        module: the attention layer; `is_causal` (True if missing) and `training` are read.
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Skv, D].
        value: [B, Hkv, Skv, Dv].
        attention_mask: what `mask_hook` returned, or None.
        scaling: factor on the scores; None is D ** -0.5.
        dropout: must be 0 in training.
        kwargs: used are `startend_row_indices` (int32 [B or 1, 1 or Hkv or Hq, S, n], read as in `FlashMask`: n = 1
            or 2 with the layer's causality, n = 4 as not causal), `sliding_window` in tokens, `position_ids`
            [B or 1, S], `softcap`, `s_aux` (sinks, [Hq]), `is_causal` and `cu_seq_lens_q`. Keywords known to change the
            result raise unless None. Any other keyword of a model call reaches its layers too, so it cannot raise: it
            is ignored, with one warning if it is not known to be harmless.

    Returns:
        out [B, Sq, Hq, Dv] and None: attention weights do not exist here.

    Raises:
        TypeError: `startend_row_indices` is not an int32 tensor.
        ValueError: dropout in training, or a mask whose shape, device or form does not fit.
        NotImplementedError: a keyword or a combination that would change the result and is not implemented.
        RuntimeError: n = 2 columns of a mask that is not causal reach a causal layer; or, in a compiled model with
            windows, `position_ids` do not run on where a window matters (device-side checks).
    """
    seen = visible(module, query, key, attention_mask, dropout, kwargs)
    out = flashmask_attention(
        query,
        seen.columns(key),
        seen.columns(value),
        seen.mask,
        scale=scaling,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    return out.transpose(1, 2), None


def visible(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
    name: str = NAME,
    own: frozenset[str] = frozenset(),
) -> Windowed:
    """What a layer may see, once its keywords are checked; arguments and errors are those of `attention_forward`.

    Args:
        module: the attention layer.
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Skv, D].
        attention_mask: what `mask_hook` returned, or None.
        dropout: must be 0 in training.
        kwargs: the layer's keywords.
        name: what `attn_implementation` is set to, for messages.
        own: keywords that this implementation uses beside those of "flashmask".
    """
    _check_keywords(module, dropout, kwargs, name, own)
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    if attention_mask is not None:
        _check_hook_result(attention_mask)
    vectors = kwargs.get(VECTORS)
    if vectors is not None:
        _count_supplied()
        config = getattr(module, "config", None)
        if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
            raise NotImplementedError(
                f"{VECTORS} would reach the encoder, the decoder and the attention between them alike; models with an "
                "encoder and a decoder do not take them: use attention_mask"
            )
        if config is not None and attention_mask is None and not causal:  # a model's, for which no hook ran
            raise NotImplementedError(
                f"{VECTORS} reached a layer that is not causal and has no mask of the model's, as in an image tower, "
                f"whose patches they do not describe; keep it from this backend, for example with {_TOWER}"
            )
        _check_vectors(vectors, query, key, causal)
        window = _window(module, kwargs)
        return _supplied_mask(vectors, attention_mask, causal, window, kwargs.get("position_ids"))
    if attention_mask is not None:
        return Windowed(_hook_mask(attention_mask, query, key, kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")))
    return Windowed(_default_mask(query, key, causal, kwargs, name))


supplied_calls = 0
"""How many calls of attention have been given `startend_row_indices`, apart from compiled ones."""


def _count_supplied() -> None:
    global supplied_calls
    if not torch.compiler.is_compiling():
        supplied_calls += 1


def _check_keywords(
    module: nn.Module, dropout: float, kwargs: dict[str, Any], implementation: str, own: frozenset[str]
) -> None:
    asked = f"attn_implementation='{implementation}'"
    if dropout > 0 and module.training:
        raise ValueError(
            f"dropout={dropout} is not implemented by {asked}; set attention_dropout=0 in the model's config, or use "
            "attn_implementation='sdpa'"
        )
    if kwargs.get("output_attentions") or _weights_are_collected():
        raise NotImplementedError(
            f"output_attentions=True: {asked} never has the weights that it would return; use "
            "attn_implementation='eager' to look at them"
        )
    for name, given in kwargs.items():
        if name in _USED or name in _HARMLESS or name in own or given is None:
            continue
        if name in _REFUSED:
            raise NotImplementedError(
                f"{name} changes the result of attention and is not implemented by {asked}; "
                + (
                    "use attn_implementation='sdpa' for continuous batching"
                    if name == "cache"
                    else f"pass {name}=None, or use attn_implementation='eager' for this model"
                )
            )
        if not torch.compiler.is_compiling() and name not in _warned:
            _warned.add(name)
            warnings.warn(
                f"{asked} ignores the attention keyword '{name}', which it does not know; that is right if it is meant "
                "for another part of the model. If it should change attention, use 'eager'.",
                stacklevel=4,
            )


def _weights_are_collected() -> bool:
    """Whether a model that keeps output_attentions from its layers collects what they return instead."""
    compiling = torch.compiler.is_compiling()  # which does not read a context variable; there it is a global one
    collected = _active_collector.global_var if compiling else _active_collector.get()
    return collected is not None and any("attentions" in name for name in collected)


def _check_hook_result(attention_mask: Any) -> None:
    if isinstance(attention_mask, Tensor):
        if attention_mask.dtype == torch.int32 and attention_mask.dim() == 4 and attention_mask.shape[2] in (1, 4):
            return
        got = f"{attention_mask.dtype} of shape {list(attention_mask.shape)}"
    else:
        got = type(attention_mask).__name__
    raise ValueError(
        f"attention_mask must be None or the columns that flashmask_hf's mask hook makes of a 2D mask, got {got} in an "
        f"attention layer; write a dense mask as FlashMask.from_dense(mask).indices and pass it as {VECTORS}, or, if "
        f"the model made it for an image tower, keep that from this backend: {_TOWER}"
    )


def _check_vectors(vectors: Any, query: Tensor, key: Tensor, causal: bool) -> None:
    """Shape, dtype and device of the supplied vectors; values are not read."""
    if not isinstance(vectors, Tensor) or vectors.dtype != torch.int32:
        got = vectors.dtype if isinstance(vectors, Tensor) else type(vectors).__name__
        raise TypeError(f"{VECTORS} must be an int32 tensor [B, 1, S, n], got {got}; pass mask.indices of a FlashMask")
    shape = list(vectors.shape)
    if vectors.dim() != 4 or shape[-1] not in (1, 2, 4):
        raise ValueError(f"{VECTORS} must have shape [B, 1, S, n] with n = 1, 2 or 4, got {shape}")
    if shape[-1] == 1 and not causal:
        raise ValueError(
            f"{VECTORS} with n = 1 describe a causal mask, but this layer is not causal (is_causal=False); pass n = 2 "
            "or 4 columns, for example FlashMask.bidirectional().indices (and none to a model with encoder and decoder)"
        )
    if vectors.device != query.device:
        raise ValueError(f"{VECTORS} is on {vectors.device}, but the layer runs on {query.device}; move it there")
    batch, heads, q_len, _ = query.shape
    kv_heads, kv_len = key.shape[1:3]
    if shape[2] != kv_len or q_len != kv_len:
        raise ValueError(
            f"{VECTORS} describe a whole row of {shape[2]} tokens, but this layer has {q_len} queries and {kv_len} "
            "keys; pass one column per token of input_ids and use_cache=False, leave them out of generate, and use no "
            "prompt learning (virtual tokens) with packed rows"
        )
    if not is_one_of(shape[0], 1, batch):
        raise ValueError(f"{VECTORS} has batch {shape[0]}; it must be 1 or the batch {batch} of the model's input")
    if not is_one_of(shape[1], 1, kv_heads, heads):
        raise ValueError(f"{VECTORS} has {shape[1]} heads; it must have 1, Hkv = {kv_heads} or Hq = {heads}")


def _window(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """The layer's sliding window: the keyword, or of models that leave it to the mask, their config's."""
    config: Any = getattr(module, "config", None)
    layer = getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds and layer is not None else None
    if kind == "chunked_attention":
        raise NotImplementedError(
            f"{VECTORS} on a layer of chunked attention need position_ids to tell its chunks, which this model does "
            "not hand to its layers; use attention_mask, or position_ids that start again with each document"
        )
    if "sliding_window" in kwargs or getattr(config, "model_type", None) not in _WINDOW_IN_MASK:
        return kwargs.get("sliding_window")
    return config.sliding_window if kind in (None, "sliding_attention") else None


def _supplied_mask(
    vectors: Tensor, hooked: Tensor | None, causal: bool, window: int | None, position_ids: Tensor | None
) -> Windowed:
    """The caller's vectors, less what a 2D attention_mask hides, in a layer's window of `window` positions.

    `hooked` is what the hook returned: of it only padding counts, which is where a key is hidden from row 0 on. On a
    layer that is not causal the window has two sides, as in FlashAttention.
    """
    if window is not None and position_ids is not None and position_ids.dim() != 2:
        raise NotImplementedError(
            f"sliding_window={window} with {VECTORS} needs position_ids [B, S], got {list(position_ids.shape)}; "
            "use a model without sliding windows"
        )
    two_sided = not causal
    causal = causal and vectors.shape[-1] < 4

    def build() -> Windowed:
        if causal and vectors.shape[-1] == 2:
            # Columns LTS, UTE of a mask that is not causal show rows [UTE, LTS), so they have LTS > UTE somewhere.
            device_assert(
                (vectors[..., 0] <= vectors[..., 1]).all(),
                f"{VECTORS} with n = 2 on a causal layer are LTS, LTE, but a column has LTS > LTE; pass a mask that "
                "is not causal as mask.bidirectional().indices (n = 4), and write an empty interval as start == end",
            )
        given = FlashMask(vectors.detach() if hooked is None else _without_padding(vectors, hooked, causal), causal)
        return Windowed(given) if window is None else windowed(given, window, position_ids, two_sided=two_sided)

    sources = [vectors] if hooked is None else [vectors, hooked]
    if window is not None and position_ids is not None:
        sources.append(position_ids)
    return _shared(tuple(sources), ("supplied", causal, window, two_sided), build, renewed=hooked is not None)


def _without_padding(vectors: Tensor, hooked: Tensor, causal: bool) -> Tensor:
    """The vectors with every key hidden whole that the hook's columns hide from row 0 on."""
    length = vectors.shape[2]
    padding = hooked[:, :, 0] == 0
    if hooked.shape[2] == 4:
        padding = padding & (hooked[:, :, 1] >= length)
    columns = vectors.unbind(-1)
    if len(columns) == 1:
        whole = [0]
    elif len(columns) == 2:
        whole = [0, length] if causal else [0, 0]
    else:
        whole = [0, length, 0, 0]
    return torch.stack([column.masked_fill(padding, bound) for column, bound in zip(columns, whole, strict=True)], -1)


def _hook_mask(
    attention_mask: Tensor, query: Tensor, key: Tensor, cu_seq_lens: Tensor | None, position_ids: Tensor | None
) -> FlashMask:
    """The hook's columns, with documents cut apart that `cu_seq_lens` tell of, as FlashAttention does, or positions.

    The hook knows of documents from positions, too (`upstream.py`), but not every model hands them to its masks.
    """
    batch, _, q_len, _ = query.shape
    kv_len = key.shape[2]
    if attention_mask.shape[3] != kv_len or not is_one_of(attention_mask.shape[0], 1, batch):
        raise ValueError(
            f"attention_mask has batch {attention_mask.shape[0]} and {attention_mask.shape[3]} key columns, but this "
            f"layer has batch {batch} and {kv_len} keys; pass a 2D attention_mask that covers cache and new tokens"
        )
    causal = attention_mask.shape[2] == 1
    columns = attention_mask.detach().transpose(2, 3)
    if cu_seq_lens is None or cu_seq_lens.shape[0] <= 2:
        if not causal or position_ids is None or position_ids.shape not in ((1, kv_len), (batch, kv_len)):
            return _shared((attention_mask,), ("hook",), lambda: FlashMask(columns.contiguous(), causal))

        def apart() -> FlashMask:
            starts = document_starts(position_ids)[:, 1:] & (columns[:, 0, 1:, 0] > 0)  # padding has position 0, too
            ends = next_true(starts)[:, None, :, None].to(torch.int32)
            return FlashMask(torch.minimum(columns, ends), causal=True)

        return _shared((attention_mask, position_ids), ("positions",), apart)
    if batch != 1 or q_len != kv_len or not causal:
        raise NotImplementedError(
            f"cu_seq_lens_q of several documents is implemented for one causal row without a cache, got batch {batch}, "
            f"{q_len} queries and {kv_len} keys; flatten the batch into one row, or pass {VECTORS}"
        )

    def cut() -> FlashMask:
        column = torch.arange(kv_len, device=query.device, dtype=torch.int32)
        edges = cu_seq_lens.to(torch.int32)
        after = torch.searchsorted(edges, column, right=True)
        end = torch.where(after < len(edges), edges[after.clamp(max=len(edges) - 1)], kv_len)
        return FlashMask(torch.minimum(columns, end.view(1, 1, -1, 1)), causal=True)

    return _shared((attention_mask, cu_seq_lens), ("documents",), cut)


def _default_mask(query: Tensor, key: Tensor, causal: bool, kwargs: dict[str, Any], name: str = NAME) -> FlashMask:
    """The mask of a layer for which no hook ran: causal (bottom-right aligned) or full."""
    window = kwargs.get("sliding_window")
    if window is not None and not causal:
        raise NotImplementedError(
            f"sliding_window={window} on a layer that is not causal is not implemented by "
            f"attn_implementation='{name}'; use attn_implementation='sdpa' for this model"
        )
    cu_seq_lens = kwargs.get("cu_seq_lens_q")
    if cu_seq_lens is not None and cu_seq_lens.shape[0] > 2:
        raise NotImplementedError(
            "cu_seq_lens_q of several sequences is not implemented for a layer without a mask; use "
            "attn_implementation='sdpa' for this part of the model, for example {'vision_config': 'sdpa'}"
        )
    q_len, kv_len = query.shape[2], key.shape[2]
    device = query.device

    def build() -> FlashMask:
        row = torch.arange(kv_len, device=device, dtype=torch.int32) + (q_len - kv_len)
        if causal:
            end = torch.full_like(row, q_len) if window is None else (row + min(window, FAR)).clamp(0, q_len)
            return FlashMask(end.view(1, 1, -1, 1), causal=True)
        return FlashMask(
            torch.stack([torch.full_like(row, q_len), torch.zeros_like(row)], -1)[None, None], causal=False
        )

    # A fake one's mask would be fake, and a graph's in memory of its own.
    if type(query) is not Tensor or torch.compiler.is_compiling() or is_capturing(query):
        return build()
    return _shared((), ("default", q_len, kv_len, causal, window, device, stream_of(query)), build)


class _Shared(NamedTuple):
    """What was built, the state its sources had, aliases that keep their memory from being reused, and a watcher."""

    made: Any
    state: tuple[Any, ...]
    aliases: tuple[Tensor, ...]
    watcher: Any


_masks: OrderedDict[Hashable, _Shared] = OrderedDict()


def _shared(
    sources: tuple[Tensor, ...], form: tuple[Hashable, ...], build: Callable[[], T], *, renewed: bool = True
) -> T:
    """What `build()` makes, once for all layers and recomputations that read the same tensors; masks keep their plan.

    Tensors are told by the memory they view, so an alias that checkpointing makes finds the same mask. There is one
    entry for a first source, a form and a stream, on which what was made may be read. It goes when the first source is
    freed, when another takes its place, because a source was changed in place or is another, or when `_MAX_SHARED`
    others are newer. Until then it keeps the memory of the other sources, though not the tensors. The mask may hold an
    alias of `sources[0]` but not the tensor itself, or the entry would keep itself alive.

    Args:
        sources: what `build` reads.
        form: what else it depends on.
        build: makes the mask.
        renewed: whether a source is new in each forward, as the hook's columns are. Without one, nothing is kept of
            tensors made in inference mode, which do not tell of changes, nor in a CUDA graph, which is to read them
            anew. With one, layers share there, too.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return build()  # a compiler merges the equal plans of its layers itself, and a transform's tensors are its own
    if any(type(x) is not Tensor or x.is_meta for x in sources):
        return build()
    if not renewed and (is_capturing(sources[0]) or any(x.is_inference() for x in sources)):
        return build()
    inference = torch.is_inference_mode_enabled()  # tensors made there cannot be saved for a backward
    where = tuple((x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) for x in sources)
    key = (where[:1], form, stream_of(sources[0]) if sources else None, inference)
    state = (where[1:], tuple(0 if x.is_inference() else x._version for x in sources))
    entry = _masks.get(key)
    if entry is not None and entry.state == state:
        return entry.made
    watcher = weakref.ref(sources[0], lambda _, masks=_masks: masks.pop(key, None)) if sources else None
    entry = _Shared(build(), state, tuple(x.detach() for x in sources), watcher)
    _masks.pop(key, None)  # so that it comes last
    _masks[key] = entry
    while len(_masks) > _MAX_SHARED:
        _masks.popitem(last=False)
    return entry.made
