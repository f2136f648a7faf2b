"""Common beginnings of a batch's sequences computed once, in the calls of any trainer."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flashmask_hf.collators.shared_rows import find_starts, pack_sequences
from flashmask_hf.hf.call import Call, cache_of
from flashmask_hf.hf.checks.recurrent import is_guarded
from flashmask_hf.hf.models import state_of, unwrap_peft
from flashmask_hf.hf.packed.rows import check_compiled, run_packed
from flashmask_hf.names import PACKED_IDS, PACKED_REAL
from flashmask_hf.torch_internals import device_assert

logger = logging.getLogger(__name__)

_REPLACED = {"attention_mask", "position_ids", "seq_idx"}
_REPLACED |= {f"{name}_{side}" for name in ("cu_seq_lens", "max_length") for side in "qk"}
"""Arguments that say where a batch's documents are, in place of which the packed rows' come."""


def share_prefixes(model: Any, minimum: float = 0.1) -> None:
    """Make a causal model compute common beginnings of a batch's sequences once, whatever trainer calls it.

    Outputs, losses and gradients equal the batch's, up to rounding: the backbone runs one packed row, the trie of the
    sequences without padding, and its hidden states are laid out as the batch, without a cache. Batches are padded on
    any side with a 2D mask; flat with positions that start again, with or without a mask that numbers the documents; or
    have a sequence per row. The host waits for the device once per call, to read the token ids; the rows of the last 8
    batches are kept, so a reference model's pass packs nothing.

    A call runs as before if it saves less than `minimum`, or has a cache, `use_cache=True`, `return_dict=False`,
    `inputs_embeds`, `startend_row_indices`, positions of several axes or other tensors per token, a mask with holes,
    positions that jump within a document, or padding on the left without positions where these are absolute (GPT-2,
    HunYuan). So does a call with dropout or noise, which shared tokens would share; it warns once. Repeating the call
    changes `minimum`.

    Args:
        model: a transformers model with a head, or a PEFT model around one, with attention "flashmask", not wrapped
            for distributed training.
        minimum: least share of the batch's N * L tokens, padding among them, for which the rows are packed, 0 to 1.

    Raises:
        ValueError: `minimum` is out of range, the attention is not "flashmask", or the model is no causal decoder, has
            recurrent or convolutional layers, or has its head in its backbone (mllama); in a call, a row starts inside
            a document, as with sequence parallelism.
        RuntimeError: in a backward pass, the loss reads hidden states of padding. On a GPU a device-side assertion
            fails instead. Without gradients such a loss differs, and nothing raises.

    Example:
        ```python
        import flashmask_hf
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", attn_implementation="flashmask")
        flashmask_hf.share_prefixes(model)  # then as usual: trl.KTOTrainer(model, ...), CrossEncoder, lm-eval
        ```
    """
    if not 0 <= minimum <= 1:
        raise ValueError(f"minimum must be a share of the batch's tokens, 0 to 1, got {minimum}")
    inner = unwrap_peft(model)
    if is_guarded(inner):
        raise ValueError(
            f"{type(inner).__name__} has recurrent or convolutional layers, where a branch would start with its "
            "sibling's state; share prefixes in a model of attention alone"
        )
    run_packed(model)
    backbone = inner.base_model
    state = state_of(backbone)
    if _refuse_read_padding not in backbone._forward_hooks.values():
        backbone.register_forward_hook(_refuse_read_padding, with_kwargs=True)  # after run_packed's, which lays out
    others = [change for change in state.rewrites if getattr(change, "func", None) is not _share]
    state.rewrites = (*others, functools.partial(_share, minimum=minimum))


@torch.compiler.disable
def _share(call: Call, minimum: float) -> dict[str, Any]:
    """Return the arguments of a call with the trie of its sequences as a packed row, or as they are."""
    if not _can_share(call):
        return call.named
    ids, *marks = _read(call)
    numbers, starts = marks[0], _starts(call, *marks)
    if starts is None or not starts.any():
        return call.named
    real = numbers != 0
    packed = _pack(ids.tobytes(), real.tobytes(), starts.tobytes(), ids.shape)
    if 1 - packed[PACKED_IDS].numel() / ids.size < minimum:
        return call.named
    check_compiled(call.model, call.tokens.device)
    if not real.all():
        packed = packed | {PACKED_REAL: torch.from_numpy(real)}
    kept = {name: value for name, value in call.named.items() if name not in _REPLACED}
    return kept | {"use_cache": False} | {name: x.to(call.tokens.device) for name, x in packed.items()}


def _can_share(call: Call) -> bool:
    """Return whether the shapes of a call's arguments allow to share, and nothing is dropped."""
    tokens, mask, positions = (call.named.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.shape[1] < 2:
        return False
    if call.named.get("use_cache") or cache_of(call.named) is not None:
        return False
    if call.named.get("return_dict") is False:  # the hooks read names
        return False
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != tokens.shape):
        return False
    if positions is not None and (positions.dim() != 2 or positions.shape[1] != tokens.shape[1]):
        return False
    others = [x for name, x in call.named.items() if name not in {"input_ids", *_REPLACED}]
    if any(isinstance(x, (list, tuple, Mapping)) or (isinstance(x, Tensor) and x.dim() > 0) for x in others):
        return False  # of each token, or of images; num_items_in_batch has no axis
    if any(map(drops, call.model.modules())):
        _warn_of_dropout(call.name)
        return False
    return True


