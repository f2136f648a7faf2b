"""Docstrings of mask constructors: drawings, examples, and a line for every argument."""

from __future__ import annotations

import doctest
import inspect
import re
import sys

import pytest
import torch

from flashmask_hf import masks

FAMILIES = [name for name in masks.__all__ if name not in ("Node", "block_diffusion_order", "draft_chains_order")]
DRAWN_LINE = re.compile(r"^        ([1.](?: [1.])*)(?:        ([1.](?: [1.])*))?$")
WITHOUT_CALL = {
    "qk_sparse": lambda: masks.qk_sparse(
        torch.tensor([[[True, False, True, True]]]), torch.tensor([[[True, True, False, True]]])
    ),
    "hash_sparse": lambda: masks.hash_sparse(torch.tensor([[[1, 0, 1, 0]]]), torch.tensor([[[1, 0, 1, 0]]])),
    "from_position_ids": lambda: masks.from_position_ids(torch.tensor([0, 1, 0])),
    "random_eviction": lambda: masks.random_eviction(5, evict_from=torch.tensor([[[4, 2, 5, 4, 5]]])),
}
"""Masks whose drawings are described in words, since their calls take tensors."""
SHARED = ("documents", "kv_len", "q_len", "causal", "device")


def drawings(name: str) -> list[tuple[str | None, list[str], list[str]]]:
    """Return for each drawing in a docstring its constructor call, its lines, and the lines drawn to their right."""
    found, call, left, right = [], None, [], []
    for line in [*(getattr(masks, name).__doc__ or "").splitlines(), ""]:
        drawn = DRAWN_LINE.match(line)
        if drawn:
            left.append(drawn[1].replace(" ", ""))
            right.append((drawn[2] or "").replace(" ", ""))
        elif left:
            found.append((call, left, right))
            call, left, right = None, [], []
        named = re.match(r"^    `(\w+\(.*?\))`", line)
        call = named[1] if named else call
    return found


def as_lines(visible: torch.Tensor) -> list[str]:
    """Return a dense mask [Sq, Skv] as it is drawn, without the spaces."""
    return ["".join("1" if cell else "." for cell in row) for row in visible.tolist()]


@pytest.mark.parametrize("name", FAMILIES)
def test_docstrings_draw_what_the_function_returns(name):
    assert drawings(name), "a mask's docstring draws it"
    for call, left, right in drawings(name):
        if name in WITHOUT_CALL:
            assert as_lines(WITHOUT_CALL[name]().to_dense()[0, 0]) == (right if any(right) else left)
        else:
            assert call is not None
            assert call.startswith(f"{name}(")
            assert as_lines(eval(call, vars(masks)).to_dense()[0, 0]) == left


def test_sparse_drawings_show_the_original_order_on_the_left():
    q_keep, k_keep, bucket = [1, 0, 1, 1], [1, 1, 0, 1], [1, 0, 1, 0]
    kept = [[bool(q_keep[i] and k_keep[j] and j <= i) for j in range(4)] for i in range(4)]
    hashed = [[bucket[i] == bucket[j] and j <= i for j in range(4)] for i in range(4)]
    assert drawings("qk_sparse")[0][1] == as_lines(torch.tensor(kept))
    assert drawings("hash_sparse")[0][1] == as_lines(torch.tensor(hashed))


@pytest.mark.parametrize("module", sorted({getattr(masks, name).__module__ for name in FAMILIES}))
def test_the_examples_in_docstrings_run(module):
    result = doctest.testmod(sys.modules[module])
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_docstrings_name_every_argument(name):
    """The gallery describes the arguments that families share, and a family its own and those with another meaning."""
    function = getattr(masks, name)
    text = inspect.getdoc(function) or ""
    own = [argument for argument in inspect.signature(function).parameters if argument not in SHARED]
    for argument in own:
        assert f"\n    {argument}: " in text, argument
    assert "\nReturns:\n    FlashMask: " in text
    assert not own or "\nRaises:\n" in text


def test_the_gallery_describes_shared_arguments():
    for argument in SHARED:
        assert f"\n* `{argument}`: " in (masks.__doc__ or ""), argument
