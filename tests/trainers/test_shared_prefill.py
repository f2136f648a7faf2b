"""TRL's rollouts under `shared_prefill`: a training run has the same completions, and prompts are computed once."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tools.tiny import TRAINER_WARNINGS, llama_config, trainer_settings, word_tokenizer
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from flashmask_hf.hf.packed.shared_prefill import shared_prefill
from flashmask_hf.trainers import SharedPromptGRPOTrainer, SharedPromptRLOOTrainer

pytestmark = TRAINER_WARNINGS

PROMPTS = ["w5 w6 w7 w8 w9", "w9 w8", "w20 w21 w22"]
GENERATIONS = 4
STEPS = 2


def train(
    trainer_class: type, path: Any, shared: str = "nowhere", use_cpu: bool = True, **options: Any
) -> tuple[list[Any], list[int], Any]:
    """Return the completions and the numbers of prefilled tokens of a run, and the trained weights."""
    completions: list[Any] = []
    prefilled: list[int] = []

    class Recorded(trainer_class):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            tokens: list[int] = []
            hook = self.model.get_input_embeddings().register_forward_hook(
                lambda _, inputs, __: tokens.append(inputs[0].numel())
            )
            with shared_prefill(self.model) if shared == "rollout" else contextlib.nullcontext():
                output = super()._generate_single_turn(*args, **kwargs)
            hook.remove()
            completions.extend(output[0] if isinstance(output, tuple) else output)  # RLOO returns completions alone
            prefilled.append(tokens[0])
            return output

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama_config(), attn_implementation="flashmask")
    settings = trainer_settings(path) | {"per_device_train_batch_size": 12, "max_steps": STEPS, "beta": 0.0}
    settings["use_cpu"] = use_cpu
    config = RLOOConfig if issubclass(trainer_class, RLOOTrainer) else GRPOConfig
    trainer = Recorded(
        model=model,
        args=config(**settings, num_generations=GENERATIONS, max_completion_length=6),
        reward_funcs=lambda completions, **_: [float(len(set(c.split()))) for c in completions],
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=word_tokenizer(),
        **options,
    )
    with shared_prefill(trainer.model) if shared == "run" else contextlib.nullcontext():
        trainer.train()
    return completions, prefilled, [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.parametrize(
    ("trainer_class", "adapter"),
    [
        pytest.param(trainer, adapter, marks=[pytest.mark.full] * ((trainer is GRPOTrainer) == adapter))
        for trainer in (GRPOTrainer, RLOOTrainer)
        for adapter in (False, True)
    ],
)
def test_rollouts(trainer_class: type, adapter: bool, tmp_path: Any) -> None:
    options = {"peft_config": LoraConfig(target_modules="all-linear")} if adapter else {}
    want, plain, weights = train(trainer_class, tmp_path, **options)
    for shared in ("rollout", "run"):
        got, prefilled, other = train(trainer_class, tmp_path, shared, **options)
        assert got == want
        assert len(got) == STEPS * len(PROMPTS) * GENERATIONS
        assert all(torch.equal(p, q) for p, q in zip(weights, other, strict=True))
        assert [GENERATIONS * tokens for tokens in prefilled] == plain


@pytest.mark.parametrize(
    ("stock", "ours"), [(GRPOTrainer, SharedPromptGRPOTrainer), (RLOOTrainer, SharedPromptRLOOTrainer)]
)
def test_trainers_of_shared_prompts_prefill_each_prompt_once(stock: type, ours: type, tmp_path: Any) -> None:
    """Their first rollout is that of TRL's trainer; later ones come from weights that are rounded differently."""
    want, plain, _ = train(stock, tmp_path)
    got, prefilled, _ = train(ours, tmp_path)
    first = len(PROMPTS) * GENERATIONS
    assert got[:first] == want[:first]
    assert [GENERATIONS * tokens for tokens in prefilled] == plain


@pytest.mark.gpu
def test_the_first_rollout_on_a_gpu(tmp_path: Any) -> None:
    """In float32. Later rollouts come from weights that are summed in another order in each run."""
    want, plain, _ = train(GRPOTrainer, tmp_path, use_cpu=False)
    got, prefilled, weights = train(GRPOTrainer, tmp_path, "rollout", use_cpu=False)
    assert {weight.device.type for weight in weights} == {"cuda"}
    first = len(PROMPTS) * GENERATIONS
    assert got[:first] == want[:first]
    assert [GENERATIONS * tokens for tokens in prefilled] == plain
