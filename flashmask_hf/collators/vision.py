"""Data collator that packs conversations with images for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flashmask_hf.collators.columns import all_have, example_names
from flashmask_hf.collators.documents import padded
from flashmask_hf.collators.forest import Forest
from flashmask_hf.collators.images import TOKEN_TYPES, images_of, media_tokens
from flashmask_hf.collators.labels import NO_WEIGHT, WEIGHT
from flashmask_hf.collators.packing import PackingCollator
from flashmask_hf.collators.rope_index import RopeIndex
from flashmask_hf.names import IGNORED

_PIXELS = (
    "pixel_values", "pixel_values_images", "pixel_values_local", "high_res_pixel_values", "pixel_attention_mask",
    "pixel_mask", "image_grid_thw", "image_grid_hw", "image_merge_sizes", "image_sizes", "image_position_ids",
    "batch_num_images", "num_local_patches", "spatial_shapes", "target_sizes", "pixel_values_videos", "video_grid_thw",
    "video_position_ids", "num_frames_per_video", "second_per_grid_ts", "video_second_per_grid", "target_sizes_videos",
)  # fmt: skip
"""Keys with an entry per image, tile, patch or video."""

_SIZES = ("image_sizes", "pixel_attention_mask", "spatial_shapes")
"""Keys that tell a model which pixels are padding."""

_AXES = "axes"
"""Key of a document's positions along the axes, int64 [axes, n]."""

Document = dict[str, Tensor]
"""A processor's output for one example: keys of tokens [1, n], and keys of pixels."""


