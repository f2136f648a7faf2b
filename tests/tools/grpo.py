"""Whole runs of GRPO, RLOO and GMPO on a CPU with the same completions for TRL's trainers and this package's.

`generate` is replaced by a function of the prompt, the row and the call. As a program, started by `accelerate launch`,
it runs both trainers in several processes and writes their logs.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tools.tiny import VOCAB, keep_float64, llama_config, trainer_settings, word_tokenizer
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3Config, Qwen3MoeConfig
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from flashmask_hf.trainers import (
    SharedPromptGRPOConfig,
    SharedPromptGRPOTrainer,
    SharedPromptRLOOConfig,
    SharedPromptRLOOTrainer,
)

STEPS = 10


def gmpo() -> tuple[Any, Any, Any, Any]:
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    from flashmask_hf.trainers.experimental.gmpo import SharedPromptGMPOConfig, SharedPromptGMPOTrainer

    return GMPOConfig, GMPOTrainer, SharedPromptGMPOConfig, SharedPromptGMPOTrainer


CLASSES = {
    "grpo": lambda: (GRPOConfig, GRPOTrainer, SharedPromptGRPOConfig, SharedPromptGRPOTrainer),
    "rloo": lambda: (RLOOConfig, RLOOTrainer, SharedPromptRLOOConfig, SharedPromptRLOOTrainer),
    "gmpo": gmpo,
}


MODELS = {
    "llama": llama_config(),
    "gemma2": Gemma2Config(
        **{k: v for k, v in llama_config().to_dict().items() if k in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings", "eos_token_id", "pad_token_id",
        )},
        head_dim=8, sliding_window=6, attn_logit_softcapping=2.0, final_logit_softcapping=5.0,
    ),
    "gemma3": Gemma3Config(
        text_config=dict(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=6,
            layer_types=["sliding_attention", "full_attention"], eos_token_id=1, pad_token_id=0,
        ),
        vision_config=dict(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8,
            patch_size=4,
        ),
        mm_tokens_per_image=4, image_token_index=5, boi_token_index=6, eoi_token_index=7, eos_token_id=1,
    ),
    "qwen3_moe": Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        eos_token_id=1, pad_token_id=0, router_aux_loss_coef=0.1, output_router_logits=True,
    ),
}  # fmt: skip


def save_models(folder: Any) -> dict[str, str]:
    """Write a checkpoint of each of `MODELS`; return their paths."""
    paths = {name: f"{folder}/{name}" for name in MODELS}
    for name, config in MODELS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(paths[name])
    return paths


def prompts(count=6):
    """Prompts of one to six words, two of which are the same."""
    generator = torch.Generator().manual_seed(0)
    texts = []
    for length in torch.randint(1, 7, (count,), generator=generator).tolist():
        texts.append(" ".join(f"w{i}" for i in torch.randint(8, VOCAB, (length,), generator=generator).tolist()))
    return Dataset.from_dict({"prompt": [*texts[:-1], texts[0]]})


def reward(completion_ids, **_):
    """Depends on all tokens of a completion."""
    return [sum(ids) % 7 / 7 + len(ids) / 10 for ids in completion_ids]


class Completions:
    """Stands for `generate`: completions of one to seven tokens, most of which end, some of them alike."""

    def __init__(self):
        self.calls = 0

    def draw(self, prompt: list[int], row: int) -> list[int]:
        seed = zlib.crc32(repr((prompt, row % 3 if row % 4 == 3 else row, self.calls)).encode())
        generator = torch.Generator().manual_seed(seed)
        length = int(torch.randint(1, 8, (), generator=generator))
        tokens = torch.randint(8, VOCAB, (length,), generator=generator).tolist()
        return tokens if row % 5 == 4 else [*tokens[:-1], 1]  # some are truncated

    def generate(self, input_ids, attention_mask, **_):
        self.calls += 1
        drawn = [
            self.draw(ids[mask.bool()].tolist(), row)
            for row, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True))
        ]
        width = max(map(len, drawn))
        padded = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in drawn])
        return torch.cat([input_ids, padded.to(input_ids.device)], 1)

    def rollout(self, texts, trainer):
        """As `rollout_func`: every second token comes from an environment."""
        self.calls += 1
        ids = [trainer.processing_class(text)["input_ids"] for text in texts]
        drawn = [self.draw(prompt, row) for row, prompt in enumerate(ids)]
        masks = [[place % 2 == 0 for place in range(len(tokens))] for tokens in drawn]
        return {
            "prompt_ids": ids,
            "completion_ids": drawn,
            "logprobs": [[-4.0] * len(tokens) for tokens in drawn],
            "env_mask": [[int(own) for own in mask] for mask in masks],
        }


class VLLM(VLLMGeneration):
    """TRL's generation by vLLM, without vLLM: the server or the engine draws `Completions`.

    Their log-probabilities differ from the model's. In the mode "server", TRL's code asks for each prompt once.
    """

    def _init_vllm(self):
        self.vllm_client = VLLMServer()

    def sync_weights(self):
        assert dict(self._iter_named_params()).keys() >= {"model.norm.weight"}

    def generate(self, prompts, images, num_generations, profiler):
        if self.mode == "server":
            return super().generate(prompts, images, num_generations, profiler)
        output = self.vllm_client.generate(prompts, 1)
        return output["prompt_ids"], output["completion_ids"], output["logprobs"], None


class VLLMServer:
    """Stands for TRL's client of a server of vLLM."""

    def __init__(self):
        self.completions = Completions()

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def generate(self, prompts, n, **_):
        self.completions.calls += 1
        repeated = [prompt for prompt in prompts for _ in range(n)]
        drawn = [self.completions.draw(prompt, row) for row, prompt in enumerate(repeated)]
        logprobs = [[[-4.0 - place / 10] for place in range(len(tokens))] for tokens in drawn]
        return {"prompt_ids": prompts, "completion_ids": drawn, "logprobs": logprobs}


