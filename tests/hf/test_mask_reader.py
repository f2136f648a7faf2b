"""Tracing of mask functions: those of transformers under torch.compile, and functions of a caller's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tools.tiny import assert_exact
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.testing import CompileCounter
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Llama4TextConfig,
    ModernBertConfig,
    PreTrainedConfig,
)
from transformers import masking_utils as hf

from flashmask_hf import FlashMask
from flashmask_hf.hf import mask_hook as hook_module
from flashmask_hf.hf.layer_mask import columns_of
from flashmask_hf.hf.mask_hook import mask_hook

pytestmark = pytest.mark.usefixtures("no_compiled_code")

WINDOW, CHUNK = 4, 5
sdpa_mask: Any = hf.sdpa_mask
LENGTHS = (12, 17, 30)


def tables(length: int) -> dict[str, Tensor]:
    """Return positions of documents, and the tables that mask functions look into: images, and padding before them."""
    lengths = [[5, 3, length - 8], [length - 4, 4]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    images = torch.full((2, length), -1)
    images[0, 1:4], images[0, 5:7], images[1, 2:9] = 0, 1, 0
    return dict(
        positions=positions,
        images=images,
        padding=torch.tensor([0, 2]),
    )


Make = Callable[[dict[str, Tensor]], Callable[..., Any]]

FUNCTIONS: dict[str, Make] = {
    "causal": lambda t: hf.causal_mask_function,
    "bidirectional": lambda t: hf.bidirectional_mask_function,
    "window": lambda t: hf.sliding_window_causal_mask_function(WINDOW),
    "two-sided window": lambda t: hf.sliding_window_bidirectional_mask_function(WINDOW),
    "chunks": lambda t: hf.chunked_causal_mask_function(CHUNK, t["padding"]),
    "two-sided chunks": lambda t: hf.chunked_overlay(CHUNK, t["padding"]),
    "images": lambda t: hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(t["images"])),
    "images in a window": lambda t: hf.and_masks(
        hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(t["images"])), hf.sliding_window_overlay(WINDOW)
    ),
    "images beside a window": lambda t: hf.or_masks(
        hf.sliding_window_causal_mask_function(WINDOW), hf.blockwise_overlay(t["images"])
    ),
    "images within chunks": lambda t: hf.and_masks(
        hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(t["images"])),
        hf.chunked_overlay(CHUNK, t["padding"]),
    ),
}


def dense(hooked: Tensor, q_length: int) -> Tensor:
    columns = columns_of(hooked)
    return FlashMask(columns.mT.contiguous(), columns.shape[2] == 1).validate(q_length).to_dense(q_length)


CASES = [
    pytest.param(name, cache, marks=[pytest.mark.full] * (i % 2))
    for cache in ("none", "static")
    for i, name in enumerate(FUNCTIONS)
]


@pytest.mark.parametrize(("name", "cache"), CASES)
def test_compiled(name: str, cache: str) -> None:
    """Compile one graph for all lengths; the columns equal those without a compiler."""
    make, graphs = FUNCTIONS[name], CompileCounter()

    def columns(t: dict[str, Tensor], queries: Tensor, padding: Tensor, offset: Any) -> Tensor:
        return mask_hook(
            batch_size=2,
            q_length=queries.shape[0],
            kv_length=padding.shape[1],
            q_offset=offset,
            mask_function=make(t),
            attention_mask=padding,
        )

    compiled = torch.compile(columns, fullgraph=True, backend=graphs, dynamic=True)
    for length in LENGTHS:
        t, padding = tables(length), torch.arange(length) >= torch.tensor([[0], [2]])
        offset = torch.tensor(length - 7) if cache == "static" else 0
        queries = torch.zeros(3 if cache == "static" else length)
        got = compiled(t, queries, padding, offset)
        assert torch.equal(got, columns(t, queries, padding, offset))
        want = sdpa_mask(
            batch_size=2,
            q_length=len(queries),
            kv_length=length,
            q_offset=offset,
            mask_function=make(t),
            attention_mask=padding,
            allow_is_causal_skip=False,
        )
        assert torch.equal(dense(got, len(queries)).expand_as(want), want)
    assert graphs.frame_count == 1


SIZES: dict[str, Any] = dict(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
)
GROUPED: dict[str, Any] = SIZES | dict(num_key_value_heads=2, head_dim=8)
LAYERS = ["sliding_attention", "full_attention"]
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "chunks and all": lambda: Llama4TextConfig(
        **GROUPED,
        intermediate_size_mlp=32,
        num_local_experts=2,
        attention_chunk_size=CHUNK,
        no_rope_layers=[1, 0],
        eos_token_id=2,
    ),
    "windows and all": lambda: Gemma3TextConfig(**GROUPED, sliding_window=WINDOW, layer_types=LAYERS),
    "two-sided windows and all": lambda: ModernBertConfig(**SIZES, local_attention=2 * WINDOW, layer_types=LAYERS),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("chunks and all", "padding"),
        pytest.param("windows and all", "padding", marks=pytest.mark.full),
        pytest.param("windows and all", "positions", marks=pytest.mark.full),
        pytest.param("two-sided windows and all", "padding", marks=pytest.mark.full),
    ],
)
def test_compiled_models(name: str, given: str) -> None:
    """Masks of both kinds of layers are made in one graph, and the result is that of dense masks."""
    kind: Any = AutoModel if "two-sided" in name else AutoModelForCausalLM
    ours, dense = (
        kind.from_config(MODELS[name](), attn_implementation=x).double().eval() for x in ("flashmask", "sdpa")
    )
    ours.load_state_dict(dense.state_dict())
    graphs = CompileCounter()
    compiled = torch.compile(ours, fullgraph=True, backend=graphs, dynamic=True)
    for length in LENGTHS[:2]:
        inputs: dict[str, Any] = dict(input_ids=torch.randint(1, 48, (2, length)))
        real = torch.ones(2, length, dtype=torch.bool)
        if given == "padding":
            real[1, :3] = False
            inputs["attention_mask"] = real.long()
        else:
            inputs["position_ids"] = tables(length)["positions"]
        if "two-sided" not in name:
            inputs["use_cache"] = False
        got, want = (model(**inputs)[0][real] for model in (compiled, dense))
        assert_exact([got], [want])
    assert graphs.frame_count == 1


def table_of(length: int) -> Tensor:
    return torch.arange(2 * length).view(2, length) // 3


CUSTOM: dict[str, tuple[bool, Callable[..., Any]]] = {
    "the past": (True, lambda b, h, q, k: q > k),
    "the future": (True, lambda b, h, q, k: q < k),
    "some way back": (True, lambda b, h, q, k: k + 2 <= q),
    "a band": (True, lambda b, h, q, k: (q - k >= 1) & (q - k < 4)),
    "a band written backwards": (True, lambda b, h, q, k: (-(q - k) <= -1) & (k - q > -4)),
    "near": (True, lambda b, h, q, k: abs(k - q) < 3),
    "chunks that start late": (True, lambda b, h, q, k: (k + 2) // 4 == (q + 2) // 4),
    "chunks with an origin per batch entry": (True, lambda b, h, q, k: (k - SHIFTS[b]) // 4 == (q - SHIFTS[b]) // 4),
    "causal or near": (True, lambda b, h, q, k: (k <= q) | (abs(q - k) <= 2)),
    "all or causal": (True, lambda b, h, q, k: (q >= 0) | (k <= q)),
    "a union of separate intervals": (False, lambda b, h, q, k: (q < k - 3) | (q >= k)),
    "chunks of two sizes": (False, lambda b, h, q, k: k // 3 == q // 4),
    "chunks that are shifted apart": (False, lambda b, h, q, k: (k - SHIFTS[b]) // 4 == q // 4),
    "a negation": (False, lambda b, h, q, k: ~(k <= q)),
    "unequal positions": (False, lambda b, h, q, k: k != q),
    "equal positions": (False, lambda b, h, q, k: k == q),
    "a prefix of keys": (False, lambda b, h, q, k: (k < 3) | (k <= q)),
    "an index's shape": (False, lambda b, h, q, k: (k <= q) & (q < q.shape[-2])),
    "a table of another batch entry": (False, lambda b, h, q, k: TABLE[0, q] == TABLE[0, k]),
    "a table at the position before": (False, lambda b, h, q, k: TABLE[b, (q - 1).clamp(0)] == TABLE[b, k]),
    "a table at a table's values": (False, lambda b, h, q, k: TABLE[b, TABLE[b, q]] == TABLE[b, TABLE[b, k]]),
    "a table at the positions before": (False, lambda b, h, q, k: TABLE[b, q - 1] == TABLE[b, k - 1]),
    "a table of more batch entries": (False, lambda b, h, q, k: MORE[b, q] == MORE[b, k]),
    "a table with a value that is no number": (False, lambda b, h, q, k: FLOATS[b, q] == FLOATS[b, k]),
    "chunks with origins of more batch entries": (
        False,
        lambda b, h, q, k: (k - MORE_SHIFTS[b]) // 4 == (q - MORE_SHIFTS[b]) // 4,
    ),
    "chunks between positions": (False, lambda b, h, q, k: (k - HALVES[b]) // 4 == (q - HALVES[b]) // 4),
    "two tables": (False, lambda b, h, q, k: TABLE[b, q] == OTHER[b, k]),
    "an order of a table's values": (False, lambda b, h, q, k: TABLE[b, q] >= TABLE[b, k]),
    "a document and the next": (False, lambda b, h, q, k: (k <= q) & (TABLE[b, q] == TABLE[b, k] + 1)),
    "the index of the head": (False, lambda b, h, q, k: (k <= q) | (h == 0)),
    "the index of the batch entry": (False, lambda b, h, q, k: (k <= q) & (b == 0)),
    "a choice by torch.where": (False, lambda b, h, q, k: torch.where(q > 5, k <= q, k >= 0)),
}
"""Whether a function of a caller's own is traced, and not evaluated on every pair; and the function."""
SHIFTS, TABLE, OTHER = torch.tensor([0, 3]), table_of(12), table_of(12) % 5
MORE_SHIFTS, MORE, HALVES = torch.tensor([0, 3, 5]), TABLE[[0, 1, 1]], SHIFTS + 0.5
FLOATS = TABLE.float().index_fill(1, torch.tensor(5), torch.nan)


