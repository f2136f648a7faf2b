"""Checks of `PackedSFTTrainer`'s datasets, and the report of packing."""

from __future__ import annotations

import math
from typing import Any

from datasets import Dataset, IterableDataset

from flashmask_hf.collators.dataset import packing_efficiency
from flashmask_hf.collators.labels import MASK_COLUMNS
from flashmask_hf.trainers.context_parallel import context_parallel_size
from flashmask_hf.trainers.formats import CONTEXTS, refuse_other_keys, refuse_unread_context

__all__ = ["check_columns", "check_completions", "packing_report"]


def check_columns(
    dataset: Dataset | IterableDataset, first: dict[str, Any], text_field: str, formatted: bool, name: str
) -> None:
    """Raise a ValueError if TRL would ignore text of a dataset that is not tokenized.

    `first` is its first row, `formatted` whether a `formatting_func` makes the text.
    """
    if formatted:
        _check_formatted_columns(first, text_field, name)
        return
    _check_read_columns(first, text_field, name)
    _check_context(dataset, first, name)


def _check_read_columns(example: dict[str, Any], text_field: str, dataset_name: str) -> None:
    """Raise a ValueError if an example has nothing that TRL tokenizes."""
    if {"prompt", "completion"} <= set(example):
        refuse_other_keys((example["prompt"], example["completion"]), f"the {dataset_name} dataset")
        return
    read = [name for name in ("messages", "conversations", text_field) if name in example]
    if not read:
        problem = f"has no messages, no prompt with completion, no {text_field} and no input_ids"
        way = f"rename a column, set dataset_text_field, or give a formatting_func. It has: {', '.join(example)}"
        raise ValueError(f"the {dataset_name} dataset {problem}; {way}")
    if "prompt" in example:
        problem = "has a prompt without a completion, and TRL then ignores other columns"
        way = f"remove or rename the column prompt to train on {read[0]}"
        raise ValueError(f"the {dataset_name} dataset {problem}; {way}")
    if text_field in example:
        return
    first = next(iter(example[read[0]] or ()), None)
    if isinstance(first, dict) and {"messages": "role", "conversations": "from"}[read[0]] not in first:
        problem = f"{read[0]} of the {dataset_name} dataset have the keys {', '.join(first)}"
        read_keys = "role and content in messages, from and value in conversations"
        raise ValueError(f"{problem}, but TRL reads {read_keys}; rename the keys or the column")


def _check_context(dataset: Dataset | IterableDataset, first: dict[str, Any], dataset_name: str) -> None:
    """Raise a ValueError for a system prompt or an input in a separate column, which TRL ignores.

    Checks the first row with text in the column; in a stream, the first row.
    """
    names = ["completion"] if "prompt" in first else ["messages", "conversations"]
    read = next((name for name in names if name in first), None)
    for column in CONTEXTS:
        if read is None or column not in first:
            continue
        index, row = 0, first
        if isinstance(dataset, Dataset):
            index = next((index for index, text in enumerate(dataset[column]) if text), 0)
            row = dataset[index]
        refuse_unread_context(row, (row[read],), f"example {index} of the {dataset_name} dataset")


def _check_formatted_columns(example: dict[str, Any], text_field: str, dataset_name: str) -> None:
    """Raise a ValueError if TRL would not tokenize the text that `formatting_func` makes."""
    read = [name for name in ("prompt", "messages", "conversations") if name in example]
    if read or text_field != "text":
        ahead = f"the column {read[0]} of the {dataset_name} dataset" if read else f"dataset_text_field={text_field!r}"
        raise ValueError(
            f"TRL would read {ahead}, and not the text of formatting_func; apply it before: dataset.map("
            "lambda row: {'text': formatting_func(row)}, remove_columns=dataset.column_names)"
        )


def check_completions(example: dict[str, Any], dataset_name: str) -> None:
    """Raise a ValueError if no column of an example marks its completion."""
    columns = ("completion", "labels", *MASK_COLUMNS)
    if not any(name in example for name in columns):
        problem = f"needs one of the columns {', '.join(columns)}, which the {dataset_name} rows lack"
        way = "give prompt and completion, set assistant_only_loss=True for conversations, or leave it out"
        raise ValueError(f"completion_only_loss=True {problem}; {way}")


def packing_report(args: Any, examples: int, packed: Dataset, name: str) -> str:
    """Return a message with the number of packed rows and, for "train", of optimizer steps per epoch."""
    rows, per_row = len(packed), examples / len(packed)
    report = (
        f"Packed {examples} {name} examples into {rows} rows of up to {args.max_length} tokens; packing efficiency "
        f"{packing_efficiency(packed, args.max_length):.1%}"
    )
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size // context_parallel_size(args)
    steps, unpacked = math.ceil(rows / batch), math.ceil(examples / batch)
    if name != "train" or steps >= unpacked:
        return report
    return (
        f"{report}\nBatch sizes count rows, and a row holds {per_row:.1f} examples on average: an epoch has {steps} "
        f"optimizer steps on {batch * per_row:.0f} examples each. Unpacked it would have {unpacked}, on {batch} each. "
        f"For as many steps, divide the batch size by {per_row:.1f}; for fewer, raise the learning rate."
    )
