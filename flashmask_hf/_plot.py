"""A picture of a mask (matplotlib, an optional extra)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from flashmask_hf.mask import HIDDEN, PARTIAL, VISIBLE, FlashMask, classify_tiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_mask"]

_COLORS = {VISIBLE: "#3f6b8f", PARTIAL: "#a9c3d6", HIDDEN: "#f1efea"}
_NAMES = {VISIBLE: "visible", PARTIAL: "partial", HIDDEN: "hidden"}
_EDGE_COLOR, _INK = "#c0603d", "#4a4a4a"
_ELEMENTWISE_KEYS = 128  # up to here a tile is one element
_GRID_TILES = 64  # up to here the tiles are set apart by thin gaps


def plot_mask(
    mask: FlashMask,
    path: str | None = None,
    *,
    block: tuple[int, int] | None = None,
    q_len: int | None = None,
    batch: int = 0,
    head: int = 0,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the tiles of one mask head; `FlashMask.plot` documents the arguments.

    A figure made here gets a legend. On axes of your own the caller places it: `ax.legend()`, or one for a whole figure
    with `figure.legend(*ax.get_legend_handles_labels())`.
    """
    try:
        from matplotlib.collections import LineCollection
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("plotting a mask needs matplotlib: pip install flashmask-hf[plot]") from error

    rows, kv_len = mask.rows(q_len), mask.kv_len
    if block is None:
        block = (1, 1) if kv_len <= _ELEMENTWISE_KEYS else (128, 128)
    for name, index, size in (("batch", batch, mask.indices.shape[0]), ("head", head, mask.indices.shape[1])):
        if not -size <= index < size:
            raise ValueError(f"{name} must be one of the mask's {size}, got {index}")
    one = FlashMask(mask.indices[batch, head][None, None].cpu(), mask.causal, q_len=rows)
    tiles = classify_tiles(one, block)[0, 0]
    columns, bounds = _edges(one, rows)
    top, left = _tile_edges(rows, block[0]), _tile_edges(kv_len, block[1])

    own_figure = ax is None
    if ax is None:
        ax = Figure(figsize=(4.6, 5.0), dpi=150, layout="constrained").add_subplot()
    gaps = {"edgecolors": "white", "linewidth": 0.4} if max(tiles.shape) <= _GRID_TILES else {}
    ax.pcolormesh(
        left,
        top,
        tiles.numpy(),
        cmap=ListedColormap([_COLORS[kind] for kind in (HIDDEN, PARTIAL, VISIBLE)]),
        vmin=HIDDEN,
        vmax=VISIBLE,
        rasterized=not gaps,
        **gaps,
    )
    segments = [[(column, 0), (column, rows)] for column in columns]
    segments += [[(0, row), (kv_len, row)] for row in bounds]
    ax.add_collection(LineCollection(segments, colors=_EDGE_COLOR, linewidths=0.5, gid="edges"), autolim=False)

    for kind in (VISIBLE, PARTIAL, HIDDEN):
        share = float((tiles == kind).double().mean())
        if kind != PARTIAL or block != (1, 1):
            style = {"marker": "s", "s": 60, "color": _COLORS[kind], "edgecolors": "#cfccc4", "linewidths": 0.6}
            ax.scatter([], [], label=f"{_NAMES[kind]} {share:.0%}", **style)
    figure = cast("Figure", ax.get_figure(root=True))
    if own_figure:
        handles, labels = ax.get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=3,
            frameon=False,
            fontsize=9,
            labelcolor=_INK,
            handletextpad=0.2,
        )

    ax.set_xlim(0, kv_len)
    ax.set_ylim(rows, 0)
    if 0.25 <= rows / kv_len <= 4:
        ax.set_aspect("equal")
    ax.set_xlabel("key column", color=_INK, fontsize=9)
    ax.set_ylabel("query row", color=_INK, fontsize=9)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.tick_params(colors=_INK, labelsize=8, length=2.5, width=0.6)
    for side in ax.spines.values():
        side.set(color="#b9b5ac", linewidth=0.6)
    if title is not None:
        ax.set_title(title, color=_INK, fontsize=11, pad=8)
    if path is not None:
        figure.savefig(path)
    return ax


def _tile_edges(length: int, size: int) -> list[int]:
    """Where tiles of `size` begin, and where the last one, cut to `length`, ends."""
    return [*range(0, length, size), length]


def _edges(mask: FlashMask, rows: int) -> tuple[list[int], list[int]]:
    """Where the lower interval jumps between bounds that hold for two columns or more each, as documents do.

    Returns:
        the key columns of the jumps, and the query rows that are bounds on either side of one.
    """
    lower = mask.indices[0, 0, :, : 2 if mask.causal or mask.indices.shape[-1] == 4 else 1]  # [Skv, 1 or 2]
    change = lower[1:] != lower[:-1]  # row c lies between the columns c and c + 1
    constant = torch.nn.functional.pad(~change, (0, 0, 1, 1), value=False)
    jump = change & constant[:-2] & constant[2:]
    bounds = torch.cat([lower[:-1][jump], lower[1:][jump]]).unique()
    return (jump.any(1).nonzero().flatten() + 1).tolist(), bounds[(bounds > 0) & (bounds < rows)].tolist()
