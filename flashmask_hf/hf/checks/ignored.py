"""Checks of calls whose mask indices, or packed rows, the model would ignore, as other attention does."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from flashmask_hf.hf.call import Call, cache_of
from flashmask_hf.hf.checks.recurrent import is_guarded
from flashmask_hf.hf.documents import next_flagged
from flashmask_hf.hf.families import family_of
from flashmask_hf.hf.keywords import SPLIT_BY_TORCH
from flashmask_hf.hf.models import is_compiled, state_of, wrapper_of
from flashmask_hf.hf.rules import Rule, Verdict, rule, text_attention
from flashmask_hf.intervals import outer_rows
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import NAMES, PACKED_IDS, VECTORS
from flashmask_hf.torch_internals import is_split_by_torch

CHECKS: list[Rule] = []
AFTER: list[Rule] = []
"""Checks that follow a call, and ask what was read in it."""

_MS_SWIFT = ("swift.sequence_parallel", "swift.trainers.sequence_parallel")
"""Modules of ms-swift with the number of ranks per row: of 4.0 to 4.6, and of 3.12."""


def hides_more(indices: Tensor, attention_mask: Any, ends: Tensor | None = None) -> Tensor:
    """Return which keys mask indices show to other tokens than an attention that ignores them does, bool [B, H, S].

    Args:
        indices: int32 [B, H, S, n].
        attention_mask: a 2D mask [B, S], which hides keys in both; anything else is ignored.
        ends: int64 [B or 1, S] for n = 1, one past the last row to which the other attention shows each key; None is S.
            For n > 1 it shows every key to all rows.
    """
    length, causal = indices.shape[2], indices.shape[3] == 1
    pieces = FlashMask(indices.detach(), causal).visible_intervals(length)
    real = outer_rows(pieces, length)[1] > 0  # a key that no row sees is padding
    counts = nn.functional.pad(real.cumsum(-1), (1, 0))

    def real_rows(start: Tensor, end: Tensor) -> Tensor:
        return counts.gather(-1, torch.maximum(start, end).long()) - counts.gather(-1, start.long())

    first = torch.arange(length, device=indices.device).expand(real.shape) * causal
    last = torch.full_like(first, length) if ends is None else ends[:, None].expand(real.shape)
    # One set of rows holds the other: both begin at the key's row, or one is of all rows.
    wrong = torch.stack([real_rows(*piece) for piece in pieces]).sum(0) != real_rows(first, last)
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 and attention_mask.shape[-1] == length:
        wrong = wrong & attention_mask[:, None].to(torch.bool)
    return wrong


def _is_ignored(call: Call) -> bool:
    return call.named.get(PACKED_IDS) is None and text_attention(call) not in NAMES


def _ends_of_documents(call: Call) -> Tensor:
    """Return where the document of each token ends for an attention of transformers, int64 [B or 1, S].

    Without cache and mask it reads `position_ids`, [B, S] or the first of four axes.
    """
    batch, length = call.tokens.shape[:2]
    positions, axes = call.tensor("position_ids", 2), call.tensor("position_ids", 3)
    if axes is not None and axes.shape[0] == 4:
        positions = axes[0]
    use_cache = call.named.get("use_cache")
    if use_cache is None:
        use_cache = getattr(call.config.get_text_config(), "use_cache", False)
    alone = cache_of(call.named) is None and call.named.get("attention_mask") is None and not use_cache
    if "flash" in text_attention(call) and batch > 1:  # FlashAttention finds them in a single row
        alone = False
    if alone and positions is not None and positions.shape[1] == length:
        return next_flagged(positions[:, 1:] == 0)
    return torch.full((1, length), length, device=call.tokens.device)


def marks_documents(call: Call) -> bool:
    """Return whether attention must read the call's mask indices, or positions of whole rows."""
    indices = call.indices
    if indices is None:
        mask = call.named.get("attention_mask")
        flat = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)  # masks of a static cache are made before
        return call.is_ours and flat and call.tensor("position_ids", 2) is not None
    if call.named.get(PACKED_IDS) is not None or call.tokens is None:
        return False
    name = text_attention(call)  # of another attention, other forms are refused where they hide anything
    return name in NAMES or (_covers_tokens(call) and indices.shape[3] == 1 and "flash" not in name)


def _covers_tokens(call: Call) -> bool:
    """Return whether the mask indices are a tensor [B, H, S, n] of the call's tokens."""
    return call.tensor(VECTORS, 4) is not None and call.indices.shape[2] == call.tokens.shape[1]


@rule(CHECKS, "a `FlashMask` as `attention_mask`", "attention_mask", error=TypeError)
def _takes_no_flash_mask(call: Call) -> Verdict:
    return not isinstance(call.named.get("attention_mask"), FlashMask), (
        f"attention_mask is a FlashMask, which transformers does not take; pass {VECTORS}=mask.indices if the "
        "model and the mask are causal, else mask.bidirectional().indices, and no attention_mask"
    )


@rule(CHECKS, "context parallelism of torch or accelerate", ours=True, error=NotImplementedError)
def _is_not_split_by_torch(call: Call) -> Verdict:
    return not is_split_by_torch(), SPLIT_BY_TORCH.format(call.implementation)


