"""Checks of trainers' datasets, and collators' limit of positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset, Features, IterableDataset, Json

from flashmask_hf.collators.columns import all_have
from flashmask_hf.collators.dataset import first_row, unformatted
from flashmask_hf.collators.preference import read_number
from flashmask_hf.trainers.formats import preference_columns

logger = get_logger(__name__)

IMAGES = ("image", "images")
_MEDIA = (*IMAGES, "video", "videos", "audio", "audios")
"""Names of columns with images, video and audio."""


def map_options(dataset: Any, args: Any, desc: str) -> dict[str, Any]:
    """Return the options of `map` and `filter` that streams do not have."""
    return {"num_proc": args.dataset_num_proc, "desc": desc} if isinstance(dataset, Dataset) else {}


def map_style_datasets(trainer: Any) -> list[tuple[str, Dataset]]:
    """Return name and dataset of a trainer's datasets other than streams, which collators check batch by batch."""
    named = named_datasets(trainer.train_dataset, trainer.eval_dataset)
    return [(name, dataset) for name, dataset in named if isinstance(dataset, Dataset)]


def named_datasets(train_dataset: Any, eval_dataset: Any) -> list[tuple[str, Any]]:
    """Return name and dataset, which may be None, of each of a trainer's datasets."""
    evaluated = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    return [("train", train_dataset), *evaluated.items()]


def has_images(dataset: Any) -> bool:
    """Return whether a dataset has images, in a column of images or in the messages beside one.

    Of a dataset with a transform only the first row is read. A stream has images if its first row has the column, even
    empty.
    """
    first = first_row(dataset, "the train dataset")
    columns = [column for column in IMAGES if column in first]
    if not columns or not isinstance(dataset, Dataset):
        return bool(columns)

    def found(row: Mapping[str, Any]) -> bool:
        return any((name in columns and _has_value(x)) or _has_media_in_messages(x, IMAGES) for name, x in row.items())

    return found(first) or any(map(found, _undecoded(dataset, [*columns, *_columns_of_parts(dataset)])))