@pytest.mark.parametrize("how", ["plain", "compiled"])
@pytest.mark.parametrize("name", CUSTOM)
def test_custom_functions(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is right, or refused by the compiler; it is never another one."""
    traced, function = CUSTOM[name]
    evaluated = []
    evaluate = hook_module._evaluate
    monkeypatch.setattr(hook_module, "_evaluate", lambda *args: evaluated.append(1) or evaluate(*args))
    given: dict[str, Any] = dict(batch_size=2, q_length=12, kv_length=12, mask_function=function)
    want = sdpa_mask(**given, allow_is_causal_skip=False)
    if how == "compiled" and not traced:
        with pytest.raises((NotImplementedError, TorchDynamoException)):
            torch.compile(lambda: mask_hook(**given), fullgraph=True, backend="eager")()
        return
    hook = torch.compile(mask_hook, fullgraph=True, backend="eager") if how == "compiled" else mask_hook
    assert torch.equal(dense(hook(**given), 12).expand_as(want), want)
    assert bool(evaluated) == (not traced)


def test_a_function_that_branches_on_an_index_is_evaluated() -> None:
    def branching(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) if (q_idx >= kv_idx) is not None and bool(q_idx.sum() > -1) else kv_idx > q_idx

    given: dict[str, Any] = dict(batch_size=1, q_length=6, kv_length=6, mask_function=branching)
    assert torch.equal(dense(mask_hook(**given), 6), sdpa_mask(**given, allow_is_causal_skip=False))


def test_a_window_whose_size_is_an_input() -> None:
    """Another size is no reason to compile again."""
    graphs = CompileCounter()

    def columns(x: Tensor, window: int) -> Tensor:
        function = hf.sliding_window_causal_mask_function(window)
        return mask_hook(batch_size=1, q_length=len(x), kv_length=len(x), mask_function=function)

    compiled = torch.compile(columns, fullgraph=True, backend=graphs, dynamic=True)
    for window in (3, 5, 40):
        assert torch.equal(compiled(torch.zeros(9), window), columns(torch.zeros(9), window))
    assert graphs.frame_count == 1
