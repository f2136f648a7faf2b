"""Helpers of packing tests: documents of random tokens, datasets of them, and the documents of packed rows."""

from itertools import chain

import numpy as np
from datasets import Dataset
from tools.tiny import VOCAB


def documents(lengths, seed=0):
    """Draw a list of random tokens per length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, length).tolist() for length in lengths]


def examples(lengths, seed=0):
    return [{"input_ids": tokens} for tokens in documents(lengths, seed)]


def flat(lists):
    return list(chain.from_iterable(lists))


def dataset(lengths, **columns):
    return Dataset.from_dict({"input_ids": documents(lengths), **columns})


def unpack(packed, column="input_ids"):
    """Return the documents of a packed dataset."""
    found = []
    for row in packed:
        *own, end = row[column]
        assert end == []
        assert list(map(len, own)) == row["seq_lengths"]
        found += own
    return found


def random_parents(integer, most=7):
    """Return the parents of up to `most` segments in depth-first order; `integer` draws a number in (low, high).

    Each segment extends the current path somewhere, or starts a tree.
    """
    parents, branch = [], [-1]
    for segment in range(integer(1, most)):
        branch = branch[: integer(1, len(branch))]
        parents.append(branch[-1])
        branch.append(segment)
    return parents


def lineage(parents, segment):
    """Return the segments on the path from a root through `segment`."""
    return [*(lineage(parents, parents[segment]) if parents[segment] != -1 else []), segment]


MASKED = {
    "input_ids": [[5, 6, 7, 8], [9, 10], [11, 12, 13]],
    "completion_mask": [[0, 0, 1, 1], [0, 1], [0, 1, 1]],
    "assistant_masks": [[1, 1, 1, 0], [1, 1], [1, 1, 1]],
}


SAME = ("loss", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens")
"""What a log of training has in common with stock TRL's."""

PREFIXES = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0.3}
PREFIXES |= {"max_length": 64, "completion_only_loss": True}
"""Settings of a run on `turns`, with their batch size: 16 examples, or 4 rows."""


def turns():
    """Return tokenized examples that are the turns of four conversations, whose answers are learned."""
    data = {"input_ids": [], "completion_mask": []}
    for conversation in range(4):
        history = []
        for turn in documents([14] * 4, seed=conversation):
            data["input_ids"].append(history + turn)
            data["completion_mask"].append([0] * (len(history) + 8) + [1] * 6)
            history = history + turn[:5]  # what it thought is dropped
    return data