def _undecoded(dataset: Dataset, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of some columns of a dataset, whose images stay encoded; none of a dataset with a transform."""
    if columns and dataset.format["type"] != "custom":
        chosen = dataset.with_format("arrow").select_columns([*dict.fromkeys(columns)])
        features, tables = decoding(chosen.features, media=False), chosen.iter(batch_size=100)
        yield from (features.decode_example(row) for table in tables for row in table.to_pylist())


def decoding(features: Features, *, media: bool = True, json: bool = True) -> Features:
    """Return features of a dataset that decode its images, video and audio, and its JSON, or leave them as stored."""

    def changed(feature: Any) -> Any:
        if isinstance(feature, Mapping):
            return {name: changed(inner) for name, inner in feature.items()}
        if hasattr(feature, "feature"):
            return replace(feature, feature=changed(feature.feature))
        if hasattr(feature, "decode"):
            return replace(feature, decode=json if isinstance(feature, Json) else media)
        return feature

    return Features(changed(features))


def _columns_of_parts(dataset: Dataset) -> list[str]:
    """Return the columns that may hold messages with a list of parts, such as texts and images, as content."""

    def has_types(feature: Any) -> bool:
        if isinstance(feature, Mapping):
            return "type" in feature or any(map(has_types, feature.values()))
        return isinstance(feature, Json) or (hasattr(feature, "feature") and has_types(feature.feature))

    return [name for name, feature in dataset.features.items() if has_types(feature)]


def each_dataset(change: Callable[[Any, str], Any], train_dataset: Any, eval_dataset: Any) -> tuple[Any, Any]:
    """Return a trainer's datasets, each as `change` returns it, given the dataset and its name. None stays."""
    pairs = named_datasets(train_dataset, eval_dataset)
    train, *evaluated = (None if dataset is None else change(dataset, name) for name, dataset in pairs)
    return train, dict(zip(eval_dataset, evaluated, strict=True)) if isinstance(eval_dataset, dict) else evaluated[0]


def without_media(
    dataset: Any, name: str, *, images: bool = False, way: str = "remove the column, or use TRL's trainer"
) -> Any:
    """Return a dataset without its columns of images, video and audio, which must be empty.

    A stream's rows are checked when read, but its messages only if the first row has messages with a list of parts. A
    ValueError names a row with media, and the way out; `images` may stay.
    """
    first = first_row(dataset, f"the {name} dataset")
    media = _MEDIA[len(IMAGES) :] if images else _MEDIA
    check = partial(_refuse_media, media=media, name=name, packs="text and images" if images else "text", way=way)
    check(first, 0)
    columns = [column for column in media if column in first]
    if isinstance(dataset, Dataset):
        if dataset.format["type"] == "custom":  # of a transform
            return dataset
        for index, row in enumerate(_undecoded(dataset, [*columns, *_columns_of_parts(dataset)])):
            check(row, index)
        return dataset.remove_columns(columns) if columns else dataset
    has_parts = isinstance(dataset, IterableDataset) and any(map(_contents, first.values()))
    if columns or (has_parts and not images):  # `map` would decode images
        return unformatted(dataset).map(check, with_indices=True, remove_columns=columns)
    return dataset


def _refuse_media(
    row: Mapping[str, Any], index: int, *, media: Sequence[str], name: str, packs: str, way: str
) -> dict[str, Any]:
    """Raise a ValueError if a row has some of the media in their columns or in messages."""
    for column, value in row.items():
        if (column in media and _has_value(value)) or _has_media_in_messages(value, media):
            where = f"example {index} of the {name} dataset has images, video or audio in its column {column!r}"
            raise ValueError(f"{where}, but this trainer packs {packs}; {way}")
    return {}


def _has_value(value: Any) -> bool:
    """Return whether a cell of a media column is not empty."""
    return value is not None and not (isinstance(value, (str, list)) and all(item is None for item in value))


def _has_media_in_messages(value: Any, media: Sequence[str]) -> bool:
    """Return whether a cell is a conversation with some of the media."""
    kinds = [str(part.get("type")) for content in _contents(value) for part in content if isinstance(part, Mapping)]
    return any(name in kind for kind in kinds for name in media)


def _contents(value: Any) -> list[list[Any]]:
    """Return the contents of a conversation's messages that are lists of parts."""
    turns = [turn for turn in value if isinstance(turn, Mapping)] if isinstance(value, list) else []
    return [turn["content"] for turn in turns if isinstance(turn.get("content"), list)]


def report_dropped(before: Any, after: Any, name: str, why: str) -> None:
    """Log how many examples of a map-style dataset were dropped; a ValueError if all. `why` ends with the limit."""
    if not isinstance(before, Dataset) or len(after) == len(before):
        return
    if not len(after):
        raise ValueError(f"every example of the {name} dataset {why}; raise it")
    logger.warning(f"Dropped {len(before) - len(after)} of {len(before)} {name} examples: each {why}.")


def check_examples(trainer: Any) -> None:
    """Give the collator the model's number of positions if it has no limit, and `check_rows` of each dataset."""
    collator, config = trainer.data_collator, trainer.model.config.get_text_config()
    if collator.max_position_embeddings is None:
        collator = replace(collator, max_position_embeddings=getattr(config, "max_position_embeddings", None))
        trainer.data_collator = collator
    for name, dataset in map_style_datasets(trainer):
        check_rows(dataset, collator, trainer.args, name)


def check_rows(dataset: Dataset, collator: Any, args: Any, name: str) -> None:
    """Raise an error for the first invalid row of a prepared dataset, and log how many rows the collator will cut.

    Of rows with images the format and the numbers are checked, and nothing behind a transform: images stay encoded.
    """
    reads_images = getattr(collator, "read_images", None) is not None
    if reads_images and dataset.format["type"] == "custom":
        return
    for column in collator._optional_columns:
        if column in dataset.column_names:
            names = [f"example {index} of the {name} dataset, as prepared," for index in range(len(dataset))]
            values = [read_number(x, column, where) for x, where in zip(dataset[column], names, strict=True)]
            all_have(column, [value is not None for value in values], names)
    if reads_images:
        for index, row in enumerate(_undecoded(dataset, [x for x in dataset.column_names if x not in IMAGES])):
            preference_columns(row, index)
        return
    found = dataset.map(
        lambda row, index: {"cut": collator.check(row, f"example {index} of the {name} dataset, as prepared,")},
        with_indices=True,
        remove_columns=dataset.column_names,
        keep_in_memory=True,  # the dataset's folder may be read-only
        **map_options(dataset, args, f"Checking {name} dataset"),
    ).with_format(None)  # `map` hands on a transform, which would look for the columns
    cut = [index for index, is_cut in enumerate(found["cut"]) if is_cut]
    if cut:
        logger.warning(
            f"{len(cut)} of {len(dataset)} {name} examples have more than max_length={collator.max_length} tokens with "
            f"their longest answer, the first is example {cut[0]}: truncation_mode={collator.truncation_mode!r} cuts "
            "them."
        )


def check_prepared(trainer: Any, *, by_length: bool = True) -> None:
    """Check a trainer's datasets after their preparation, which removes columns of lengths if `by_length`.

    Raises:
        ValueError: a dataset lacks the length column for sampling, or `dataloader_drop_last` drops all its rows.
    """
    args = trainer.args
    strategy, column = args.train_sampling_strategy, args.length_column_name
    sampled = by_length and strategy in ("group_by_length", "batch_rebalance")
    processes = args.world_size // trainer._copies
    for name, dataset in map_style_datasets(trainer):
        if sampled and column not in dataset.column_names:
            problem = f"needs the column {column!r}, which the {name} dataset, as prepared, lacks; leave it out"
            raise ValueError(f"train_sampling_strategy={strategy!r} {problem}")
        task = "train" if dataset is trainer.train_dataset else "eval"
        batch = processes * getattr(args, f"{task}_batch_size")
        if args.dataloader_drop_last and len(dataset) < batch:
            counts = f"{len(dataset)} as prepared, but a batch of all ranks has {batch}"
            way = f"lower per_device_{task}_batch_size, or leave it out"
            raise ValueError(f"dataloader_drop_last=True drops every row of the {name} dataset: {counts}; {way}")
