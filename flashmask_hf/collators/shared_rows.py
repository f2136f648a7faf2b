"""A batch's sequences in rows that hold shared tokens once, and the log-probabilities of the batch's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashmask_hf._numbers import as_integer
from flashmask_hf.collators.forest import Leaf
from flashmask_hf.collators.packing import PackedRows, pack_forests
from flashmask_hf.collators.prefixes import share_prefixes, share_prompts


def pack_sequences(
    ids: NDArray[np.int64],
    real: NDArray[np.bool_],
    starts: NDArray[np.bool_] | None = None,
    *,
    prompt_lengths: Sequence[int] | None = None,
    kinds: Sequence[int] | None = None,
    **options: Any,
) -> tuple[PackedRows, NDArray[np.int64], list[Leaf]]:
    """Pack the sequences of a batch, `ids` int64 [N, L], into rows that hold shared tokens once.

    `real`, bool [N, L], is False for padding; `starts`, bool [N, L], marks first tokens, None of rows. With
    `prompt_lengths` only whole prompts are shared; sequences of different `kinds` share nothing. Options are as in
    `pack_forests`.

    Returns:
        The rows; the index in the flattened rows of each token, int64 [N, L]; and the leaf of each sequence.
    """
    ends = np.cumsum(real.sum(1)) if starts is None else np.append(np.flatnonzero(starts[real])[1:], real.sum())
    sequences = np.split(ids[real].astype(np.int64), ends[:-1])
    if prompt_lengths is None:
        forests, leaves = share_prefixes(sequences, kinds)
    else:
        forests, leaves = share_prompts(sequences, prompt_lengths, kinds)
    rows = pack_forests(forests, **options)
    return rows, rows.place(leaves, real), leaves


def find_starts(
    numbers: NDArray[np.int64], positions: NDArray[np.int64], starts: NDArray[np.bool_]
) -> NDArray[np.bool_] | None:
    """Return the first tokens of a batch's documents, bool [N, L]; None if a document has a hole, or positions jump.

    `numbers`, int64 [N, L], number documents, 0 is padding; `positions`, int64 [N, L], increase by one in a document;
    documents start at `starts`, bool [N, L], and at the first token of each row.
    """
    real = numbers != 0
    first = real & (starts | (np.cumsum(real, 1) == 1))
    parts = (numbers[:, 1:] != numbers[:, :-1]) | (positions[:, 1:] != positions[:, :-1] + 1)
    return None if (parts & real[:, 1:] & ~first[:, 1:]).any() else first


@dataclass(frozen=True, slots=True, eq=False)
class SharedRows:
    """A batch's sequences in packed rows, on the batch's device, and where its tokens' log-probabilities are read.

    Args:
        batch: the model's inputs, as of `PackedRows.batch`: R rows of S tokens.
        scored: bool [N, K], the tokens that `gather_logps` scores.
        places: int64 [n], index in the flattened `scored` of each scored token.
        predictors: int64 [n], index in the flattened rows of the token before each.
        labels: int64 [n], their ids.
        saved: share of the sequences' tokens that the rows do not repeat, 0 to 1.
    """

    batch: dict[str, Tensor]
    scored: Tensor
    places: Tensor
    predictors: Tensor
    labels: Tensor
    saved: float


def pack_shared(
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    scored: Tensor | None = None,
    max_length: int | None = None,
    pad_to_multiple_of: int | None = None,
) -> SharedRows:
    """Pack a batch's sequences into rows in which the model computes each common beginning once.

    The host reads the batch.

    Args:
        input_ids: int64 [N, L], sequences padded on any side, or flat rows of several sequences.
        attention_mask: [N, L], 0 for padding; numbers that grow along a row count its sequences. None: no padding.
        position_ids: int64 [N, L], 0 at the first token of each sequence of flat rows. After padding or another number
            of the mask, its column will do: the packed rows restart at 0, which is equal under RoPE. None: a sequence
            per row, or per number of the mask.
        scored: bool or int [N, K], nonzero for tokens of the last K columns to score. None: all. Padding and the first
            token of a sequence are never scored.
        max_length: as in `flashmask_hf.collators`; sequences with a common first token stay in one row.
        pad_to_multiple_of: see there.

    Raises:
        ValueError: shapes do not fit, there is no token, a sequence has a hole, or positions that jump or start neither
            at 0 nor at their column, sequences with a common first token exceed a row, or an option is out of range.

    Example:
        >>> rows = pack_shared(torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]))
        >>> rows.batch["input_ids"], rows.predictors, rows.labels
        (tensor([[5, 6, 7, 8, 9]]), tensor([0, 1, 2, 0, 1]), tensor([6, 7, 8, 6, 9]))
    """
    everything = torch.ones_like(input_ids)
    parts = [everything if x is None else x for x in (attention_mask, position_ids, scored)]
    shapes = [list(x.shape) for x in (input_ids, *parts)]
    are_matrices = all(len(shape) == 2 for shape in shapes) and len({shape[0] for shape in shapes}) == 1
    if not are_matrices or len({shape[1] for shape in shapes[:3]}) > 1 or shapes[3][1] > shapes[0][1]:
        raise ValueError(f"input_ids, attention_mask, position_ids must be [N, L], scored [N, K <= L], got {shapes}")
    unscored = shapes[0][1] - shapes[3][1]  # columns
    parts[2] = torch.nn.functional.pad(parts[2], (unscored, 0))
    batch = torch.stack([part.long() for part in (input_ids, *parts)])
    ids, numbers, positions, wanted = batch.cpu().numpy()  # waits for the device
    starts = numbers > np.maximum.accumulate(np.pad(numbers, ((0, 0), (1, 0)))[:, :-1], 1)
    columns = np.arange(ids.shape[1])[None]
    if position_ids is None:
        positions = columns
    else:
        starts |= positions == 0
    first = find_starts(numbers, positions, starts)
    if first is None or (first & (positions != 0) & (positions != columns)).any():
        raise ValueError(
            "a sequence has padding inside, or position_ids that jump or do not start at 0; pass whole sequences, on "
            "each rank its own"
        )
    if not first.any():
        raise ValueError("attention_mask is 0 everywhere: there is nothing to pack")
    real = numbers != 0
    rows, index, _ = pack_sequences(ids, real, first, max_length=max_length, pad_to_multiple_of=pad_to_multiple_of)
    chosen = real & ~first & (wanted != 0)
    before = index.ravel()[np.flatnonzero(chosen) - 1]
    own = chosen[:, unscored:]
    arrays = (own, np.flatnonzero(own), before, ids[chosen])
    scored, places, predictors, labels = (torch.from_numpy(x).to(input_ids.device) for x in arrays)
    saved = 1 - sum(len(forest.tokens) for forest in rows.forests) / int(real.sum())
    packed = {name: x.to(input_ids.device) for name, x in rows.batch().items()}
    return SharedRows(packed, scored, places, predictors, labels, saved)


def gather_logps(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    rows: SharedRows,
    *,
    temperature: float | Tensor = 1.0,
    chunk: int = 1024,
    entropy: bool = False,
) -> Tensor:
    """Return the log-probabilities of a batch's scored tokens, in chunks whose logits the backward computes again.

    Args:
        hidden: [R, S, H], the model's last hidden states of `rows.batch`.
        head: returns logits [m, V] of hidden states [m, H], such as `model.lm_head`, with any scale or softcap.
        rows: of `pack_shared`.
        temperature: divisor of the logits, a number, or a tensor [N, 1] for each row of the batch or [N, K] for each
            token of `scored`.
        chunk: most tokens with logits at a time, at least 1.
        entropy: whether to return the predictions' entropies, too.

    Returns:
        Tensor: float32 [N, K], 0 for tokens that are not scored; with `entropy` [2, N, K], the entropies last.

    Raises:
        ValueError: `chunk` is out of range, or `temperature` has another shape or is a number that is not positive.
    """
    size = as_integer("chunk", chunk, 1)
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}; pass the temperature of sampling")
        temperature = torch.full((), temperature, dtype=torch.float32, device=rows.scored.device)
    elif temperature.dim() and temperature.shape not in (rows.scored.shape, (len(rows.scored), 1)):
        got, shape = list(temperature.shape), list(rows.scored.shape)
        raise ValueError(f"temperature must be a number, [N, 1] or [N, K] for scored {shape}, got {got}; reshape it")
    divisors = temperature.to(rows.scored.device, torch.float32).expand(rows.scored.shape).flatten()[rows.places]

    def score(states: Tensor, labels: Tensor, divisor: Tensor) -> Tensor:
        logits = head(states).float() / divisor[:, None]
        total = logits.logsumexp(-1)
        found = [logits.gather(-1, labels[:, None])[:, 0] - total]
        if entropy:
            found.append(total - (logits.softmax(-1) * logits).sum(-1))
        return torch.stack(found)

    parts = hidden.flatten(0, 1)[rows.predictors], rows.labels, divisors
    chunks = zip(*(part.split(size) for part in parts), strict=True)
    values = torch.cat([checkpoint(score, *part, use_reentrant=False) for part in chunks], 1)
    scores = values.new_zeros(len(values), rows.scored.numel()).index_copy(1, rows.places, values)
    scores = scores.unflatten(1, rows.scored.shape)
    return scores if entropy else scores[0]
