"""Tiny vision-language models of the families that pack, their processors made on the spot, and documents."""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from tools.model_pairs import SIZES
from torch import Tensor
from transformers import PreTrainedTokenizerFast, video_processing_utils
from transformers.models.gemma4 import image_processing_pil_gemma4
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.smolvlm import processing_smolvlm

import flashmask_hf  # noqa: F401  registers "flashmask"

VOCAB = 96
SPECIAL = {
    "<pad>": 0,
    "<bos>": 1,
    "<eos>": 2,
    "<unk>": 3,
    "<end_of_utterance>": 84,
    "<fake_token_around_image>": 85,
    "<global-img>": 86,
    "<break>": 87,
    "<|video|>": 89,  # Gemma 4 adds it
    "<image>": 90,
    "<start>": 91,
    "<video>": 92,
    "<end>": 93,
}
IMAGE, START, VIDEO, END = (SPECIAL[name] for name in ("<image>", "<start>", "<video>", "<end>"))

KINDS = (
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "gemma3",
    "gemma4",
    "smolvlm",
    "idefics3",
    "llava",
    "llava_next",
    "internvl",
    "paligemma",
    "mistral3",
    "pixtral",
)

_TEXT: dict[str, Any] = SIZES | dict(vocab_size=VOCAB, max_position_embeddings=512, bos_token_id=1, eos_token_id=2)
_TOWER: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, patch_size=4
)
_QWEN_TOWER: dict[str, Any] = dict(
    depth=2, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4, out_hidden_size=32
)
_AXES: dict[str, Any] = dict(_TEXT, rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]))
_QWEN_IDS: dict[str, Any] = dict(
    image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END
)
_SLIDING: dict[str, Any] = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
_LINEAR: dict[str, Any] = dict(
    num_hidden_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    rope_parameters=_AXES["rope_parameters"] | dict(partial_rotary_factor=1.0),
)

_PREFIXES = {
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_5": "Qwen3_5",
    "smolvlm": "SmolVLM",
    "internvl": "InternVL",
    "paligemma": "PaliGemma",
    "llava_next": "LlavaNext",
    "llava_onevision": "LlavaOnevision",
    "pixtral": "Llava",
}
"""Prefixes of class names that are not the capitalized kind."""


def _text(model_type: str, **changes: Any) -> dict[str, Any]:
    return dict(_TEXT, model_type=model_type, **changes)


_PIXTRAL = dict(_TOWER, model_type="pixtral", image_size=32, head_dim=8)

_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": dict(
        text_config=_AXES, vision_config=dict(_QWEN_TOWER, window_size=16, fullatt_block_indexes=[1]), **_QWEN_IDS
    ),
    "qwen3_vl": dict(
        text_config=_AXES,
        vision_config=dict(_QWEN_TOWER, num_position_embeddings=64, deepstack_visual_indexes=[0, 1]),
        **_QWEN_IDS,
    ),
    "qwen3_5": dict(
        text_config=_AXES | _LINEAR, vision_config=dict(_QWEN_TOWER, num_position_embeddings=64), **_QWEN_IDS
    ),
    "gemma3": dict(
        text_config=_TEXT | _SLIDING,
        vision_config=dict(_TOWER, image_size=8),
        image_token_index=IMAGE,
        image_token_id=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
        mm_tokens_per_image=4,
    ),
    "gemma4": dict(
        text_config=_TEXT
        | _SLIDING
        | dict(
            use_bidirectional_attention="vision",
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=VOCAB,
            global_head_dim=8,
        ),
        vision_config=dict(
            _TOWER, num_key_value_heads=2, head_dim=8, pooling_kernel_size=2, position_embedding_size=64
        ),
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=SPECIAL["<|video|>"],
        boi_token_id=START,
        eoi_token_id=END,
        audio_token_id=94,
        boa_token_id=95,
    ),
    "smolvlm": dict(
        text_config=_text("llama"), vision_config=dict(_TOWER, image_size=16), image_token_id=IMAGE, scale_factor=2
    ),
    "idefics3": dict(
        text_config=_text("llama"), vision_config=dict(_TOWER, image_size=16), image_token_id=IMAGE, scale_factor=2
    ),
    "llava": dict(
        text_config=_text("llama"),
        vision_config=dict(_TOWER, model_type="clip_vision_model", image_size=8),
        image_token_index=IMAGE,
        image_seq_length=4,
        vision_feature_layer=-1,
    ),
    "llava_next": dict(
        text_config=_text("llama"),
        vision_config=dict(_TOWER, model_type="clip_vision_model", image_size=8),
        image_token_index=IMAGE,
        image_seq_length=4,
        vision_feature_layer=-1,
        image_grid_pinpoints=[[8, 16], [16, 8], [16, 16]],
    ),
    "internvl": dict(
        text_config=_text("qwen2"),
        vision_config=dict(_TOWER, image_size=[16, 16], patch_size=[4, 4]),
        image_token_id=IMAGE,
        image_seq_length=4,
        downsample_ratio=0.5,
    ),
    "paligemma": dict(
        text_config=_text("gemma"),
        vision_config=dict(_TOWER, model_type="siglip_vision_model", image_size=8, projection_dim=32),
        image_token_index=IMAGE,
        projection_dim=32,
        hidden_size=32,
    ),
    "mistral3": dict(
        text_config=_text("mistral"),
        vision_config=_PIXTRAL,
        image_token_index=IMAGE,
        spatial_merge_size=2,
        vision_feature_layer=-1,
    ),
    "pixtral": dict(
        text_config=_text("mistral"),
        vision_config=_PIXTRAL,
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
}

