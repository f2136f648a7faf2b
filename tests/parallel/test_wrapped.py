"""Sequence parallelism that wraps the registered attention, as accelerate's pull request 4209 does for `sp_size`.

It is not in a release: a stand-in does what it describes. Each rank's model call has its shard of tokens and positions.
The wrapper exchanges heads for rows, gathers `position_ids`, drops the mask, and keeps the other keywords.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import pytest
import torch
from tools.model_pairs import BOUND, model_pair
from tools.tiny import llama_config
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    CLIPVisionConfig,
    Llama4TextConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PhimoeConfig,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import flashmask_hf
from flashmask_hf import masks
from flashmask_hf.collators import Forest, pack_forests
from flashmask_hf.hf.attention import attention_forward

RANKS = 2

SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
)


class Wrapper:
    """Attention of accelerate's Ulysses; threads are its ranks."""

    def __init__(self) -> None:
        self.barrier, self.rank = threading.Barrier(RANKS, timeout=30), threading.local()
        self.sent: dict[int, Tensor] = {}

    def gather(self, x: Tensor) -> list[Tensor]:
        self.sent[self.rank.number] = x
        self.barrier.wait()
        found = [self.sent[rank] for rank in range(RANKS)]
        self.barrier.wait()
        return found

    def __call__(self, module, query, key, value, attention_mask, **kwargs) -> tuple[Tensor, None]:
        rank = self.rank.number
        query, key, value = (
            torch.cat([shard.chunk(RANKS, 1)[rank] for shard in self.gather(x)], 2) for x in (query, key, value)
        )
        kwargs["position_ids"] = torch.cat(self.gather(kwargs["position_ids"]), 1)
        if kwargs.get("s_aux") is not None:
            kwargs["s_aux"] = kwargs["s_aux"].chunk(RANKS)[rank]
        out, _ = attention_forward(module, query, key, value, None, **kwargs)
        return torch.cat([x.chunk(RANKS, 1)[rank] for x in self.gather(out)], 2), None


@pytest.fixture
def wrapper(monkeypatch):
    made = Wrapper()
    monkeypatch.setitem(AttentionInterface._global_mapping, "flashmask", made)
    return made


