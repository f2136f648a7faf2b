"""Loss curves of a tiny Llama on packed rows equal eager attention's, full and LoRA, with any checkpointing."""

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tools.tiny import TRAINER_WARNINGS
from transformers import AutoModelForCausalLM, LlamaConfig

from flashmask_hf import masks
from flashmask_hf.long_rows.checkpointing import enable_checkpointing

STEPS = 50
LENGTHS = [[70, 33, 25], [9, 119], [40, 40, 40, 8], [128]]
VOCABULARY = 40

LOSS_BOUND = 1e-9
"""Largest relative difference to the loss of eager attention in any step of AdamW, which enlarges float64's."""

pytestmark = [*TRAINER_WARNINGS, pytest.mark.usefixtures("float64")]


def batches():
    """Yield packed rows [1, 128] of learnable documents, whose token ids grow by a stride of their own."""
    generator = torch.Generator().manual_seed(0)
    while True:
        for lengths in LENGTHS:
            ids, labels = [], []
            for length in lengths:
                first, stride = torch.randint(1, 8, (2,), generator=generator).tolist()
                ids.append((first + stride * torch.arange(length)) % VOCABULARY)
                labels.append(ids[-1].clone())
                labels[-1][0] = -100  # the previous document must not predict it
            yield (
                masks.causal_document(lengths),
                dict(
                    input_ids=torch.cat(ids)[None],
                    labels=torch.cat(labels)[None],
                    position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
                    use_cache=False,
                ),
            )


@functools.cache
def train(attention, method, checkpointing):
    """Train for `STEPS` steps from a fixed seed; return the losses and the trained parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        dtype=torch.float64,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    assert model.config._attn_implementation == attention
    if checkpointing != "none":
        enable_checkpointing(model, {"use_reentrant": checkpointing == "reentrant"})
    if method == "lora":
        if checkpointing == "reentrant":
            model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    losses = []
    model.train()
    for (mask, inputs), _ in zip(batches(), range(STEPS), strict=False):
        if attention == "flashmask":
            inputs["startend_row_indices"] = mask.indices
        else:
            inputs["attention_mask"] = torch.where(mask.to_dense(), 0.0, torch.finfo(torch.float32).min)
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64), [p.detach() for p in trained]


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_loss_curve_equals_eager(method, checkpointing):
    losses, parameters = train("flashmask", method, checkpointing)
    expected, _ = train("eager", method, "none")
    assert expected[-4:].mean() < 0.8 * expected[:4].mean()  # it learns
    assert ((losses - expected).abs() / expected).max() < LOSS_BOUND
    # Recomputation in the backward is bit-identical.
    plain_losses, plain_parameters = train("flashmask", method, "none")
    assert torch.equal(losses, plain_losses)
    for got, want in zip(parameters, plain_parameters, strict=True):
        assert torch.equal(got, want)