_SIDE = dict(height=8, width=8)
_PROCESSORS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2VL", dict(patch_size=4, size=dict(shortest_edge=64, longest_edge=4096)), {}),
    "gemma3": ("Gemma3", dict(size=_SIDE), dict(image_seq_length=4)),
    "gemma4": ("Gemma4", dict(patch_size=4, pooling_kernel_size=2, max_soft_tokens=4), {}),
    "idefics3": (
        "Idefics3",
        dict(size=dict(longest_edge=32), max_image_size=dict(longest_edge=16)),
        dict(image_seq_len=4),
    ),
    "smolvlm": (
        "SmolVLM",
        dict(size=dict(longest_edge=32), max_image_size=dict(longest_edge=16)),
        dict(image_seq_len=4),
    ),
    "llava": (
        "CLIP",
        dict(size=dict(shortest_edge=8), crop_size=_SIDE),
        dict(patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1),
    ),
    "llava_next": (
        "LlavaNext",
        dict(
            size=dict(shortest_edge=8),
            crop_size=_SIDE,
            image_grid_pinpoints=_CONFIGS["llava_next"]["image_grid_pinpoints"],
        ),
        dict(patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1),
    ),
    "llava_onevision": (
        "LlavaOnevision",
        dict(size=_SIDE, image_grid_pinpoints=_CONFIGS["llava_next"]["image_grid_pinpoints"]),
        dict(num_image_tokens=4, vision_feature_select_strategy="full"),
    ),
    "internvl": (
        "GotOcr2",
        dict(size=dict(height=16, width=16), crop_to_patches=True, max_patches=2),
        dict(image_seq_length=4),
    ),
    "paligemma": ("Siglip", dict(size=_SIDE), {}),
    "mistral3": (
        "Pixtral",
        dict(patch_size=4, size=dict(longest_edge=32)),
        dict(
            patch_size=4,
            spatial_merge_size=2,
            image_token="<image>",
            image_break_token="<break>",
            image_end_token="<end>",
        ),
    ),
}
_PROCESSORS["qwen3_vl"] = _PROCESSORS["qwen3_5"] = _PROCESSORS["qwen2_5_vl"]
_PROCESSORS["pixtral"] = (*_PROCESSORS["mistral3"][:2], _PROCESSORS["mistral3"][2] | dict(spatial_merge_size=1))
"""For each kind: its image processor's prefix and options, and its processor's options."""

_PLACEHOLDERS = {"gemma3": "<start>"} | dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_5"), "<start><image><end>")
"""Text that stands for an image before the processor replaces it; "<image>" for other kinds."""

_FRAMES = {
    "gemma4": "<|video|>" * 4,
    "internvl": "<start>" + "<image>" * 4 + "<end>",
    "smolvlm": "<fake_token_around_image><global-img>" + "<image>" * 4 + "<fake_token_around_image>",
}
"""Text of a frame of a video after the processor has replaced it; "<video>" per cell for other kinds."""

_TEMPLATE = """{% for message in messages %}{{ message['role'] + ' ' }}\
{% if message['role'] == 'assistant' %}{% generation %}\
{% for part in message['content'] %}{{ part['text'] + ' ' }}{% endfor %}{{ '<eos>' }}{% endgeneration %}\
{% else %}{% for part in message['content'] %}\
{{ 'PLACEHOLDER' if part['type'] == 'image' else '<video>' if part['type'] == 'video' else part['text'] + ' ' }}\
{% endfor %}{{ '<end_of_utterance>' }}\
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"""