def whole(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the parameters of a model that ZeRO-3 loaded in shards are whole."""
    parameters = list(model.parameters())
    if not hasattr(parameters[0], "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)


def run(
    ours: bool, checkpoints: dict[str, str], tokenizer: Any, out: Any, options: dict[str, Any], evaluate: bool = False
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], Any]:
    """Train `STEPS` steps, or `options["max_steps"]`; return the log of each step, the weights and the trainer.

    Args:
        ours: whether this package's trainer runs, or TRL's.
        checkpoints: of `save_models`.
        tokenizer: of `tiny.word_tokenizer`.
        out: output folder.
        options: of the trainer's configuration; and "algorithm", a key of `CLASSES`, "model", a key of `MODELS`,
            "share" and "exact_ratios", "lora" and "adapter" (a new and a given one), "rollout" (a `rollout_func`), and
            "dtype", of the weights.
        evaluate: whether an evaluation's metrics follow those of the steps.
    """
    options = dict(options)
    stock_config, stock, our_config, shared = CLASSES[options.pop("algorithm", "grpo")]()
    path = checkpoints[options.pop("model", "llama")]
    sharing = {name: options.pop(name) for name in ("share", "exact_ratios") if name in options}
    lora, pretrained = options.pop("lora", False), options.pop("adapter", False)
    dtype = options.pop("dtype", "float64")
    completions = Completions()
    keywords: dict[str, Any] = {"rollout_func": completions.rollout} if options.pop("rollout", False) else {}
    settings = trainer_settings(out) | {
        "num_generations": 4,
        "max_completion_length": 8,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 2,
        "max_steps": STEPS,
        "learning_rate": 0.1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
    }
    settings |= options
    adapter = LoraConfig(r=4, lora_dropout=0.0, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    if lora:
        keywords["peft_config"] = adapter
    args = our_config(**settings, **sharing) if ours else stock_config(**settings)  # before the model, for ZeRO-3
    model = AutoModelForCausalLM.from_pretrained(
        path,
        attn_implementation="flashmask" if ours else "eager",
        dtype=dtype,
        experts_implementation="eager",  # torch's grouped product takes no float64
    )
    torch.manual_seed(3)
    if adapter and pretrained:
        model = get_peft_model(model, adapter)
    trainer = (shared if ours else stock)(
        model,
        reward,
        args=args,
        train_dataset=prompts(),
        eval_dataset=prompts(),
        processing_class=tokenizer,
        **keywords,
    )
    trainer.accelerator.unwrap_model(trainer.model).generate = completions.generate
    if trainer.ref_model is not None:  # else policy and reference are equal in the first step
        torch.manual_seed(4)
        with torch.no_grad(), whole(trainer.model):
            for parameter in trainer.model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape).to(parameter)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    after = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    if trainer.accelerator.num_processes == 1 and settings["learning_rate"]:  # else they may be sharded
        assert max((after[name] - p).abs().max() for name, p in before.items()) > 2e-3
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == settings["max_steps"]
    if evaluate:
        logs.append(trainer.evaluate())
    return logs, after, trainer


def main() -> None:
    """Run TRL's trainer and this package's with the options in argv[1], as JSON; write their logs to argv[2]."""
    tokenizer = word_tokenizer("user", "assistant")
    found, options = {}, json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if "dtype" not in options:
            keep_float64(patch)
        checkpoints = save_models(folder)
        for name, ours in (("ours", True), ("stock", False)):
            logs, _, trainer = run(ours, checkpoints, tokenizer, f"{folder}/{name}", options)
            found[name] = logs
    if trainer.accelerator.is_main_process:
        Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    gc.collect()  # models that are wrapped refer to the group, whose threads must end before the process does
    PartialState().destroy_process_group()
