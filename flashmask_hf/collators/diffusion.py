"""Data collators that noise packed documents to train diffusion language models, in blocks or whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashmask_hf._numbers import as_integer
from flashmask_hf.collators.columns import as_numbers
from flashmask_hf.collators.forest import Forest
from flashmask_hf.collators.language_modeling import DataCollatorForPackedLanguageModeling
from flashmask_hf.mask import FlashMask
from flashmask_hf.masks.diffusion import block_diffusion, block_diffusion_order
from flashmask_hf.masks.documents import document
from flashmask_hf.names import DIFFUSION_LABELS, DIFFUSION_WEIGHTS, IGNORED, VECTORS


@dataclass
class DataCollatorForMaskedDiffusion(DataCollatorForPackedLanguageModeling):
    """Data collator of packed documents whose tokens see each other, some of them noised (MDLM, LLaDA, Dream).

    Each document draws a noise level t from `levels`, the probability with which the mask token replaces each labelled
    token. Examples and other options are as in `DataCollatorForPackedLanguageModeling`; first tokens are learned, too.
    The loss is `diffusion_loss`.

    Args:
        mask_token_id: token id that replaces noised tokens.
        levels: range of noise levels, 0 < low <= high <= 1; (0.3, 0.8) in BD3LM.
        weight: weight of a noised token: "1/t", the variational bound, or "uniform".
        seed: what fixes each example's noise; None draws it from torch's random state.
        shift: whether a token's logits predict the next token (Dream). First tokens are then never noised.

    Returns:
        dict[str, Tensor]: `input_ids`, noised, `position_ids` and `labels`, int64 [rows, S]; `startend_row_indices`,
        int32 [rows, 1, S, 4]; `diffusion_labels`, int64 [rows, S], the noised token that each row predicts, or -100;
        `diffusion_weights`, float32 [rows, S].

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is out of range, or examples have weights or share prefixes.

    Example:
        >>> collator = DataCollatorForMaskedDiffusion(mask_token_id=9, seed=4)
        >>> batch = collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5], "completion_mask": [0, 1]}])
        >>> batch["input_ids"]
        tensor([[9, 9, 9, 4, 9]])
        >>> batch["diffusion_labels"]
        tensor([[   1,    2,    3, -100,    5]])
    """

    mask_token_id: int = field(kw_only=True)
    levels: tuple[float, float] = field(default=(1e-3, 1.0), kw_only=True)
    weight: Literal["1/t", "uniform"] = field(default="1/t", kw_only=True)
    seed: int | None = field(default=None, kw_only=True)
    shift: bool = field(default=False, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        self.mask_token_id = as_integer("mask_token_id", self.mask_token_id, 0, why="it is an id of the vocabulary")
        if self.seed is not None:
            self.seed = as_integer("seed", self.seed, 0, why="or None")
        low, high = as_numbers(self.levels, 2, "ends", "levels")
        if not 0 < low <= high <= 1:
            raise ValueError(f"levels must be 0 < low <= high <= 1, got {self.levels}; the default is (0.001, 1.0)")
        if self.weight not in ("1/t", "uniform"):
            raise ValueError(f"weight must be '1/t' or 'uniform', got {self.weight!r}")

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate one batch."""
        rows, labels, weighed = self._pack_examples(examples, learns_first=not self.shift)
        if weighed is not None:
            raise ValueError(
                "the examples have weights, or share prefixes, which diffusion does not read; remove the column of "
                "weights, and pack without share_prefixes"
            )
        drawn = zip(*map(self._draw, rows.forests), strict=True)
        noise = np.stack([rows.spread(copy, filler=0, dtype=np.float32) for copy in drawn])
        noise[:, labels == IGNORED] = 0
        lengths = [np.diff(np.unique(ends[ends > 0]), prepend=0).tolist() for ends in rows.subtree_ends]
        return self._lay_out(lengths, *map(torch.from_numpy, (rows.input_ids, rows.position_ids, labels, noise)))

    def _draw(self, forest: Forest) -> NDArray[np.float64]:
        """Draw the weight of each noised token of an example, 0 for others, [copies, n]."""
        return self._noise(forest, forest.lengths)

    def _noise(
        self, forest: Forest, spans: NDArray[np.int64], copies: int = 1, complementary: bool = False
    ) -> NDArray[np.float64]:
        """Draw weights as `_draw`, with a noise level for each span of these lengths."""
        base = int(torch.randint(2**62, ())) if self.seed is None else self.seed
        random = np.random.default_rng([base, crc32(forest.tokens.tobytes())])
        low, high = self.levels
        level = np.repeat(low + (high - low) * random.random((copies, len(spans))), spans, axis=1)
        draw = random.random(level.shape)
        if complementary:
            level[1::2], draw[1::2] = 1 - level[::2], 1 - draw[::2]
        return (draw < level) / (level if self.weight == "1/t" else 1.0)

    def _lay_out(
        self, lengths: list[list[int]], ids: Tensor, positions: Tensor, labels: Tensor, noise: Tensor
    ) -> dict[str, Tensor]:
        """Return the batch from packed documents [rows, S] and their noise [copies, rows, S]."""
        mask = document(lengths, kv_len=ids.shape[1], q_len=ids.shape[1])
        weights, noised = noise[0], noise[0] > 0
        batch = self._batch(mask, ids.masked_fill(noised, self.mask_token_id), positions, labels)
        targets = labels.masked_fill(~noised, IGNORED)
        if self.shift:
            targets, weights = targets.roll(-1, 1), weights.roll(-1, 1)
        return batch | {DIFFUSION_LABELS: targets, DIFFUSION_WEIGHTS: weights}

    def _batch(self, mask: FlashMask, ids: Tensor, positions: Tensor, labels: Tensor) -> dict[str, Tensor]:
        indices = mask.bidirectional().indices
        return {"input_ids": ids, "position_ids": positions, VECTORS: indices, "labels": labels}