@dataclass
class DataCollatorForPackedVisionLanguageModeling(PackingCollator):
    """Data collator that packs examples with images into rows in which each example attends only to itself.

    An example is what TRL's SFTTrainer takes: `messages` or `text`, or `prompt` and `completion`, with or without
    `images` or `image`; or `{"examples": [...]}`, a row packed ahead. TRL's collator makes each example's inputs alone.
    Images are never cut.

    `flashmask_hf.collators` describes `max_length`, `pad_to_multiple_of` and `max_position_embeddings`.

    Args:
        processor: the model's processor. Its tokenizer has the padding token.
        rope_index: `RopeIndex.of(model)` for models with positions along axes (all of Qwen-VL and GLM-V), or None.
        collator: makes the inputs of a list of one example; None is TRL's `DataCollatorForVisionLanguageModeling`. Pass
            it with other options, for example `assistant_only_loss`.
        completion_only_loss: as in TRL: whether only completions are learned; None means: if there are any.

    Returns:
        dict[str, Tensor]: `input_ids` and `labels`, int64 [rows, S]; `position_ids`, int64 [rows, S], or with a
        `rope_index` [4, rows, S]: the token's number in its document, then the model's axes; `startend_row_indices`,
        int32 [rows, 1, S, 1]; the model's token types, int64 [rows, S]; and its pixels, in the order of their tokens.

    Raises:
        TypeError: also for a tokenizer in place of the processor.
        ValueError: also for a `weight`, a key with an unknown place in a row, and other image tokens than the
            images need.

    Example:
        >>> collator = DataCollatorForPackedVisionLanguageModeling(processor)  # doctest: +SKIP
        >>> batch = collator([  # doctest: +SKIP
        ...     {"messages": [{"role": "user", "content": "What is this?"}, ...], "images": [image]}
        ... ])
    """

    processor: Any
    _: KW_ONLY
    rope_index: RopeIndex | None = None
    collator: Callable[[list[Any]], Mapping[str, Any]] | None = None
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    completion_only_loss: bool | None = None
    max_position_embeddings: int | None = None

    def __post_init__(self):
        if not hasattr(self.processor, "tokenizer"):
            got = type(self.processor).__name__
            raise TypeError(f"processor must be of text and images, got {got}; load it by AutoProcessor")
        self.pad_token_id = self.processor.tokenizer.pad_token_id or 0
        super().__post_init__()
        if self.collator is not None and self.completion_only_loss is not None:
            raise ValueError("completion_only_loss is for TRL's collator; give it to the collator that you pass")

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate one batch."""
        names = example_names(examples)
        packed = [self._read(example, name) for example, name in zip(examples, names, strict=True)]
        forests = [Forest.from_trees(*(document["input_ids"][0].numpy() for document in own)) for own in packed]
        rows = self._pack(forests, names)

        def spread(key: str, filler: int, axis: int = 0) -> Tensor:
            """Lay out a key of the documents, [axes, n] each, in the rows, int64 [R, S]."""
            values = [np.concatenate([document[key][axis].numpy() for document in own]) for own in packed]
            return torch.from_numpy(rows.spread(values, filler))

        batch = rows.batch()
        batch["labels"] = spread("labels", IGNORED).masked_fill(batch["position_ids"] == 0, IGNORED)
        # Pixels are in the order of their tokens in the rows.
        documents = [document for index in np.argsort(rows.starts).tolist() for document in packed[index]]
        for key in TOKEN_TYPES:
            if all_have(key, [key in own[0] for own in packed], names):
                batch[key] = spread(key, 0)
        if self.rope_index is not None:
            axes = [spread(_AXES, 0, axis) for axis in range(len(documents[0][_AXES]))]
            batch["position_ids"] = torch.stack([batch["position_ids"], *axes][-4:])
        for key in _PIXELS:
            if any(key in document for document in documents):
                batch[key] = _join(key, [document for document in documents if key in document])
        return batch

    def _read(self, example: Mapping[str, Any], name: str) -> list[Document]:
        """Return the documents of an example: several of a row packed ahead."""
        ahead = example.get("examples")
        if ahead is None:
            return [self._document(example, name)]
        documents = [self._document(one, f"examples[{index}] of {name}") for index, one in enumerate(ahead)]
        for key in TOKEN_TYPES:
            all_have(key, [key in own for own in documents], [f"examples[{index}]" for index in range(len(documents))])
        return documents

    def _document(self, example: Mapping[str, Any], name: str) -> Document:
        """Return the inputs of an example alone, with positions along the axes of the `rope_index`."""
        given = {key: value for key, value in example.items() if value is not None and key != "image"}
        if self.collator is None and "input_ids" in given:  # TRL tokenizes datasets without a column of images
            problem = f"{name} is tokenized, but TRL's collator takes raw examples"
            raise ValueError(f"{problem}; keep the column images, or use DataCollatorForPackedLanguageModeling")
        if WEIGHT in given:
            raise ValueError(f"{name} has a weight, which is not read with images; {NO_WEIGHT}")
        given["images"] = images_of(example)
        document = {key: torch.as_tensor(value) for key, value in self._collator(given)([given]).items()}
        unknown = document.keys() - {"input_ids", "labels", "attention_mask", *TOKEN_TYPES, *_PIXELS}
        if unknown:
            problem = f"{name} gives the model {min(unknown)}, which has no known place in a packed row"
            raise ValueError(f"{problem}. Train without packing, or pass a collator without it.")
        for key in ("attention_mask", "labels", *TOKEN_TYPES):
            if key in document and document[key].shape != (1, document["input_ids"].numel()):
                raise ValueError(
                    f"{key} of {name} must have the shape [1, n] of input_ids, got {[*document[key].shape]}"
                )
        if not document.pop("attention_mask", torch.ones(())).all():
            raise ValueError(padded(name))
        _check_media(self.processor, document, name)
        _check_images(self.processor, document, name)
        if self.rope_index is not None:
            document[_AXES] = self.rope_index(document)[:, 0]
            document.pop("mm_token_type_ids", None)  # the model reads it only for positions
        return document

    def _collator(self, example: Mapping[str, Any]) -> Callable[[list[Any]], Mapping[str, Any]]:
        if self.collator is not None:
            return self.collator
        from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

        only = self.completion_only_loss
        return DataCollatorForVisionLanguageModeling(
            self.processor, completion_only_loss="completion" in example if only is None else only
        )


def _check_media(processor: Any, document: Document, name: str) -> None:
    for kind, (mark, token) in media_tokens(processor).items():
        if (document["input_ids"] == token).any() and not any(kind in key for key in document):
            problem = f"{name} has {mark}, but its inputs have no {kind}, which TRL's collator does not read"
            raise ValueError(f"{problem}. Remove it, or pass a collator that does.")


def _check_images(processor: Any, document: Document, name: str) -> None:
    """Raise a ValueError unless a document has one image token per feature of its images."""
    token = getattr(processor.tokenizer, "image_token_id", None)  # Gemma 3's processor has another token's id
    token = getattr(processor, "image_token_id", None) if token is None else token
    if token is None or "pixel_values_videos" in document:  # some families put image tokens for frames
        return
    features = _count_features(processor, document, token)
    tokens = int((document["input_ids"] == token).sum())
    if features is not None and tokens != features:
        problem = f"{name} has {tokens} image tokens, but its images have {features} features"
        raise ValueError(f"{problem}. Do not cut it, and write image tokens only where images are.")


def _count_features(processor: Any, document: Document, token: int) -> int | None:
    """Return the number of tokens of a document's images, or None if its processor does not say."""
    pixels = document.get("pixel_values")
    if pixels is None:
        return 0
    if "image_position_ids" in document:  # Gemma 4: padding has position -1, and a token is a square of patches
        patches = int((document["image_position_ids"] >= 0).all(-1).sum())
        return patches // processor.image_processor.pooling_kernel_size**2
    try:  # the text that the processor puts for an image; some need sizes that they then drop
        images = range(len(document.get("image_grid_thw", document.get("image_sizes", pixels))))
        texts = [processor.replace_image_token(document, image_idx=index) for index in images]
        return "".join(texts).count(processor.tokenizer.convert_ids_to_tokens(token))
    except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError):
        per_image = getattr(processor, "image_seq_length", getattr(processor, "image_seq_len", None))
        return None if per_image is None else per_image * pixels.shape[:-3].numel()


