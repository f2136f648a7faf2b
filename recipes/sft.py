r"""Supervised fine-tuning on packed rows, with attn_implementation="flashmask".

Every flag of TRL's `SFTConfig`, `ModelConfig`, `ScriptArguments` and `DatasetMixtureConfig` works, also in a YAML file:

    accelerate launch --quiet recipes/sft.py                                     # the demo: configs/sft_demo.yaml
    accelerate launch --quiet recipes/sft.py --config recipes/configs/sft.yaml
    accelerate launch --quiet recipes/sft.py --config recipes/configs/sft_lora.yaml --max_length 4096

`pack_dataset` packs the tokenized dataset into rows of `max_length` tokens, or TRL does with `--packing` or
`--padding_free`. Differences from `trl sft`:

- `attn_implementation` defaults to "flashmask", bf16 is on if the GPU has it, and `--torch_compile` compiles layers.
- An example longer than `max_length` raises, unless `--truncation_mode keep_start` or `--split` is given.
- The log adds `tokens_per_second`, `keys_per_token` and `mask_sparsity`.
- Batches of 32,768 tokens or more on a GPU are made to fit (`--long_context`).
- `--generate` prints answers before and after training, `--picture` draws the loss and a row's mask.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import common
import data
import picture
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from flashmask_hf.long_rows.checkpointing import checkpointing_of
from flashmask_hf.trainers import LongRows, PackedSFTTrainer
from flashmask_hf.trainers.long_rows_callback import obstacle_to_measuring

DEMO_CONFIG = common.CONFIGS / "sft_demo.yaml"
LONG_BATCH = 32_768  # tokens of a batch from which steps are measured before the first one


@dataclass
class RecipeArguments:
    """Flags of this recipe beyond TRL's."""

    split: bool = common.flag(
        default=False, help="Cut examples longer than `max_length` into consecutive pieces, each a document of its own."
    )
    share_prefixes: bool = common.flag(
        default=False, help="Compute tokens that several examples of a row begin with once, with the same losses."
    )
    row_length: int | None = common.flag(
        default=None, help="Tokens of a row, at least `max_length`, which then limits examples alone."
    )
    long_context: bool | None = common.flag(
        default=None,
        help="Measure two short rows before the first step, and choose from them what the flags below leave "
        "open, so that batches fit. Default: where max_length times the batch size is at least 32,768, on a GPU, "
        "with checkpointing.",
    )
    tile_tokens: int | None = common.flag(
        default=None, help="Tokens of the tiles in which MLPs and norms run, 0 for none. `long_context` takes 8192."
    )
    keep_attention: bool | None = common.flag(
        default=None,
        help="With checkpointing, keep attention's results instead of computing attention twice: the same "
        "losses, a shorter step, and about as much memory again as the checkpoints. Default: where memory allows, "
        "but for compiled layers, which need the flag.",
    )
    host_gib: float | None = common.flag(
        default=None,
        help="GiB of pinned host memory, in each process, for checkpoints; the rest stays on the GPU. "
        "`long_context` takes what does not fit on the GPU.",
    )
    generate: str | None = common.flag(
        default=None,
        help="After training, print two answers to this prompt: that of the model before, and of the saved one.",
    )
    picture: bool = common.flag(
        default=False,
        help="After training, draw the loss curve and the mask of one row to picture.png in `output_dir`. Needs "
        "matplotlib, and rows that TRL does not pack.",
    )


def main(argv: Sequence[str]) -> None:
    flags = parse(argv)
    options = common.trainer_options(flags, data.question_answers)
    own = {name: getattr(flags.own, name) for name in ("split", "share_prefixes", "row_length")}
    trainer: PackedSFTTrainer = common.build(PackedSFTTrainer, **options, **own)
    add_long_rows(trainer, flags.own)
    common.train(trainer, flags.script)
    if not trainer.accelerator.is_main_process:
        return
    prompt, args = flags.own.generate, flags.training
    if prompt is not None:
        print(f"Prompt: {prompt}")
        before = generate(args, prompt, options["model"], revision=flags.model.model_revision)
        print(f"Answer before training: {before}")
        print(f"Answer: {generate(args, prompt, args.output_dir)}")
    if flags.own.picture:
        what = "the loss and of the mask of one row"
        picture.write(args.output_dir, what, lambda path: picture.draw(trainer, path))


def parse(argv: Sequence[str]) -> common.Flags:
    # Not TRL's default of truncation_mode: long examples raise unless a flag asks to cut them.
    flags = common.parse(argv, DEMO_CONFIG, RecipeArguments, SFTConfig, truncation_mode=None)
    trl_packs = flags.training.packing or flags.training.padding_free
    if flags.own.picture and trl_packs:
        raise common.FlagError(
            "picture shows a row that this package packs; add --picture false, or leave packing and padding_free out"
        )
    if flags.training.max_length is None and not trl_packs:
        raise common.FlagError(
            "max_length is None, but packing needs it: the number of tokens of a row (--max_length 8192)"
        )
    return flags


def add_long_rows(trainer: PackedSFTTrainer, flags: RecipeArguments) -> None:
    """Make the rows fit into memory as the flags say; raise a FlagError if they cannot be followed."""
    args: Any = trainer.args
    measured = flags.long_context
    if measured is None:
        length = flags.row_length or args.max_length
        long = length is not None and length * args.per_device_train_batch_size >= LONG_BATCH
        checkpointed = checkpointing_of(args)[1] is not None and args.layer_compiler is None
        measured = long and checkpointed and obstacle_to_measuring(trainer) is None
    by_hand = {"tile_tokens": flags.tile_tokens, "keep_attention": flags.keep_attention, "host_gib": flags.host_gib}
    if measured:
        options: dict[str, Any] = {name: value for name, value in by_hand.items() if value is not None}
    elif any(by_hand.values()) or (flags.keep_attention is False and checkpointing_of(args)[1] is not None):
        options = {name: value or 0 for name, value in by_hand.items()} | {"keep_attention": bool(flags.keep_attention)}
    else:
        return
    if args.layer_compiler is not None and (measured or flags.tile_tokens or flags.host_gib):
        raise common.FlagError(
            "torch_compile compiles whole layers, which long_context, tile_tokens and host_gib would cut; leave one out"
        )
    try:
        trainer.add_callback(LongRows(trainer, **options))
    except ValueError as error:
        raise common.FlagError(str(error)) from None


def generate(args: SFTConfig, prompt: str, path: str, *, max_new_tokens: int = 64, **kwargs: Any) -> str:
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
