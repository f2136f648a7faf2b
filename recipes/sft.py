r"""Supervised fine-tuning on packed rows, with attn_implementation="flashmask".

Every flag of TRL's `SFTConfig`, `ModelConfig`, `ScriptArguments` and `DatasetMixtureConfig` works, on the command line
and in a YAML file:

    accelerate launch --quiet recipes/sft.py                                     # the demo: configs/sft_demo.yaml
    accelerate launch --quiet recipes/sft.py --config recipes/configs/sft.yaml
    accelerate launch --quiet recipes/sft.py --model_name_or_path meta-llama/Llama-3.2-1B --use_peft \
        --dataset_name trl-lib/Capybara --chat_template_path meta-llama/Llama-3.2-1B-Instruct --max_length 8192 \
        --truncation_mode keep_start --output_dir Llama-3.2-1B-Capybara

Without a configuration file and a model, the recipe runs the demo; flags override the demo's configuration. TRL
tokenizes the dataset and applies chat templates, then `flashmask_hf.collators.pack_dataset` packs it into rows of
`max_length` tokens. With `--packing` or `--padding_free`, TRL packs and collates the rows instead. Differences from
`trl sft`:

- `attn_implementation` defaults to "flashmask", and bf16 is on if the GPU supports it.
- `--torch_compile` compiles each layer, once for all layers and rows of any length: the fast setting of long runs.
- An example longer than `max_length` raises, unless `--truncation_mode keep_start` or `--split` is given.
- The log adds `tokens_per_second` (of all processes, without padding) and `mask_sparsity`.
- `--keep_attention` keeps attention's results in checkpointed layers, so that attention is computed once.
- `--generate` prints the answers to a prompt before and after training, `--picture` draws the loss and a row's mask.
- The model defaults to a tiny untrained Llama, the dataset to questions and answers about Python.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import data
import picture
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig

import flashmask_hf
from flashmask_hf.trainers import PackedSFTTrainer

DEMO_CONFIG = common.CONFIGS / "sft_demo.yaml"


@dataclass
class RecipeArguments:
    """Flags of this recipe beyond TRL's."""

    split: bool = field(
        default=False,
        metadata={"help": "Cut examples longer than `max_length` into consecutive pieces, each a document of its own."},
    )
    keep_attention: bool = field(
        default=False,
        metadata={
            "help": "With gradient checkpointing, keep attention's results instead of computing attention twice: the "
            "same losses, a shorter step for long rows, and about as much memory again as the checkpoints."
        },
    )
    generate: str | None = field(
        default=None,
        metadata={
            "help": "After training, print two answers to this prompt: that of the model before, and of the saved one."
        },
    )
    picture: bool = field(
        default=False,
        metadata={
            "help": "After training, draw the loss curve and the mask of one row to picture.png in `output_dir`. Needs "
            "matplotlib, and rows that TRL does not pack."
        },
    )


def main(argv: Sequence[str]) -> None:
    recipe_args, script_args, training_args, model_args, mixture_args = parse(argv)
    options = common.trainer_options(script_args, training_args, model_args, mixture_args, data.question_answers)
    trainer = PackedSFTTrainer(**options, split=recipe_args.split)
    common.train(trainer, script_args)
    if not trainer.accelerator.is_main_process:
        return
    if recipe_args.generate is not None:
        untrained, revision = str(options["model"]), model_args.model_revision
        print(f"Prompt: {recipe_args.generate}")
        before = generate(training_args, recipe_args.generate, untrained, revision=revision)
        print(f"Answer before training: {before}")
        print(f"Answer: {generate(training_args, recipe_args.generate, str(training_args.output_dir))}")
    if recipe_args.picture:
        path = Path(str(training_args.output_dir), "picture.png")
        try:
            picture.draw(trainer, path)
            print(f"Picture of the loss and of the mask of one row: {path}")
        except ImportError:
            print("No picture: matplotlib is missing, an optional extra; pip install 'flashmask-hf[plot]'")


def parse(argv: Sequence[str]) -> tuple[RecipeArguments, ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig]:
    parsed = common.parse(
        argv,
        DEMO_CONFIG,
        RecipeArguments,
        SFTConfig,
        truncation_mode=None,  # not TRL's default: long examples raise unless a flag asks to cut them
    )
    training_args: SFTConfig = parsed[2]
    trl_packs = training_args.packing or training_args.padding_free
    if parsed[0].picture and trl_packs:
        raise common.FlagError("picture shows a row that this package packs; leave it out, or packing and padding_free")
    if training_args.max_length is None and not trl_packs:
        raise common.FlagError(
            "max_length is None, but packing needs it: the number of tokens of a row (--max_length 8192)"
        )
    if parsed[0].keep_attention:
        keep_attention(training_args)
    return parsed


def keep_attention(args: SFTConfig) -> None:
    """Make the trainer's checkpointed layers keep attention's results, in place.

    Raises:
        FlagError: the arguments have no checkpointing, or another kind, or TensorBoard, which cannot write a function.
    """
    name = next(name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(args, name))
    options = getattr(args, f"{name}_kwargs") or {}
    if not getattr(args, name) or options.get("use_reentrant"):
        raise common.FlagError(f"keep_attention needs {name} without reentrance; turn that on, or leave it out")
    if "tensorboard" in (args.report_to or []):
        raise common.FlagError("keep_attention is a function, which TensorBoard cannot write; report_to another place")
    setattr(args, f"{name}_kwargs", {**options, "use_reentrant": False, "context_fn": flashmask_hf.keep_attention})


def generate(args: SFTConfig, prompt: str, path: str, *, max_new_tokens: int = 64, **kwargs: Any) -> str:
    """Load a model (or adapter) and generate its answer to a prompt, chat-templated if there is a template.

    Args:
        args: the trainer's arguments.
        prompt: the prompt.
        path: path or name of the model and its tokenizer.
        max_new_tokens: number of tokens at which the answer is cut.
        **kwargs: further arguments of both `from_pretrained`.
    """
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=args.trust_remote_code, **kwargs)
    model = common.load_for_inference(AutoModelForCausalLM, path, args, **kwargs)
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs = inputs.to(model.device)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    common.run(main)
