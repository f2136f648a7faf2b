"""Random documents for block diffusion: a packed row of them, and padded batches as dllm's BD3LM trainer makes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from harness import random_lengths
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from flashmask_hf.collators import DataCollatorForBlockDiffusion
from flashmask_hf.names import DIFFUSION_WEIGHTS

BLOCK = 32  # tokens, dllm's default
MEAN, SHORTEST = 1024, 128  # tokens per document
BATCH_SIZE = 8  # documents of one batch of dllm, next to each other by length


@dataclass(frozen=True)
class Batch:
    """Padded documents as dllm trains them: noisy tokens, and then clean tokens.

    Attributes:
        ids: int64 [B, 2L].
        clean: int64 [B, L], what the noisy tokens are to be.
        weights: float32 [B, L], 0 where a token is not noised.
    """

    ids: Tensor
    clean: Tensor
    weights: Tensor

    def loss(self, logits: Tensor) -> Tensor:
        """Return the sum of the noised tokens' losses from logits [B, 2L, V]."""
        noised = self.weights > 0
        scores = logits[:, : noised.shape[1]][noised].float()
        return (cross_entropy(scores, self.clean[noised], reduction="none") * self.weights[noised]).sum()

    def positions(self) -> Tensor:
        """Return the positions, int64 [B, 2L]."""
        return torch.arange(self.clean.shape[1], device=self.ids.device).repeat(2).expand(len(self.ids), -1)

    def dense_mask(self) -> Tensor:
        """Return dllm's mask, bool [1, 1, 2L, 2L], which shows padding; dllm makes it on the CPU."""
        length = self.clean.shape[1]
        block = torch.arange(length, device=self.ids.device) // BLOCK
        own, before = block[:, None] == block, block[:, None] > block
        noisy, clean = torch.cat([own, before], 1), torch.cat([torch.zeros_like(own), own | before], 1)
        return torch.cat([noisy, clean])[None, None]


def draw_row(length: int, vocab: int, device: str, generator: torch.Generator) -> tuple[dict[str, Tensor], list[Batch]]:
    """Draw documents of `length` tokens in all: a packed row, and the same noise in padded batches."""
    collate = DataCollatorForBlockDiffusion(
        mask_token_id=vocab - 1, block_size=BLOCK, completion_only_loss=False, levels=(0.3, 0.8), seed=0
    )
    blocks = random_lengths(length // BLOCK, max(1, length // MEAN), generator, minimum=SHORTEST // BLOCK)
    lengths = [BLOCK * count for count in sorted(blocks)]  # dllm fills last blocks
    documents = [{"input_ids": torch.randint(0, vocab - 1, (n,), generator=generator).tolist()} for n in lengths]
    alone = [collate([document]) for document in documents]
    batches = []
    for first in range(0, len(documents), BATCH_SIZE):
        part = range(first, min(first + BATCH_SIZE, len(documents)))
        noisy = [alone[nth]["input_ids"][0, : lengths[nth]] for nth in part]
        weights = [alone[nth][DIFFUSION_WEIGHTS][0, : lengths[nth]] for nth in part]
        clean = pad_sequence([torch.tensor(documents[nth]["input_ids"]) for nth in part], True)
        ids = torch.cat([pad_sequence(noisy, True), clean], 1)
        batches.append(Batch(*(x.to(device) for x in (ids, clean, pad_sequence(weights, True)))))
    order = torch.randperm(len(documents), generator=generator).tolist()
    packed = collate([documents[nth] for nth in order])
    return {name: x.to(device) for name, x in packed.items()}, batches