def run_ranks(wrapper: Wrapper, model: Any, batch: dict[str, Tensor], whole: tuple[str, ...] = ()) -> Tensor:
    """Return the logits of all ranks, each of which gets its shard of a batch but for the keys `whole`.

    Their gradients are the sums over the ranks.
    """
    results: list[Any] = [None] * RANKS

    def run(rank: int) -> None:
        wrapper.rank.number = rank
        shard = {name: x if name in whole else x.chunk(RANKS, 1)[rank] for name, x in batch.items()}
        try:
            results[rank] = model(**shard, use_cache=False).logits
        except BaseException as error:
            results[rank] = error
            wrapper.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [x for x in results if isinstance(x, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return torch.cat(results, 1)


def assert_equal_results(model: Any, found: Tensor, expected: Tensor) -> None:
    """Assert that logits of a model and the gradients of its weights, under the same of the logits, are equal."""
    torch.testing.assert_close(found, expected, rtol=0, atol=BOUND)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    gradients = [torch.autograd.grad(x, list(model.parameters()), upstream) for x in (found, expected)]
    largest = max(x.abs().max().item() for x in gradients[1])
    assert largest > 1
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=BOUND * largest)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_documents_windows_and_sinks_equal_the_whole_row(name, monkeypatch):
    """By positions alone, and with the mask indices of the whole row; documents end in a shard and between two."""
    model, _ = model_pair(name)
    for lengths in ([16], [10, 6], [5, 3, 8]):
        batch = {"input_ids": torch.arange(2, 18)[None]}
        batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
        indices = {"startend_row_indices": masks.causal_document(lengths).indices}
        for given in ({}, indices):
            with monkeypatch.context() as patch:
                patch.setitem(AttentionInterface._global_mapping, "flashmask", wrapper := Wrapper())
                found = run_ranks(wrapper, model, batch | given, whole=("startend_row_indices",))
            expected = model(**batch, use_cache=False).logits
            assert_equal_results(model, found, expected)


def test_trees_and_padding_equal_the_whole_row(wrapper, monkeypatch):
    model, _ = model_pair("llama")
    question = Forest.from_trees(([5, 6, 7, 8, 9, 10], [[11, 12, 13, 14, 15], [16, 17, 18, 19, 20]]))
    real = torch.ones(1, 16, dtype=torch.int64)
    real[:, :3] = 0
    padded = dict(input_ids=torch.arange(2, 18)[None], attention_mask=real, position_ids=(real.cumsum(1) - 1).clamp(0))
    for batch, shown in ((pack_forests([question]).batch(), slice(None)), (padded, slice(3, None))):
        found = run_ranks(wrapper, model, batch, whole=("startend_row_indices",))
        with monkeypatch.context() as patch:
            patch.setitem(AttentionInterface._global_mapping, "flashmask", attention_forward)
            expected = model(**batch, use_cache=False).logits
        assert_equal_results(model, found[:, shown], expected[:, shown])


def test_mask_indices_of_a_shard_are_refused(wrapper):
    batch = {"input_ids": torch.arange(2, 18)[None], "position_ids": torch.arange(16)[None]}
    batch["startend_row_indices"] = masks.causal_document([10, 6]).indices.movedim(2, 1)
    shards = [x.movedim(1, 2).contiguous() for x in batch["startend_row_indices"].chunk(RANKS, 1)]
    batch["startend_row_indices"] = torch.cat([x.clamp(max=8) for x in shards], 1)  # one head per rank
    with pytest.raises(ValueError, match="describe a whole row of 8 tokens, but this layer has 16 queries"):
        run_ranks(wrapper, model_pair("llama")[0], batch)


def test_masks_that_the_wrapper_drops_are_refused(wrapper):
    chunked = Llama4TextConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size_mlp=64,
        num_local_experts=2,
        attention_chunk_size=4,
    )
    experts: dict[str, Any] = dict(num_key_value_heads=2, num_local_experts=2, max_position_embeddings=64)
    llava = LlavaConfig(text_config=llama_config(), vision_config=CLIPVisionConfig(**SIZES | {"vocab_size": 2}))
    models = [
        AutoModelForCausalLM.from_config(chunked, attn_implementation="flashmask"),
        BertModel._from_config(BertConfig(**SIZES), attn_implementation="flashmask"),
        AutoModelForCausalLM.from_config(
            PhimoeConfig(**SIZES, **experts, sliding_window=4), attn_implementation="flashmask"
        ),
        LlavaForConditionalGeneration._from_config(llava, attn_implementation="flashmask"),
    ]
    for model in models:
        with pytest.raises(
            NotImplementedError, match=r"needs masks of images, chunks.*Wrapper may drop them: set sp_size=1"
        ):
            model(torch.arange(2, 10)[None])


def test_registering_again_would_undo_the_wrapper(wrapper):
    with pytest.raises(
        RuntimeError, match=r"'flashmask' is registered in the wrapper .*Wrapper, as with sp_size of accelerate"
    ):
        flashmask_hf.register()
    assert AttentionInterface._global_mapping["flashmask"] is wrapper


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "deepspeed"])
def test_a_function_around_ours_is_a_wrapper_too(registered, monkeypatch):
    """DeepSpeed sets its function in the interface of the models, where registering again does not undo it."""

    def drops_masks(module, query, key, value, attention_mask, **kwargs):
        return attention_forward(module, query, key, value, None, **kwargs)

    mapping = AttentionInterface._global_mapping if registered else ALL_ATTENTION_FUNCTIONS._local_mapping
    around = functools.wraps(attention_forward)(drops_masks) if registered else drops_masks
    monkeypatch.setitem(mapping, "flashmask", around)
    with (
        pytest.raises(RuntimeError, match=r"registered in the wrapper .*\bdrops_masks, as")
        if registered
        else contextlib.nullcontext()
    ):
        flashmask_hf.register()
    bert = BertModel._from_config(BertConfig(**SIZES), attn_implementation="flashmask")
    with pytest.raises(NotImplementedError, match=r"the wrapper .*\bdrops_masks may drop them: set sp_size=1"):
        bert(torch.arange(2, 10)[None])
    model_pair("llama")[0](torch.arange(2, 10)[None])
