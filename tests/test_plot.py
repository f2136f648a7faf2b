"""FlashMask.plot: the tiles, edges and legend that it draws."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, QuadMesh
from matplotlib.figure import Figure

from flashmask_hf import FlashMask, masks
from flashmask_hf.plot import readable_tile
from flashmask_hf.tiles import HIDDEN, VISIBLE, classify_tiles


def mask_of(*columns: list[int], causal: bool) -> FlashMask:
    """Build a mask [1, 1, Skv, n] from its n vectors."""
    return FlashMask(torch.tensor(columns, dtype=torch.int32).T[None, None].contiguous(), causal)


def drawn_edges(ax: Axes) -> tuple[list[float], list[float]]:
    """Return the columns and the rows at which edges are drawn."""
    (lines,) = (x for x in ax.collections if isinstance(x, LineCollection) and x.get_gid() == "edges")
    columns, rows = [], []
    for (x0, y0), (x1, y1) in lines.get_segments():
        assert (x0 == x1) != (y0 == y1)
        (columns if x0 == x1 else rows).append(x0 if x0 == x1 else y0)
    return columns, rows


def drawn_tiles(ax: Axes) -> np.ndarray:
    """Return the classes of the tiles that are drawn, [Tq, Tk]."""
    (mesh,) = (x for x in ax.collections if isinstance(x, QuadMesh))
    return np.asarray(mesh.get_array())


@pytest.mark.parametrize("name", ["mask.png", "mask.svg"])
def test_plot_writes_a_picture(tmp_path, name):
    path = tmp_path / name
    ax = masks.causal_document([5, 3, 8]).plot(str(path), title="three documents")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" if name.endswith("png") else b"<svg" in path.read_bytes()
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("key column", "query row", "three documents")
    assert ax.get_ylim() == (16, 0), "query 0 is at the top"
    (legend,) = ax.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["visible 22%", "hidden 78%"]


def test_plot_draws_elements_of_a_short_mask_and_tiles_of_a_long_one():
    short = masks.padding([7, 5], q_len=6)
    assert np.array_equal(drawn_tiles(short.plot(batch=1)) == VISIBLE, short.to_dense()[1, 0].numpy())
    assert np.array_equal(drawn_tiles(short.plot(batch=-1)), drawn_tiles(short.plot(batch=1)))
    long = masks.random_eviction(300, generator=torch.Generator().manual_seed(0), heads=2)
    assert np.array_equal(drawn_tiles(long.plot(head=1)), classify_tiles(long.indices, True, 300, (8, 8))[0, 1].numpy())
    for name, index in (("batch", 1), ("head", 2), ("head", -3)):
        with pytest.raises(ValueError, match=f"{name} must be one of the mask's"):
            long.plot(**{name: index})
    ax = long.plot(head=1, block=(64, 32))
    assert np.array_equal(drawn_tiles(ax), classify_tiles(long.indices, True, 300, (64, 32))[0, 1].numpy())
    assert len(ax.figure.legends[0].get_texts()) == 3


@pytest.mark.parametrize(
    ("mask", "columns", "rows"),
    [
        (masks.causal_document([5, 3, 8]), [5, 8], [5, 8]),
        (masks.document([5, 3, 8], q_len=10), [5, 8], [2]),
        (masks.share_question([(4, [2, 3]), (2, [3, 2])]), [4, 6, 9, 11, 14], [6, 9, 14]),
        (masks.prefix_lm_document([(2, 6), (3, 5)]), [6], [6]),
        (masks.padding([6], kv_len=9), [6], [6]),
        (masks.causal(9), [], []),
        (masks.sliding_window(9, 3), [], []),
        (masks.global_sliding_window(9, 2, 2), [], []),
        (masks.full(1), [], []),
        (mask_of([4] * 6, [5] * 3 + [6] * 3, causal=True), [3], [5]),
        (mask_of([4] * 6, [5] * 3 + [6] * 3, [0] * 6, [0] * 6, causal=False), [3], [5]),
        (mask_of([6] * 6, [0] * 3 + [2] * 3, causal=False), [], []),
    ],
    ids=[
        "documents",
        "documents, last queries",
        "answers",
        "prefixes",
        "padding",
        "causal",
        "window",
        "global window",
        "one pair",
        "LTE jumps, n = 2",
        "LTE jumps, n = 4",
        "UTE jumps",
    ],
)
def test_plot_marks_the_edges_of_documents_only(mask, columns, rows):
    assert drawn_edges(mask.plot()) == (columns, rows)


@pytest.mark.parametrize(
    ("length", "tile"),
    [
        (1, 1),
        (64, 1),
        (128, 1),
        (129, 4),
        (512, 16),
        (4095, 64),
        (4096, 128),
        (16384, 128),
        (16385, 256),
        (131072, 1024),
    ],
)
def test_tiles_show_something_at_any_length(length, tile):
    assert readable_tile(length) == tile
    assert length <= 128 or 32 <= -(-length // tile) <= 128


@pytest.mark.parametrize("length", [64, 512, 131_072])
def test_a_picture_tells_hidden_from_visible(length):
    ax = masks.causal_document([length // 4] * 4).plot()
    assert set(np.unique(drawn_tiles(ax))) >= {HIDDEN, VISIBLE}
    assert len(drawn_edges(ax)[0]) == 3


def test_more_edges_than_a_picture_can_show_are_left_out():
    assert len(drawn_edges(masks.causal_document([2] * 65).plot())[0]) == 64
    assert drawn_edges(masks.causal_document([2] * 66).plot()) == ([], [])


def test_the_axis_names_the_tiles_and_shares_do_not_round_to_nothing():
    ax = masks.causal_document([4] * 1024).plot()
    assert ax.get_xlabel() == "key column (tiles of 128 x 128)"
    assert ax.get_legend_handles_labels()[1] == ["visible 0%", "partial 3%", "hidden 97%"]
    labels = masks.causal_document([1] * 300).plot(block=(1, 1)).get_legend_handles_labels()[1]
    assert labels == ["visible <1%", "hidden >99%"]
    assert masks.full(4).plot().get_legend_handles_labels()[1] == ["visible 100%", "hidden 0%"]
    labels = masks.sliding_window(200, 1, q_len=1).plot(block=(1, 1)).get_legend_handles_labels()[1]
    assert labels == ["visible <1%", "hidden >99%"]


@pytest.mark.parametrize(("mask", "apart"), [(masks.causal(64), True), (masks.full(65, q_len=1), False)])
def test_gaps_set_up_to_64_tiles_a_side_apart(mask, apart):
    """More tiles are one image, which a vector file stores in less space."""
    (mesh,) = (x for x in mask.plot().collections if isinstance(x, QuadMesh))
    assert mesh.get_rasterized() is not apart
    assert (mesh.get_linewidth().tolist() == [0.4]) is apart


@pytest.mark.parametrize(("rows", "aspect"), [(24, "auto"), (25, 1.0), (400, 1.0), (401, "auto")])
def test_tiles_are_square_unless_the_picture_would_be_a_strip(rows, aspect):
    assert masks.full(100, q_len=rows).plot().get_aspect() == aspect


def test_plot_draws_on_the_callers_axes_without_a_legend():
    figure = Figure()
    ax = figure.add_subplot()
    assert masks.causal(200, q_len=200).plot(ax=ax, block=(50, 50)) is ax
    assert figure.legends == []
    assert ax.get_legend_handles_labels()[1] == ["visible 38%", "partial 25%", "hidden 38%"]


def test_plot_without_matplotlib_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        masks.causal(4).plot()
