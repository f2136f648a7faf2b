"""Attention dropout of models: a layer's own rate in training, and none in evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tools.model_pairs import attend, model_pair, tokens
from tools.tiny import EXACT, llama_config
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
)
from transformers.masking_utils import eager_mask

from flashmask_hf.dropout import draw_seed, dropout_pattern

ROWS, LENGTH, STEPS = 4, 24, 12


def eager_by_pattern(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_,
) -> tuple[Tensor, None]:
    """Return eager attention that drops the pairs of "flashmask"."""
    scores = query @ key.mT * scaling
    weights = (scores if mask is None else scores + mask).softmax(-1)
    if dropout:
        weights = weights * dropout_pattern(dropout, draw_seed(query), *weights.shape) / (1 - dropout)
    return (weights @ value).transpose(1, 2), None


@pytest.fixture
def by_pattern():
    """Make eager attention with the pattern known to transformers, by its name."""
    name = "eager_by_pattern"
    AttentionInterface.register(name, eager_by_pattern)
    AttentionMaskInterface.register(name, eager_mask)
    yield name
    AttentionInterface._global_mapping.pop(name)
    AttentionMaskInterface._global_mapping.pop(name)


def losses(attention: str, seed: int = 3, steps: int = STEPS) -> list[float]:
    """Fine-tune a tiny BERT with the dropout of its default config, on padded rows."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 64, (steps, ROWS, LENGTH), generator=generator)
    real = torch.arange(LENGTH) < torch.randint(9, LENGTH + 1, (steps, ROWS, 1), generator=generator)
    torch.manual_seed(0)
    sizes = {name: getattr(llama_config(), name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    config = BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3)
    assert config.attention_probs_dropout_prob == 0.1
    config._attn_implementation = attention
    model = BertForSequenceClassification(config).double().train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(seed)
    found = []
    for step in range(steps):
        labels = ids[step, :, 0] % 2
        loss = model(ids[step], attention_mask=real[step].long(), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.usefixtures("float64")
def test_a_fine_tuned_bert_has_the_losses_of_eager_code(by_pattern: str) -> None:
    ours, eager = losses("flashmask"), losses(by_pattern)
    assert ours == pytest.approx(eager, rel=EXACT)
    assert abs(ours[0] - losses("flashmask", seed=4, steps=1)[0]) > 1e-4


@pytest.mark.full
def test_the_mean_over_seeds_is_that_of_eager_dropout() -> None:
    ours, eager = (torch.tensor([losses(name, seed) for seed in range(20)]) for name in ("flashmask", "eager"))
    error = ((ours.var(0) + eager.var(0)) / 20).sqrt()
    assert (((ours.mean(0) - eager.mean(0)) / error).abs() < 4).all()
    torch.testing.assert_close(ours.std(0).mean(), eager.std(0).mean(), rtol=0.5, atol=0)


def test_dropout_is_of_training() -> None:
    model, _ = model_pair("llama", attention_dropout=0.5)
    ids = tokens(1, 5)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)
        assert torch.equal(attend(torch.nn.Module().eval(), dropout=0.5)[0], attend()[0])


@pytest.mark.parametrize("heads", [(2, 4), (4, 3)], ids=["more", "no_divisor"])
def test_layers_with_other_heads_than_the_config_in_a_process_group(heads: tuple[int, int], one_rank: Any) -> None:
    """A config of BART has the heads of the encoder."""
    encoder, decoder = heads
    sizes = dict(vocab_size=64, d_model=24, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8, decoder_ffn_dim=8)
    config = BartConfig(
        **sizes, encoder_attention_heads=encoder, decoder_attention_heads=decoder, attention_dropout=0.1
    )
    model = BartForConditionalGeneration._from_config(config, attn_implementation="flashmask").train()
    ids = tokens(1, 6)
    assert model(ids, labels=ids).loss.isfinite()