_rng = np.random.default_rng(0)


def seed(number: int) -> None:
    """Seed the generator of pictures and words."""
    _rng.bit_generator.state = np.random.default_rng(number).bit_generator.state


def _prefix(kind: str) -> str:
    return _PREFIXES.get(kind, kind.capitalize())


def tower_of(kind: str) -> dict[str, Any]:
    """Return the config of a kind's image tower."""
    return _CONFIGS[kind]["vision_config"]


def tiny_model(
    kind: str, attention: str | dict[str, str] = "flashmask", dtype: torch.dtype = torch.float64, **text: Any
) -> Any:
    """Return a random model of a kind, the same at every call, in training mode and without dropout.

    Args:
        kind: one of `KINDS`.
        attention: its `attn_implementation`.
        dtype: of its parameters.
        text: changes of its text config.
    """
    settings = dict(_CONFIGS[kind], text_config=_CONFIGS[kind]["text_config"] | text)
    config = getattr(transformers, f"{_prefix(kind)}Config")(**settings)
    torch.manual_seed(0)
    made = getattr(transformers, f"{_prefix(kind)}ForConditionalGeneration")
    model = made._from_config(config, attn_implementation=attention).to(dtype).train()
    for parameter in model.parameters():  # large enough that attention is far from uniform
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that splits at spaces, and knows `SPECIAL`, "user", "assistant", and w6 to w83 by number."""
    vocab = SPECIAL | {"user": 4, "assistant": 5} | {f"w{i}": i for i in range(6, 84)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(list(SPECIAL))
    names = dict(image="<image>", video="<video>", vision_start="<start>", vision_end="<end>", boi="<start>")
    names |= dict(eoi="<end>", start_image="<start>", end_image="<end>", context_image="<image>", boa="<start>")
    names |= dict(eoa="<end>")
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens={f"{name}_token": token for name, token in names.items()},
    )


_VideoProcessor: Any = getattr(video_processing_utils, "VideoProcessorMixin", video_processing_utils.BaseVideoProcessor)
"""The base of video processors. Until transformers 5.17 it needs torchvision."""


class NoVideos(_VideoProcessor):
    """Video processor that takes no videos: the processors of videos need torchvision."""

    num_frames = fps = merge_size = temporal_patch_size = 2


@cache
def tiny_processor(kind: str) -> Any:
    """Return a processor of a kind whose token ids and image sizes fit `tiny_model`; it reads no files."""
    prefix, options, own = _PROCESSORS[kind]
    image_processing_pil_gemma4._SUPPORTED_SOFT_TOKENS = (4,)  # images of few tokens
    images = getattr(transformers, f"{prefix}ImageProcessorPil")(**options)
    if kind == "paligemma":
        images.image_seq_length = 4
    if kind == "smolvlm":
        processing_smolvlm.num2words = str  # names the number of frames of a video
    # Pixtral's processor takes a helper from the module of torchvision, which the PIL module has, too.
    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral)
    family = {"mistral3": "pixtral", "qwen3_5": "qwen3_vl"}.get(kind, kind)
    module = importlib.import_module(f"transformers.models.{family}.processing_{family}")
    made = getattr(module, f"{'Pixtral' if family == 'pixtral' else _prefix(family)}Processor")
    parts: dict[str, Any] = dict(image_processor=images, tokenizer=tiny_tokenizer())
    if "video_processor" in made.get_attributes():
        parts["video_processor"] = NoVideos()
    if "feature_extractor" in made.get_attributes():
        parts["feature_extractor"] = transformers.WhisperFeatureExtractor()
    template = _TEMPLATE.replace("PLACEHOLDER", placeholder(kind))
    with mock.patch.object(made, "check_argument_for_proper_class"):  # it looks for video processors of torchvision
        return made(**parts, **own, chat_template=template)


def placeholder(kind: str) -> str:
    """Return the text that stands for an image in a prompt."""
    return _PLACEHOLDERS.get(kind, "<image>")


def picture(height: int, width: int) -> Image.Image:
    """Draw an image of `height` x `width` cells of 8 x 8 pixels each, random per pixel."""
    return Image.fromarray(_rng.integers(0, 256, (8 * height, 8 * width, 3), dtype=np.uint8))


def words(count: int) -> str:
    """Draw words."""
    return " ".join(f"w{i}" for i in _rng.integers(6, 84, count)) + " " * bool(count)


def document(kind: str, images: Sequence[tuple[int, ...]], tail: int, first: int = 2) -> dict[str, Tensor]:
    """Return the inputs of a document alone, as its processor and `tiny_model` have them.

    Args:
        kind: one of `KINDS`.
        images: for each image, its height and width in cells of 8 x 8 pixels; (frames / 2, height, width) is a video of
            Qwen, (frames, 1, 1) of other kinds. A word is between images.
        tail: number of words after the last image; with PaliGemma, the suffix.
        first: number of words before the first image; 0 lets the document begin with the image.

    Returns:
        `input_ids`, `labels` (the token ids, -100 for the first token and for images) and token types, int64 [1, n];
        pixel keys of the family, float64 and int64.
    """
    processor = tiny_processor(kind)
    videos, pictures = (
        [size for size in images if len(size) == 3],
        [picture(*size) for size in images if len(size) == 2],
    )
    frames = 0 if kind == "qwen2_5_vl" else 1  # others have text between the frames of a video
    frame = _FRAMES.get(kind, "<video>")
    marks = [
        placeholder(kind) if len(size) == 2 else " w9 ".join([frame * math.prod(size[frames:])] * size[0] ** frames)
        for size in images
    ]
    text = words(first) + words(1).join(marks)
    if kind == "paligemma" and pictures:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # its processor gives tensors to NumPy
            batch = processor(
                images=pictures, text=text, suffix=words(tail), return_tensors="pt", add_special_tokens=False
            )
    elif videos or kind == "paligemma":  # without torchvision the processors take no videos; PaliGemma's needs images
        assert not pictures, "a document has images or videos"
        batch = processor.tokenizer(text + words(tail), return_tensors="pt")
        count = sum(size[0] for size in videos)
        if kind == "gemma4":
            cells = torch.tensor([(x, y) for y in range(4) for x in range(4)])
            batch["mm_token_type_ids"] = (batch["input_ids"] == SPECIAL["<|video|>"]).long() * 2
            batch["pixel_values_videos"] = torch.from_numpy(_rng.random((count, 16, 48)))
            batch["video_position_ids"] = cells.expand(count, 16, 2)
            batch["num_frames_per_video"] = torch.tensor([size[0] for size in videos])
        elif videos and kind in _FRAMES:  # as of images
            pixels = torch.from_numpy(_rng.standard_normal((count, 3, 16, 16)))
            batch |= {"pixel_values": pixels}
            if kind == "smolvlm":
                masks = torch.ones(1, count, 16, 16, dtype=torch.int64)
                batch |= {"pixel_values": pixels[None], "pixel_attention_mask": masks}
        elif videos:
            batch["mm_token_type_ids"] = (batch["input_ids"] == VIDEO).long() * 2
            batch["video_grid_thw"] = torch.tensor([(t, 2 * h, 2 * w) for t, h, w in videos])
            patches = int(batch["video_grid_thw"].prod(-1).sum())
            batch["pixel_values_videos"] = torch.from_numpy(_rng.standard_normal((patches, 3 * 2 * 4 * 4)))
        else:
            batch["token_type_ids"] = torch.ones_like(batch["input_ids"])
    else:
        batch = processor(
            images=pictures or None, text=text + words(tail), return_tensors="pt", add_special_tokens=False
        )
    ids = batch["input_ids"]
    labels = ids.masked_fill((ids == IMAGE) | (ids == VIDEO) | (ids == SPECIAL["<|video|>"]), -100)
    labels[0, 0] = -100
    if kind == "paligemma":
        labels[batch["token_type_ids"] == 0] = -100
    return {
        name: x.double() if x.is_floating_point() else x
        for name, x in (dict(batch) | {"labels": labels}).items()
        if name != "attention_mask"
    }


def conversations(*counts: int) -> Dataset:
    """Return conversations, each with a number of images of several sizes before its question."""
    rows = []
    for count in counts:
        images = [picture(*_rng.integers(2, 5, 2)) for _ in range(count)]
        question = [{"type": "image"}] * count + [{"type": "text", "text": words(5).strip()}]
        answer = [{"type": "text", "text": words(int(_rng.integers(2, 9))).strip()}]
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"images": images, "messages": turns})
    return Dataset.from_list(rows)
