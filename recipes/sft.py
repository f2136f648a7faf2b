r"""Supervised fine-tuning on packed rows, with attn_implementation="flashmask".

Every flag of TRL's `SFTConfig`, `ModelConfig`, `ScriptArguments` and `DatasetMixtureConfig` works, on the command line
and in a YAML file:

    accelerate launch recipes/sft.py                                     # the demo: configs/sft_demo.yaml
    accelerate launch recipes/sft.py --config recipes/configs/sft.yaml
    accelerate launch recipes/sft.py --model_name_or_path meta-llama/Llama-3.2-1B --dataset_name trl-lib/Capybara \
        --chat_template_path meta-llama/Llama-3.2-1B-Instruct --max_length 8192 --truncation_mode keep_start \
        --use_peft --output_dir Llama-3.2-1B-Capybara

Without a configuration file and a model, the demo's defaults apply, and every flag still overrides them. TRL tokenizes
the dataset and applies chat templates; then `flashmask_hf.collators.pack_dataset` packs it into rows of `max_length`
tokens. `--packing` and `--padding_free` leave both to TRL. What differs from `trl sft`:

- `attn_implementation` is "flashmask" unless given, and bf16 is on where the GPU has it.
- An example longer than `max_length` raises; `--truncation_mode keep_start` or `--split` says what else to do.
- The log adds `tokens_per_second` (padding not counted, all processes together) and `mask_sparsity`.
- Without `--model_name_or_path` a tiny Llama is made on the spot, without `--dataset_name` Python's own documentation.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import common
import data
import torch
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, SFTTrainer

from flashmask_hf.collators import DataCollatorForPackedLanguageModeling, pack_dataset, packing_efficiency
from flashmask_hf.packed_backbone import check_compiled, check_layers
from flashmask_hf.trainers.sharing import log_sparsity

DEMO_CONFIG = common.CONFIGS / "sft_demo.yaml"


@dataclass
class RecipeArguments:
    """What this recipe adds to TRL's flags."""

    split: bool = field(
        default=False,
        metadata={"help": "Cut examples longer than `max_length` into consecutive pieces, each a document of its own."},
    )
    generate: str | None = field(
        default=None,
        metadata={"help": "After training, load the saved model again and print its answer to this prompt."},
    )