@rule(CHECKS, "sequence parallelism of verl or ms-swift", ours=True)
def _is_not_split_by_a_program(call: Call) -> Verdict | None:
    program = _find_splitting_program()
    if program is None:
        return None
    return False, (
        f"{program} splits rows over ranks and exchanges tokens inside FlashAttention alone: {call.implementation!r} "
        "would attend within a shard. Set its sequence parallel size to 1."
    )


@torch.compiler.assume_constant_result
def _find_splitting_program() -> str | None:
    verl = sys.modules.get("verl.utils.ulysses")
    if verl is not None and verl.get_ulysses_sequence_parallel_world_size() > 1:
        return "verl"
    swift = [sys.modules[name] for name in _MS_SWIFT if name in sys.modules]
    return "ms-swift" if any((x.sequence_parallel.world_size or 1) > 1 for x in swift) else None


@rule(
    CHECKS, "sequence parallelism around the attention (`sp_size`) of masks that it drops", ours=True,
    error=NotImplementedError,
)  # fmt: skip
def _keeps_masks(call: Call) -> Verdict | None:
    wrapper = wrapper_of(call.implementation)
    if wrapper is None:
        return None
    text = call.config.get_text_config()
    in_mask = family_of(text).window_in_mask and getattr(text, "sliding_window", None)
    in_mask = in_mask or "chunked_attention" in (getattr(text, "layer_types", None) or ())
    return not (in_mask or text is not call.config or call.state.is_bidirectional), (
        f"{call.name} needs masks of images, chunks, windows or both directions; the wrapper {wrapper} may drop them: "
        "set sp_size=1 or remove it"
    )


@rule(CHECKS, "several GPUs in one process (`DataParallel`)", VECTORS)
def _is_no_replica(call: Call) -> Verdict:
    return not getattr(call.model, "_is_replica", False), (
        "torch.nn.DataParallel splits a batch by rows, so it cannot run one packed row on several GPUs; start a "
        "process per GPU with accelerate launch or torchrun, or set CUDA_VISIBLE_DEVICES=0"
    )


@rule(CHECKS, "batches of the preference and reward collators in stock TRL", VECTORS, PACKED_IDS)
def _runs_packed_rows(call: Call) -> Verdict | None:
    if call.tokens is None:
        return None
    runs_whole = call.tokens.shape[1] > 1 and text_attention(call) not in NAMES
    return runs_whole or state_of(call.model.base_model).takes_packed_rows, (
        f"{PACKED_IDS} are packed rows, which this {call.name} would not run: take the trainer of the collator "
        "(SharedQuestionDPOTrainer, MultiAnswerRewardTrainer) or another collator"
    )


@rule(CHECKS, "packed rows under another attention, without positions or with a cache", VECTORS, where=_is_ignored)
def _is_same_mask(call: Call) -> Verdict | None:
    if call.tokens is None or call.tokens.shape[1] == 1:  # a decoded token, with the row's mask indices in the keywords
        return None
    indices, name = call.indices, text_attention(call)
    if not _covers_tokens(call):
        got = list(indices.shape) if isinstance(indices, Tensor) else type(indices).__name__
        return False, (
            f"{VECTORS} must be [B, H, S, n] for S = {call.tokens.shape[1]} tokens, got {got}; attn_implementation="
            f"'{name}' ignores them: pass indices of whole rows, without virtual tokens"
        )
    ends = _ends_of_documents(call) if indices.shape[3] == 1 else None
    return ~hides_more(indices, call.named.get("attention_mask"), ends).any(), (
        f"{VECTORS} hide tokens, but attn_implementation='{name}' ignores them; load with "
        "'flashmask', pass one document per row, or position_ids of whole rows, use_cache=False and no mask"
    )


@rule(AFTER, "document boundaries that no mask and no layer of the model reads")
def _are_documents_read(call: Call) -> Verdict | None:
    if call.reads or torch.compiler.is_compiling() or (call.outer is not None and marks_documents(call.outer)):
        return None
    if not marks_documents(call) or is_compiled(call.model):
        return None
    if call.indices is None:
        holds = None if call.documents is None else call.documents.is_one_per_row()
    elif call.tensor(VECTORS, 4) is not None and call.indices.shape[2] > call.tokens.shape[1]:
        return None  # a row split over ranks, whose layers check the split
    else:
        holds = _covers_tokens(call) and ~hides_more(call.indices, call.named.get("attention_mask")).any()
    other = "" if call.is_ours else "load it with 'flashmask', or "
    return holds, (
        f"{call.name} reads no document boundaries with attn_implementation='{call.implementation}', so documents "
        f"would see each other; {other}pass one document per row"
    )


@rule(AFTER, "packed rows in a model some of whose layers get no mask", VECTORS)
def _reaches_every_layer(call: Call) -> Verdict | None:
    state = call.state
    # A user's own model may have fewer layers than its config, or drop some.
    if not state.counts_layers or state.is_counted or torch.compiler.is_compiling():
        return None
    if not state.is_probed and is_compiled(call.model):
        return None
    config = call.config.get_text_config()
    layers = getattr(config, "decoder_layers", config.num_hidden_layers)  # BART's decoder alone
    state.is_counted = call.supplied >= layers or is_guarded(call.model)  # recurrent layers do not count
    return state.is_counted, (
        f"{call.name} gave the packed row's mask to {call.supplied} of its {layers} layers; in others documents or "
        "answers mix: keep 'flashmask' and layers of transformers, or train unpacked rows"
    )
