"""Training of TRL's SFTTrainer on packed rows with images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelerate import PartialState
from datasets import Dataset

from flashmask_hf.collators.dataset import first_row, unformatted, warn_of_weights
from flashmask_hf.collators.labels import WEIGHT
from flashmask_hf.collators.rope_index import rope_index_of
from flashmask_hf.collators.vision import DataCollatorForPackedVisionLanguageModeling
from flashmask_hf.hf.models import unwrap_peft
from flashmask_hf.trainers.data_checks import each_dataset, has_images, named_datasets, without_media
from flashmask_hf.trainers.image_rows import EXAMPLES, RowCollator, pack_examples, refuse_unread_columns
from flashmask_hf.trainers.option_checks import checked_collator
from flashmask_hf.trainers.sft_data import check_columns, packing_report
from flashmask_hf.trainers.towers import run_tower_in_every_call


def packs_images(dataset: Any, config: Any) -> bool:
    """Return whether a vision-language model, by its config, is trained on images."""
    return dataset is not None and hasattr(config, "vision_config") and has_images(dataset)


def check_image_options(datasets: Any, *, parts: int, split: bool, formatting_func: Any) -> None:
    """Raise a ValueError for options, and a weight in a dataset's first row, that rows with images do not support."""
    named = [(name, dataset) for name, dataset in named_datasets(*datasets) if dataset is not None]
    weighed = any(first_row(dataset, f"the {name} dataset").get(WEIGHT) is not None for name, dataset in named)
    refused = {
        f"a column {WEIGHT}": (weighed, "the loss does not read it; repeat or leave out examples, and remove it"),
        "cp_size > 1 (parallelism_config)": (parts > 1, "an image's tokens would be on several ranks; set cp_size=1"),
        "split=True": (split, "images are never cut; leave it out"),
        "formatting_func": (formatting_func, "TRL does not read it with images; apply it before, by dataset.map"),
    }
    for name, (is_set, way) in refused.items():
        if is_set:
            raise ValueError(f"{name} with a dataset of images: {way}")


class ImagesMixin:
    """Mixin of a TRL trainer that packs datasets with images.

    The trainer sets `_packs_images`, and calls `_start_images` at the end of its `__init__`.
    """

    _packs_images = False

    def _start_images(self, collator: Any, max_position_embeddings: int | None, max_image_tokens: int | None) -> None:
        """Make collator and rows, with the user's `collator`, if any, and TRL's collator for one example."""
        model = unwrap_peft(self.accelerator.unwrap_model(self.model))
        stock: Any = self.data_collator
        unit, stock.max_length, stock.pad_to_multiple_of = stock.pad_to_multiple_of, None, None
        collator = checked_collator(
            collator,
            DataCollatorForPackedVisionLanguageModeling,
            processor=self.processing_class,
            pad_to_multiple_of=unit,
            max_position_embeddings=max_position_embeddings,
        )
        if collator.collator is None:
            if collator.completion_only_loss is not None:
                stock.completion_only_loss = collator.completion_only_loss
            collator = replace(collator, collator=stock, completion_only_loss=None)
        collator = replace(collator, rope_index=collator.rope_index or rope_index_of(model))
        self._lengths_of = collator.collator if isinstance(collator.collator, type(stock)) else stock
        self.data_collator, self._max_image_tokens = collator, max_image_tokens
        if self.accelerator.num_processes > 1:
            run_tower_in_every_call(model, self.processing_class)
        if (self.args.dataset_kwargs or {}).get("skip_prepare_dataset"):
            return  # a row is a batch
        if collator.max_length not in (None, self.args.max_length):
            problem = f"max_length of data_collator must be None or args.max_length, {self.args.max_length}"
            raise ValueError(f"{problem}, got {collator.max_length}; leave it out")
        self.data_collator = RowCollator(collator, self.args.max_length)
        self._packed_by = {"max_length": self.args.max_length, "max_image_tokens": max_image_tokens}
        self._skip_prepare_dataset = False  # TRL's evaluate then packs what it gets
        packed = each_dataset(self._pack_examples, self.train_dataset, self.eval_dataset)
        self.train_dataset, self.eval_dataset = packed

    def _pack_examples(self, dataset: Any, name: str) -> Any:
        """Return packed rows of a dataset of raw examples."""
        args = self.args
        dataset = unformatted(dataset)
        first = first_row(dataset, f"the {name} dataset")
        if EXAMPLES in first:
            return dataset  # packed already
        check_columns(dataset, first, args.dataset_text_field, False, name)
        warn_of_weights(first, f"the {name} dataset")
        refuse_unread_columns(first, f"example 0 of the {name} dataset")  # pack_examples checks all
        packed = pack_examples(
            without_media(dataset, name, images=True),
            self._lengths_of,
            args.max_length,
            max_image_tokens=self._max_image_tokens,
            num_proc=args.dataset_num_proc,
            name=name,
        )
        if isinstance(packed, Dataset):
            PartialState().print(packing_report(args, len(dataset), packed, name))
        return packed