class PackedSFTTrainer(SFTTrainer):
    """TRL's SFTTrainer on rows packed by `pack_dataset`; also logs tokens per second and mask sparsity.

    Rows with `seq_lengths` are packed already: they get labels, and keep their lengths.

    Args:
        max_position_embeddings: the model's number of positions, which no document may exceed; None does not check.
        split: cut examples longer than `args.max_length` into pieces.
        **kwargs: `SFTTrainer`'s. With `args.packing` or `args.padding_free`, TRL packs the rows and collates them.

    Raises:
        ValueError: in the first step, with attention "flashmask": layers that are not attention would mix documents.
    """

    def __init__(self, *, max_position_embeddings: int | None = None, split: bool = False, **kwargs: Any):
        self._packing_options: dict[str, Any] = {
            "max_position_embeddings": max_position_embeddings,
            "split": split,
        }
        self._tokens_since_log: Any = 0
        self._last_log = time.perf_counter()
        args: SFTConfig = kwargs["args"]
        if not _trl_packs(args):
            multiple = args.pad_to_multiple_of
            kwargs["data_collator"] = DataCollatorForPackedLanguageModeling(
                pad_to_multiple_of=multiple if isinstance(multiple, int) else None,
                max_position_embeddings=max_position_embeddings,
            )
        super().__init__(**kwargs)
        model = self.accelerator.unwrap_model(self.model)
        if not _trl_packs(args) and model.config.get_text_config()._attn_implementation == "flashmask":
            check_layers(model)

    def _prepare_dataset(
        self,
        dataset: Dataset | IterableDataset,
        processing_class: Any,
        args: Any,
        packing: bool,
        formatting_func: Any,
        dataset_name: str,
    ) -> Dataset | IterableDataset:
        if _trl_packs(args):
            return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        whole = copy.copy(args)
        whole.max_length = None  # TRL tokenizes and builds labels; what to do with long examples is decided below
        tokenized = super()._prepare_dataset(dataset, processing_class, whole, False, formatting_func, dataset_name)
        if "seq_lengths" in next(iter(tokenized), {}):
            return tokenized  # packed already, as trainer.eval_dataset is
        with PartialState().main_process_first():  # the others find the result in the cache
            packed = pack_dataset(
                tokenized,
                args.max_length,
                truncation_mode=args.truncation_mode or "error",
                num_proc=args.dataset_num_proc,
                **self._packing_options,
            )
        if isinstance(tokenized, Dataset) and isinstance(packed, Dataset):
            PartialState().print(
                f"Packed {len(tokenized)} {dataset_name} examples into {len(packed)} rows of up to {args.max_length} "
                f"tokens; packing efficiency {packing_efficiency(packed, args.max_length):.1%}"
            )
        return packed

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's loss; counts tokens and hidden tiles on the way."""
        tokens, mode = inputs["input_ids"].numel(), "train" if model.training else "eval"
        if "startend_row_indices" in inputs:
            indices = inputs["startend_row_indices"]
            check_compiled(model, indices.device)
            tokens = (indices > 0).sum()  # padding has 0; left on the device, as the loss is
            log_sparsity(self, mode, indices)
        if mode == "train":
            self._tokens_since_log += tokens
        return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's log, with tokens per second since the last one."""
        if "loss" in logs:
            tokens: Any = torch.as_tensor(self._tokens_since_log, device=self.accelerator.device)
            tokens = self.accelerator.reduce(tokens)
            seconds = time.perf_counter() - self._last_log
            logs["tokens_per_second"] = round(tokens.item() / seconds, 1)
            self._tokens_since_log, self._last_log = 0, time.perf_counter()
        super().log(logs, start_time)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see `Trainer.train`."""
        self._tokens_since_log, self._last_log = 0, time.perf_counter()
        return super().train(*args, **kwargs)


def main(argv: Sequence[str]) -> None:
    recipe_args, script_args, training_args, model_args, mixture_args = parse(argv)
    options = common.trainer_options(script_args, training_args, model_args, mixture_args, data.question_answers)
    config = AutoConfig.from_pretrained(
        options["model"], revision=model_args.model_revision, trust_remote_code=training_args.trust_remote_code
    )
    trainer = PackedSFTTrainer(
        **options,
        max_position_embeddings=getattr(config.get_text_config(), "max_position_embeddings", None),
        split=recipe_args.split,
    )
    common.train(trainer, script_args)
    if recipe_args.generate is not None and trainer.accelerator.is_main_process:
        answer = generate(training_args, recipe_args.generate)
        print(f"Prompt: {recipe_args.generate}\nAnswer: {answer}")


def parse(argv: Sequence[str]) -> tuple[RecipeArguments, ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig]:
    parsed = common.parse(
        argv,
        DEMO_CONFIG,
        RecipeArguments,
        SFTConfig,
        truncation_mode=None,  # so that a choice can be told from TRL's default
    )
    training_args: SFTConfig = parsed[2]
    if training_args.max_length is None and not _trl_packs(training_args):
        raise ValueError("max_length is None, but packing needs it: the number of tokens of a row (--max_length 8192)")
    return parsed


def generate(args: SFTConfig, prompt: str, max_new_tokens: int = 64) -> str:
    """Load the saved model (or adapter) and let it answer a prompt, as a user message if it has a chat template."""
    path = str(args.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = common.load_again(AutoModelForCausalLM, path, args)
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


def _trl_packs(args: SFTConfig) -> bool:
    return args.packing or args.padding_free


if __name__ == "__main__":
    main(sys.argv[1:])
    PartialState().destroy_process_group()  # after main has let go of the model, which still refers to the group