@dataclass
class DataCollatorForBlockDiffusion(DataCollatorForMaskedDiffusion):
    """Data collator of block diffusion: noisy blocks beside their clean documents (BD3LM, SDAR, Fast-dLLM v2).

    Rows are in the order of `masks.block_diffusion`: n tokens of documents, which `max_length` counts, make
    (copies + 1) * n. The rest is as in `DataCollatorForMaskedDiffusion`.

    Args:
        block_size: tokens per block; a document's last block may be shorter.
        copies: noisy copies per document; the loss is their mean.
        complementary: whether every second copy noises what the copy before leaves (Fast-dLLM v2). `copies` must be
            even, and `levels[0]` at most 0.5; levels end at 1 - `levels[0]`.
        per: whether each "document" or each "block" (BD3LM) draws a noise level.

    Returns:
        dict[str, Tensor]: as in `DataCollatorForMaskedDiffusion`; `labels` are at clean rows, `diffusion_labels` at
        noisy rows.

    Example:
        >>> collator = DataCollatorForBlockDiffusion(mask_token_id=9, block_size=2, seed=1)
        >>> batch = collator([{"input_ids": [1, 2, 3]}])  # noisy 1 2 3, clean 3 1 2
        >>> batch["input_ids"]
        tensor([[1, 9, 9, 3, 1, 2]])
        >>> batch["position_ids"]
        tensor([[0, 1, 2, 2, 0, 1]])
        >>> batch["diffusion_labels"]
        tensor([[-100,    2,    3, -100, -100, -100]])
    """

    block_size: int = field(kw_only=True)
    copies: int = field(default=1, kw_only=True)
    complementary: bool = field(default=False, kw_only=True)
    per: Literal["document", "block"] = field(default="document", kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        self.block_size = as_integer("block_size", self.block_size, 1, why="a block has at least one token")
        self.copies = as_integer("copies", self.copies, 1)
        if self.per not in ("document", "block"):
            raise ValueError(f"per must be 'document' or 'block', got {self.per!r}")
        if self.complementary and self.copies % 2:
            raise ValueError(f"complementary needs an even number of copies, got copies={self.copies}; set copies=2")
        if self.complementary:
            low, high = self.levels
            if low > 0.5:
                raise ValueError(f"complementary needs levels[0] <= 0.5, as levels end at 1 - levels[0], got {low}")
            self.levels = (low, min(high, 1 - low))
        if self.shift:
            raise ValueError("shift is for whole documents: the token before a block has no noisy row; leave it out")

    def _draw(self, forest: Forest) -> NDArray[np.float64]:
        spans, size = forest.lengths, self.block_size
        if self.per == "block":
            spans = np.concatenate([np.diff([*range(0, length, size), length]) for length in spans.tolist()])
        return self._noise(forest, spans, self.copies, self.complementary) / self.copies

    def _lay_out(
        self, lengths: list[list[int]], ids: Tensor, positions: Tensor, labels: Tensor, noise: Tensor
    ) -> dict[str, Tensor]:
        row = (self.copies + 1) * ids.shape[1]
        mask = block_diffusion(lengths, self.block_size, self.copies, kv_len=row, q_len=row)
        shape = (len(ids), row)
        made = (torch.full(shape, self.pad_token_id), torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED))
        targets, weights = torch.full(shape, IGNORED), torch.zeros(shape, dtype=noise.dtype)
        for nth, own in enumerate(lengths):
            index, noisy = block_diffusion_order(own, self.block_size, self.copies)
            end = len(index)
            for values, laid_out in zip((ids, positions, labels), made, strict=True):
                laid_out[nth, :end] = values[nth, index]
            learned = made[2][nth, :end].clone()
            made[2][nth, :end][noisy] = IGNORED
            rows = noisy.nonzero()[:, 0][index[noisy].argsort(stable=True)].view(-1, self.copies)
            weights[nth, rows] = noise[:, nth, : len(rows)].T
            noised = weights[nth, :end] > 0
            made[0][nth, :end][noised] = self.mask_token_id
            targets[nth, :end] = learned.masked_fill(~noised, IGNORED)
        return self._batch(mask, *made) | {DIFFUSION_LABELS: targets, DIFFUSION_WEIGHTS: weights}
