"""Pictures of masks, and the gallery of mask families from their docstrings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from flashmask_hf import FlashMask, masks

SEARCHED = (160, [(96, [128, 64, 192]), 224])  # a turn and two results of its tool; three rollouts go on from the first
KEPT = torch.rand(1, 1, 32, generator=torch.Generator().manual_seed(0)) > 0.3
BUCKETS = torch.randint(0, 4, (1, 1, 32), generator=torch.Generator().manual_seed(0))

GALLERY: dict[str, tuple[str, Callable[[], FlashMask]]] = {
    "causal_document": ("causal_document([10, 14, 8])", lambda: masks.causal_document([10, 14, 8])),
    "document": ("document([10, 14, 8])", lambda: masks.document([10, 14, 8])),
    "share_question": (
        "share_question([(8, [4, 6]), (5, [3, 3, 3])])",
        lambda: masks.share_question([(8, [4, 6]), (5, [3, 3, 3])]),
    ),
    "tree": ("tree([(6, [(4, [5, 3]), (3, [6, 5])])])", lambda: masks.tree([(6, [(4, [5, 3]), (3, [6, 5])])])),
    "full": ("full(32)", lambda: masks.full(32)),
    "causal": ("causal(32)", lambda: masks.causal(32)),
    "sliding_window": ("sliding_window(32, 8)", lambda: masks.sliding_window(32, 8)),
    "global_sliding_window": ("global_sliding_window(32, 3, 6)", lambda: masks.global_sliding_window(32, 3, 6)),
    "prefix_lm_causal": ("prefix_lm_causal(32, 12)", lambda: masks.prefix_lm_causal(32, 12)),
    "prefix_lm_document": (
        "prefix_lm_document([(6, 14), (4, 18)])",
        lambda: masks.prefix_lm_document([(6, 14), (4, 18)]),
    ),
    "causal_blockwise": ("causal_blockwise([10, 8, 6, 8])", lambda: masks.causal_blockwise([10, 8, 6, 8])),
    "padding": ('padding([24], kv_len=32, side="left")', lambda: masks.padding([24], kv_len=32, side="left")),
    "random_eviction": ("random_eviction(32, evict_from=rows)", lambda: _evicted()),
    "qk_sparse": ("qk_sparse(q_keep, k_keep)", lambda: masks.qk_sparse(KEPT, KEPT.flip(-1))),
    "hash_sparse": ("hash_sparse(q_bucket, k_bucket)", lambda: masks.hash_sparse(BUCKETS, BUCKETS.flip(-1))),
}
"""Example of each mask family: how it is written, and the mask."""


def _evicted() -> FlashMask:
    kept = torch.randint(0, 32, (32,), generator=torch.Generator().manual_seed(0))
    return masks.random_eviction(32, evict_from=(torch.arange(32) + 1 + kept).clamp(max=32).view(1, 1, 32))


def gallery() -> str:
    """Return the gallery: of each family its call, the first sentence of its docstring, and its picture."""
    parts = []
    for name, (call, _) in GALLERY.items():
        sentence = " ".join((getattr(masks, name).__doc__ or "").split("\n\n")[0].split())
        parts.append(f"## {name}\n\n{sentence}\n\n`masks.{call}`\n\n![{name}](assets/masks/{name}.png)\n")
    return "\n\n" + "\n".join(parts) + "\n"


def thumbnail(mask: FlashMask, path: Path) -> None:
    """Save a small picture of a mask, without axes."""
    figure = Figure(figsize=(2.4, 2.4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    mask.plot(ax=axes)
    axes.set(xlabel="", ylabel="", xticks=[], yticks=[])
    figure.savefig(path)


PICTURES: dict[str, Callable[[Path], Any]] = {
    "mask": lambda path: masks.causal_document([900, 1500, 300, 1396]).plot(str(path)),
    "shared_question": lambda path: masks.share_question([(1600, [300, 420]), (1200, [240, 336])]).plot(str(path)),
    "prompt_group": lambda path: masks.share_question([(1024, [128, 96, 160, 64, 128, 192, 80, 176])]).plot(str(path)),
    "rollout_tree": lambda path: masks.tree([(640, [SEARCHED, (128, [160, 256])])]).plot(str(path)),
    **{f"masks/{name}": partial(thumbnail, make()) for name, (_, make) in GALLERY.items()},
}
"""Function of each picture of a mask in docs/assets, by its name without the suffix."""