def drops(part: nn.Module) -> bool:
    """Return whether a module drops values or adds noise in training: as a dropout, or by a rate as an attribute."""
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return part.training and part.p > 0
    rates = (value for name, value in vars(part).items() if "drop" in name or "noise" in name)  # NEFTune's, routers'
    return part.training and any(isinstance(value, (int, float)) and value > 0 for value in rates)


@functools.cache
def _warn_of_dropout(name: str) -> None:
    logger.warning(
        "%s trains with dropout or noise, so share_prefixes computes no prefix once: sequences would get the same. Set "
        "the dropout of its config, lora_dropout and NEFTune's noise to 0.", name,
    )  # fmt: skip


def _read(call: Call) -> NDArray[np.int64]:
    """Return token ids, numbers of documents (0 for padding), positions, and document starts, int64 [4, N, L]."""
    ids: Tensor = call.named["input_ids"]
    mask, positions, segments = (call.named.get(name) for name in ("attention_mask", "position_ids", "seq_idx"))
    numbers = torch.ones_like(ids) if mask is None else mask
    if isinstance(segments, Tensor):
        numbers = numbers * (segments + 1)
    columns = torch.arange(ids.shape[1], device=ids.device)
    starts = torch.zeros_like(ids) if call.documents is None else call.documents.starts
    parts = [ids, numbers, columns if positions is None else positions, starts]
    return torch.stack([part.long().expand_as(ids) for part in parts]).cpu().numpy()  # waits for the device


def _starts(
    call: Call, numbers: NDArray[np.int64], positions: NDArray[np.int64], starts: NDArray[np.int64]
) -> NDArray[np.bool_] | None:
    """Return the first tokens of the documents, bool [N, L]; None if documents have holes or positions of their own."""
    if call.named.get("attention_mask") is None and positions[0, 0] > 0:
        raise ValueError(
            f"position_ids start at {positions[0, 0]}, inside a document, as on a rank that has a part of each row; "
            "share prefixes without sequence parallelism, or let positions start at 0"
        )
    first = find_starts(numbers, positions, starts != 0)
    counts_padding = call.state.first_position is not None and first is not None and positions[first].any()
    return None if counts_padding else first


@functools.lru_cache(maxsize=8)
def _pack(ids: bytes, real: bytes, starts: bytes, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Return `pack_sequences`' rows as `PackedRows.indexed_batch`; the arguments are the bytes of its arrays."""
    masks = (np.frombuffer(x, np.bool_).reshape(shape) for x in (real, starts))
    rows, index, _ = pack_sequences(np.frombuffer(ids, np.int64).reshape(shape), *masks)
    return rows.indexed_batch(index)


def _refuse_read_padding(backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Make a backward pass fail where it reaches hidden states of padding, which are other tokens' here."""
    real, states = kwargs.get(PACKED_REAL), output.last_hidden_state if PACKED_REAL in kwargs else None
    if real is None or states is None or not states.requires_grad:
        return

    def refuse(gradient: Tensor) -> None:
        device_assert(
            (gradient.ne(0).any(-1) & ~real.to(gradient.device)).any().logical_not(),
            "the loss reads hidden states of padding, which share_prefixes does not compute; mask the labels after "
            "padding on the left (-100), or do not share prefixes with this trainer",
        )

    states.register_hook(refuse)
