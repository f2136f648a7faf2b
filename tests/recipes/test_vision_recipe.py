"""The recipe for fine-tuning on images, run as a user runs it."""

import random
import sys

import pytest
from tools.recipes import launch, logged
from tools.tiny import trainer_settings
from transformers import AutoProcessor, LlavaConfig
from trl import SFTConfig

import vision_data  # isort: skip
import vision_sft  # isort: skip


@pytest.mark.full
def test_the_demo_learns_to_name_colours(tmp_path):
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--num_processes", 1, "--cpu"]
    flags = ["--max_steps", 90, "--logging_steps", 10, "--disable_tqdm", True, "--use_cpu", "--save_strategy", "no"]
    flags += ["--show", 60]
    printed = launch(accelerate, tmp_path, *flags, recipe="vision_sft")
    losses = logged(printed, "loss")
    assert losses[-1] < 0.4 * losses[0]
    assert all(0 < value < 1 for value in logged(printed, "mask_sparsity"))
    assert "rows of up to 512 tokens; packing efficiency 9" in printed
    assert f"Loaded {tmp_path} again, attn_implementation='flashmask'" in printed
    right, of, examples, *_ = printed.splitlines()[-1].split()
    assert (of, examples) == ("of", "60")
    # A model that sees no image names at most 9, one that names one colour of each example 30.
    assert int(right) > 20
    shown = [
        line.removeprefix("Expected: ").split("    Answer: ") for line in printed.splitlines() if "Answer: " in line
    ]
    assert int(right) == sum(wanted == answer for wanted, answer in shown)


def test_a_drawn_shape_has_its_colour():
    for seed in range(8):
        picture = vision_data.draw("red", random.Random(seed))
        counts = dict(colour[::-1] for colour in picture.getcolors())
        assert counts.keys() == {(255, 255, 255), (224, 32, 32)}
        assert 0.15 < counts[224, 32, 32] / picture.size[0] ** 2 < 0.85


def test_an_example_without_an_image_is_shown(tmp_path, capsys):
    vision_data.build_model(tmp_path)
    turns = [{"role": "user", "content": "What is the capital?"}, {"role": "assistant", "content": "Paris."}]
    options = {"attn_implementation": "flashmask"}
    args = SFTConfig(**trainer_settings(tmp_path), model_init_kwargs=options)
    vision_sft.show(args, [{"image": None, "messages": turns}])
    assert "Expected: Paris." in capsys.readouterr().out


def test_the_demo_has_a_processor_for_its_model(tmp_path):
    vision_data.build_model(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    example = vision_data.pictures(5, 2)["test"][0]
    turns = [{"role": "user", "content": [{"type": "image", "image": example["images"][0]}]}]
    inputs = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
    config = LlavaConfig.from_pretrained(tmp_path)
    assert (inputs["input_ids"] == config.image_token_index).sum() == (vision_data.SIDE // vision_data.PATCH) ** 2
    assert inputs["pixel_values"].shape == (1, 3, vision_data.SIDE, vision_data.SIDE)
