r"""Supervised fine-tuning of a vision-language model on packed rows with images, by attn_implementation="flashmask".

Every flag of TRL's `SFTConfig`, `ModelConfig`, `ScriptArguments` and `DatasetMixtureConfig` works, also in a YAML file:

    accelerate launch --quiet recipes/vision_sft.py                   # the demo: configs/vision_sft_demo.yaml
    accelerate launch --quiet recipes/vision_sft.py --config recipes/configs/vision_sft.yaml

The dataset has `images` (or `image`) beside `messages`, or beside `prompt` and `completion`. Rows have `max_length`
tokens, of text and images. A longer example raises, since images are never cut. Other differences from `trl sft` are as
in `sft.py`.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import common
import vision_data
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import SFTConfig
from trl.data_utils import prepare_multimodal_messages

from flashmask_hf.collators.images import images_of
from flashmask_hf.trainers import PackedSFTTrainer

DEMO_CONFIG = common.CONFIGS / "vision_sft_demo.yaml"


@dataclass
class RecipeArguments(common.ShowArguments):
    """Flags of this recipe beyond TRL's."""

    max_image_tokens: int | None = common.flag(
        default=None,
        help="Most tokens of images in a row, which bounds the memory of the image tower. Default: max_length.",
    )


def main(argv: Sequence[str]) -> None:
    flags = parse(argv)
    options = common.trainer_options(flags, vision_data.pictures, vision_data.build_model)
    trainer = common.build(PackedSFTTrainer, **options, max_image_tokens=flags.own.max_image_tokens)
    common.train(trainer, flags.script)
    if flags.own.show and trainer.accelerator.is_main_process:
        show(flags.training, list(options["eval_dataset"].take(flags.own.show)))


def parse(argv: Sequence[str]) -> common.Flags:
    return common.parse(argv, DEMO_CONFIG, RecipeArguments, SFTConfig, truncation_mode=None)


def show(args: SFTConfig, examples: Sequence[dict[str, Any]]) -> None:
    processor = AutoProcessor.from_pretrained(args.output_dir, trust_remote_code=args.trust_remote_code)
    model = common.load_for_inference(AutoModelForImageTextToText, str(args.output_dir), args)
    right = 0
    for example in examples:
        turns = example["prompt"] + example["completion"] if "prompt" in example else example["messages"]
        *prompt, expected = prepare_multimodal_messages(turns, images=images_of(example))
        inputs = processor.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        ).to(model.device)
        output = model.generate(**inputs, max_new_tokens=64)
        answer = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
        wanted = expected["content"][0]["text"]
        right += answer == wanted
        print(f"Expected: {wanted}    Answer: {answer}")
    print(f"{right} of {len(examples)} answers are as expected")


if __name__ == "__main__":
    common.run(main)