def _join(key: str, documents: Sequence[Document]) -> Tensor:
    """Join a key of pixels along the images of all documents, padded if the model finds the padding."""
    values = [document[key] for document in documents]
    axis = _axis_of_images(key, documents)
    largest = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    shapes = sorted({(*value.shape[:axis], *value.shape[axis + 1 :]) for value in values})
    if len(shapes) > 1 and not any(size in documents[0] for size in _SIZES):
        raise ValueError(f"{key} must have one shape per image, got {shapes}. Set one size in the image processor.")
    return torch.cat([_pad(value, largest, axis) for value in values], axis)


def _axis_of_images(key: str, documents: Sequence[Document]) -> int:
    """Return the axis of a key of pixels along which the documents' images are."""
    if key.startswith("pixel_values") and key.replace("pixel_values", "target_sizes") in documents[0]:
        return 3  # [1, C, patch, patches] of MiniCPM-V
    if key in ("pixel_values", "pixel_attention_mask") and "pixel_attention_mask" in documents[0]:
        # [1, images, C, H, W] of Idefics and SmolVLM, but not [images, tiles, C, H, W].
        return int(all(own["pixel_values"].dim() == 5 and len(own["pixel_values"]) == 1 for own in documents))
    return 0


def _pad(value: Tensor, shape: Sequence[int], axis: int) -> Tensor:
    """Pad a tensor at its ends to a shape, but not along `axis`."""
    room = [0 if at == axis else size - own for at, (size, own) in enumerate(zip(shape, value.shape, strict=True))]
    return nn.functional.pad(value, [x for size in room[::-1] for x in (0, size)])
