"""Data and model of the demo of `vision_sft.py`: drawn shapes, questions on their colours, and a tiny untrained LLaVA.

Nothing is downloaded, and everything is deterministic.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import data
import torch
from datasets import Dataset, DatasetDict
from PIL import Image, ImageDraw
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

SIDE, PATCH = 32, 8
"""Height and width of a picture and of its patches in pixels; a patch is a token."""

COLOURS = {"red": "#e02020", "green": "#20a020", "blue": "#2040e0", "yellow": "#f0d020", "black": "#000000"}
IMAGE = "<image>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ '{data.ASSISTANT}' if message['role'] == 'assistant' else '{data.USER}' }}}}"
    "{% for part in message['content'] %}"
    f"{{{{ '{IMAGE}' if part['type'] == 'image' else part['text'] }}}}"
    "{% endfor %}"
    f"{{{{ '{data.EOS}' if message['role'] == 'assistant' }}}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{data.ASSISTANT}{{% endif %}}"
)


def draw(colour: str, generator: random.Random) -> Image.Image:
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    size = generator.randint(SIDE // 2, SIDE - 4)
    left, top = (generator.randint(0, SIDE - size) for _ in range(2))
    canvas = ImageDraw.Draw(picture)
    shape = generator.choice([canvas.ellipse, canvas.rectangle])
    shape((left, top, left + size - 1, top + size - 1), fill=COLOURS[colour])
    return picture


def pictures(train: int = 1500, test: int = 60) -> DatasetDict:
    """Build conversations on up to two pictures: columns `prompt`, `completion` and `images`, two splits."""
    generator = random.Random(0)

    def example(count: int) -> dict[str, Any]:
        colours = [generator.choice([*COLOURS]) for _ in range(count)]
        question, answer = "What colour is it?", f"It is {', then '.join(colours)}."
        if not colours:
            question, answer = generator.choice([*data.FACTS.items()])
        return {
            "prompt": [{"role": "user", "content": question}],
            "completion": [{"role": "assistant", "content": answer}],
            "images": [draw(colour, generator) for colour in colours],
        }

    counts = {"train": [1, 1, 1, 2, 0] * (train // 5), "test": [1, 2] * (test // 2)}
    return DatasetDict({name: Dataset.from_list([example(count) for count in own]) for name, own in counts.items()})


def build_model(path: str | Path) -> None:
    tokenizer: Any = data.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [data.USER, data.ASSISTANT, IMAGE]})
    side = {"height": SIDE, "width": SIDE}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=side),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(path)
    width: dict[str, Any] = {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = LlamaConfig(
        **width,
        vocab_size=len(tokenizer),
        max_position_embeddings=1024,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = LlavaConfig(
        text_config=text,
        vision_config=CLIPVisionConfig(**width, image_size=SIDE, patch_size=PATCH, initializer_factor=3.0),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(
            config
        )  # not from_config, which shards under ZeRO-3: one process builds it
    model.save_pretrained(path)
