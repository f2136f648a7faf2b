"""Checks of `PackedSFTTrainer`'s datasets, and the report of packing."""

from __future__ import annotations

import math
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset

from flashmask_hf.collators.dataset import packing_efficiency
from flashmask_hf.collators.labels import MASK_COLUMNS
from flashmask_hf.sharing import drops
from flashmask_hf.trainers.context_parallel import context_parallel_size
from flashmask_hf.trainers.formats import CONTEXTS, refuse_other_keys, refuse_unread_context

logger = get_logger(__name__)

_TURNS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Columns of conversations that TRL reads, and the keys of their messages."""


def check_columns(
    dataset: Dataset | IterableDataset, first: dict[str, Any], text_field: str, formatted: bool, name: str
) -> None:
    """Raise a ValueError if TRL would ignore text of a dataset that is not tokenized, for example a system prompt.

    `first` is its first row, `formatted` whether a `formatting_func` makes the text.
    """
    where = f"the {name} dataset"
    if formatted:
        ahead = [f"the column {column} of {where}" for column in ("prompt", *_TURNS) if column in first]
        if text_field != "text":
            ahead.append(f"dataset_text_field={text_field!r}")
        if ahead:
            raise ValueError(
                f"TRL would read {ahead[0]}, and not the text of formatting_func; apply it before: dataset.map("
                "lambda row: {'text': formatting_func(row)}, remove_columns=dataset.column_names)"
            )
        return
    read = [column for column in (*_TURNS, text_field) if column in first]
    if {"prompt", "completion"} <= set(first):
        read = ["completion"]
        refuse_other_keys((first["prompt"], first["completion"]), where)
    elif not read:
        problem = f"has no messages, no prompt with completion, no {text_field} and no input_ids"
        way = f"rename a column, set dataset_text_field, or give a formatting_func. It has: {', '.join(first)}"
        raise ValueError(f"{where} {problem}; {way}")
    elif "prompt" in first:
        problem = f"{where} has a prompt without a completion, and TRL then ignores other columns"
        raise ValueError(f"{problem}; remove or rename the column prompt to train on {read[0]}")
    elif text_field not in first:
        refuse_other_keys((first[read[0]],), where, _TURNS[read[0]])
    has_turns = {"prompt", "completion"} <= set(first) or read[0] in _TURNS
    for column in CONTEXTS if has_turns else ():
        if column in first:  # a stream is checked by its first row
            rows = dataset[column] if isinstance(dataset, Dataset) else ()
            index = next((index for index, text in enumerate(rows) if text), 0)
            row = dataset[index] if isinstance(dataset, Dataset) else first
            refuse_unread_context(row, (row[read[0]],), f"example {index} of {where}")


def check_completions(example: dict[str, Any], dataset_name: str) -> None:
    """Raise a ValueError if no column of an example marks its completion."""
    columns = ("completion", "labels", *MASK_COLUMNS)
    if not any(name in example for name in columns):
        problem = f"needs one of the columns {', '.join(columns)}, which the {dataset_name} rows lack"
        way = "give prompt and completion, set assistant_only_loss=True for conversations, or leave it out"
        raise ValueError(f"completion_only_loss=True {problem}; {way}")


def check_sharing(trainer: Any) -> None:
    """Check a trainer before it trains on shared prefixes; warn of dropout, which draws once for a shared token.

    Raises:
        ValueError: it learns the auxiliary loss of a mixture of experts, which counts tokens, or compiles sliding
            windows shorter than `max_length`, which cut trees.
    """
    args, config = trainer.args, trainer.model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    longest = args.max_length or math.inf
    if args.torch_compile and window and slides and window < longest:
        problem = f"shared prefixes are not compiled for sliding_window={window}, shorter than max_length={longest}"
        raise ValueError(f"{problem}; set torch_compile=False, share_prefixes=False, or max_length={window}")
    if trainer.aux_loss_enabled:
        problem = "the auxiliary loss of a mixture of experts would count a token once that several examples share"
        raise ValueError(f"{problem}; set output_router_logits=False in the model's config, or share_prefixes=False")
    if any(map(drops, trainer.model.modules())):
        logger.warning("Examples share what dropout or noise does to shared tokens; set it to 0, or share no prefixes.")


def packing_report(args: Any, examples: int, packed: Dataset, name: str, row_length: int | None = None) -> str:
    """Return a message with the number of packed rows and, for "train", of optimizer steps per epoch."""
    rows, per_row, row_length = len(packed), examples / len(packed), row_length or args.max_length
    report = (
        f"Packed {examples} {name} examples into {rows} rows of up to {row_length} tokens; packing efficiency "
        f"{packing_efficiency(packed, row_length):.1%}"
    )
    if "example_lengths" in packed.column_names:
        computed, unshared = (sum(map(sum, packed[column])) for column in ("seq_lengths", "example_lengths"))
        report += f"\nShared prefixes: {computed} tokens are computed for {unshared}, {unshared / computed:.1f}x fewer."
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size // context_parallel_size(args)
    steps, unpacked = math.ceil(rows / batch), math.ceil(examples / batch)
    if name != "train" or steps >= unpacked:
        return report
    return (
        f"{report}\nBatch sizes count rows, and a row holds {per_row:.1f} examples on average: an epoch has {steps} "
        f"optimizer steps on {batch * per_row:.0f} examples each. Unpacked it would have {unpacked}, on {batch} each. "
        f"For as many steps, divide the batch size by {per_row:.1f}; for fewer, raise the learning rate."
    )
