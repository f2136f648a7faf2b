"""Pictures of masks, drawn with matplotlib (an optional extra)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from flashmask_hf.tiles import HIDDEN, PARTIAL, VISIBLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {VISIBLE: "#3f6b8f", PARTIAL: "#a9c3d6", HIDDEN: "#f1efea"}
_NAMES = {VISIBLE: "visible", PARTIAL: "partial", HIDDEN: "hidden"}
_EDGE_COLOR, _INK = "#c0603d", "#4a4a4a"
_GRID_TILES = 64
"""Most tiles per side that are drawn with gaps."""
_MOST_EDGES = 64
"""Most edges per side; with more, none is drawn."""
_KERNEL_TILE = 128
"""Tile size of the kernels, shown if the picture is readable with it."""


def readable_tile(length: int) -> int:
    """Return the tile size to draw a mask of this length: 1 up to 128, then 32 to 128 tiles per side."""
    if length <= _KERNEL_TILE:
        return 1
    largest = 1 << (length // 32).bit_length() - 1  # leaves 32 to 64 tiles
    smallest = 1 << (-(-length // 128) - 1).bit_length()  # leaves 65 to 128 tiles
    return min(largest, max(smallest, _KERNEL_TILE))


def plot_tiles(
    tiles: Tensor,
    block: tuple[int, int],
    lower: Tensor,
    rows: int,
    *,
    path: str | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the tiles of one mask head, as `FlashMask.plot` describes.

    Args:
        tiles: int8 [Tq, Tk] of HIDDEN, PARTIAL, VISIBLE.
        block: tile size (query rows, key columns).
        lower: int32 [Skv, 1 or 2], bounds of the lower interval of each key column.
        rows: number of query rows Sq.
        path: as in `FlashMask.plot`.
        title: as in `FlashMask.plot`.
        ax: as in `FlashMask.plot`.
    """
    try:
        from matplotlib.collections import LineCollection
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("plotting a mask needs matplotlib: pip install matplotlib") from error

    kv_len = lower.shape[0]
    columns, bounds = _document_edges(lower, rows)
    top, left = [*range(0, rows, block[0]), rows], [*range(0, kv_len, block[1]), kv_len]

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
    columns, bounds = (edges if len(edges) <= _MOST_EDGES else [] for edges in (columns, bounds))
    segments = [[(column, 0), (column, rows)] for column in columns]
    segments += [[(0, row), (kv_len, row)] for row in bounds]
    ax.add_collection(LineCollection(segments, colors=_EDGE_COLOR, linewidths=0.5, gid="edges"), autolim=False)

    for kind in (VISIBLE, PARTIAL, HIDDEN):
        share = float((tiles == kind).double().mean())
        if kind != PARTIAL or block != (1, 1):
            style = {"marker": "s", "s": 60, "color": _COLORS[kind], "edgecolors": "#cfccc4", "linewidths": 0.6}
            ax.scatter([], [], label=f"{_NAMES[kind]} {_percent(share)}", **style)
    figure = cast("Figure", ax.get_figure(root=True))
    if own_figure:
        figure.legend(
            loc="outside lower center",
            ncols=3,
            frameon=False,
            fontsize=9,
            labelcolor=_INK,
            handletextpad=0.2,
        )

    ax.set(xlim=(0, kv_len), ylim=(rows, 0))
    if 0.25 <= rows / kv_len <= 4:
        ax.set_aspect("equal")
    size = "" if block == (1, 1) else f" (tiles of {block[0]} x {block[1]})"
    for axis, label in ((ax.xaxis, f"key column{size}"), (ax.yaxis, "query row")):
        axis.set_label_text(label, color=_INK, fontsize=9)
        axis.set_major_locator(MaxNLocator(6, integer=True))
    ax.tick_params(colors=_INK, labelsize=8, length=2.5, width=0.6)
    for side in ax.spines.values():
        side.set(color="#b9b5ac", linewidth=0.6)
    if title is not None:
        ax.set_title(title, color=_INK, fontsize=11, pad=8)
    if path is not None:
        figure.savefig(path)
    return ax


def _percent(share: float) -> str:
    """Return a share in percent, 0% and 100% only if exact."""
    if 0 < share <= 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def _document_edges(lower: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Return where `lower` jumps between bounds of several columns: key columns, and bounds next to them."""
    change = lower[1:] != lower[:-1]  # row c lies between the columns c and c + 1
    constant = torch.nn.functional.pad(~change, (0, 0, 1, 1), value=False)
    jump = change & constant[:-2] & constant[2:]
    bounds = torch.cat([lower[:-1][jump], lower[1:][jump]]).unique()
    return (jump.any(1).nonzero().flatten() + 1).tolist(), bounds[(bounds > 0) & (bounds < rows)].tolist()
