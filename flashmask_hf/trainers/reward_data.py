"""Preparation and checks of the datasets of `MultiAnswerRewardTrainer`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset, Value
from trl.trainer.reward_config import RewardConfig
from trl.trainer.utils import global_then_local_main_first

from flashmask_hf.collators.columns import as_number
from flashmask_hf.collators.dataset import first_row, refuse_transform, unformatted, warn_of_weights
from flashmask_hf.collators.reward import answer_scores, shared_prefix, two_margins
from flashmask_hf.trainers.data_checks import map_options, report_dropped, without_media
from flashmask_hf.trainers.formats import answer_sequences


def prepare_rows(
    dataset: Dataset | IterableDataset, tokenizer: Any, args: RewardConfig, name: str, score_margin: float
) -> Dataset | IterableDataset:
    """Return a dataset, raw or tokenized, as tokenized rows without answers over `args.max_length`.

    The log counts dropped rows, except in streams. A TypeError or ValueError says what is wrong with the rows.
    """
    dataset = without_media(unformatted(dataset), name)
    first = first_row(dataset, f"the {name} dataset")
    warn_of_weights(first, f"the {name} dataset")
    with global_then_local_main_first():
        if not ({"prompt_ids", "answers_ids"} <= set(first) or {"chosen_ids", "rejected_ids"} <= set(first)):
            refuse_transform(dataset, f"the {name} dataset")
            if isinstance(dataset, Dataset) and score_margin and "score_chosen" in first and "margin" not in first:
                # Ranked answers among pairs get no margin, but map needs the column in every row, with its type.
                dataset = dataset.add_column("margin", [None] * len(dataset), feature=Value("float64"))  # type: ignore
            dataset = dataset.map(
                _tokenize,
                with_indices=True,
                remove_columns=list(first),
                fn_kwargs={"tokenizer": tokenizer, "dataset_name": name, "score_margin": score_margin},
                **map_options(dataset, args, f"Tokenizing {name} dataset"),
            )
        if args.max_length is None:
            return dataset
        options = map_options(dataset, args, f"Filtering {name} >{args.max_length} tokens")
        kept = dataset.filter(_fits, fn_kwargs={"max_length": args.max_length}, **options)
    report_dropped(dataset, kept, name, f"has an answer that brings it over max_length={args.max_length}")
    return kept


def _fits(example: dict[str, Any], max_length: int) -> bool:
    """Return whether the question fits with its longest answer."""
    if example.get("answers_ids") is not None:
        return len(example["prompt_ids"]) + max(map(len, example["answers_ids"]), default=0) <= max_length
    return max(len(example["chosen_ids"]), len(example["rejected_ids"])) <= max_length


def _tokenize(
    example: dict[str, Any], index: int, *, tokenizer: Any, dataset_name: str, score_margin: float
) -> dict[str, Any]:
    """Tokenize an example's question and answers, and keep its scores and margin."""
    name = f"example {index} of the {dataset_name} dataset"
    tools = example.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    options = {"tools": tools, **(example.get("chat_template_kwargs") or {})}
    tokens = []
    for nth, sequence in enumerate(answer_sequences(example, tokenizer.eos_token, name)):
        if isinstance(sequence, str):
            ids = tokenizer(text=sequence)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(sequence, tokenize=True, return_dict=True, **options)["input_ids"]
        if not ids:
            raise ValueError(f"answer {nth} of {name} has no tokens; remove the answer, or the example")
        tokens.append(ids)
    shared = shared_prefix([np.asarray(ids) for ids in tokens])
    tokenized = {"prompt_ids": tokens[0][:shared], "answers_ids": [ids[shared:] for ids in tokens]}
    has_answers = example.get("answers") is not None  # concatenated datasets may also have pairs
    if "margin" in example:
        tokenized["margin"] = example["margin"]
    if "scores" in example:
        tokenized["scores"] = example["scores"] if has_answers else None
        answer_scores(tokenized["scores"], len(tokens), name)
    if not has_answers and score_margin and "score_chosen" in example and "score_rejected" in example:
        if example.get("margin") is not None:
            raise ValueError(two_margins(name, score_margin))
        columns = ("score_chosen", "score_rejected")
        chosen, rejected = (as_number(example[column], f"{column} of {name}") for column in columns)
        tokenized["margin"] = score_margin * (chosen - rejected)
    return tokenized
