"""Functions that the trainers share: their arguments, collator limits, datasets and the metric of mask sparsity."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import compare_versions
from datasets import Dataset
from torch import Tensor
from trl.trainer.utils import get_config_model_id

from flashmask_hf.collators.dataset import unformatted
from flashmask_hf.hf.model_hooks import unwrap_peft
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import FLASHMASK
from flashmask_hf.trainers.context_parallel import refuse_parts

__all__ = [
    "check_adapters",
    "check_config",
    "correct_gathers",
    "default_output_dir",
    "first_row",
    "first_rows",
    "flashmask_policy",
    "load_with",
    "log_sharing",
    "log_sparsity",
    "map_style_datasets",
    "prepare_arguments",
    "refuse_empty_reference",
    "refuse_liger_losses",
    "refuse_options",
    "refuse_sampling_by_length",
    "refuse_too_few_rows",
    "text_datasets",
    "turn_off_dispatching",
    "whole_in_each_process",
    "with_position_limit",
    "without_media",
]


_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Names that datasets give columns of images, video and audio."""


def default_output_dir(model: Any, task: str) -> str:
    """Return the output folder of a trainer without arguments, named as TRL names it."""
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    return f"{name.split('/')[-1]}-{task}"


def check_config(args: Any, config: type, ours: str) -> None:
    """Raise a TypeError if a trainer's arguments are not of its config class, whose options it would miss.

    Args:
        args: the trainer's arguments.
        config: TRL's config class of the trainer.
        ours: name of the config class to recommend.
    """
    if not isinstance(args, config):
        raise TypeError(
            f"args must be a {ours}, got {type(args).__name__}; build it with {ours}(output_dir=..., ...), which takes "
            "every option of transformers.TrainingArguments"
        )


@contextlib.contextmanager
def load_with(args: Any, **options: Any) -> Iterator[None]:
    """Make options the default of whatever TRL loads by name within the context.

    An option that is given as None, as TRL's scripts give `attn_implementation`, gets its default, too. Afterwards
    `args.model_init_kwargs` is what it was, for whatever else is loaded with the same arguments.
    """
    given = args.model_init_kwargs
    if options:
        chosen = given or {}
        args.model_init_kwargs = chosen | {name: x for name, x in options.items() if chosen.get(name) is None}
    try:
        yield
    finally:
        args.model_init_kwargs = given


def flashmask_policy(model: Any, args: Any, *, reference: bool = False) -> contextlib.AbstractContextManager[None]:
    """Make the attention "flashmask" the default of models that TRL loads by name within the context.

    Args:
        model: the model, or the name that the trainer loads it by.
        args: the trainer's arguments.
        reference: whether TRL may load a reference model by the name of a model that is given as such.
    """
    by_name = isinstance(model, str)
    options = {"attn_implementation": FLASHMASK} if by_name else {}
    return load_with(args, **options, **(whole_in_each_process(args) if by_name or reference else {}))


def whole_in_each_process(args: Any) -> dict[str, Any]:
    """Return the options with which TRL 1.16 loads a model whole in each of several processes.

    It would spread the model over all GPUs before FSDP shards it, and fail.
    """
    return {"device_map": None} if args.world_size > 1 else {}


def refuse_empty_reference(plugin: Any) -> None:
    """Raise a ValueError if TRL 1.16 would leave the reference model empty on every process but the first.

    Args:
        plugin: accelerate's FSDP plugin.
    """
    if plugin.fsdp_version == 2 and plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "fsdp_cpu_ram_efficient_loading leaves a reference model empty on all processes but the first: TRL shards "
            "it with FSDP2 without sending the weights; set it to false in accelerate's configuration, or train an "
            "adapter, which needs no reference model"
        )


def correct_gathers(model: Any) -> None:
    """Make FSDP2 gather the weights that a training step needs, and no others. Without FSDP2, nothing changes.

    A trained head is gathered before the step. TRL's fused head reads its weights without calling it, and gathers a
    shard by itself, so each process would learn from its own tokens alone, where accelerate shards the head apart from
    the final norm, as with `modules_to_save=["lm_head"]`.

    A frozen input embedding is not gathered in the backward pass, which never reads it. FSDP2 (torch 2.11 to 2.13)
    prefetches it there, waits for it nowhere and frees the buffer. Where one process is late, the next forward's first
    gather is written into that buffer and overwritten: half of the final norm was zero.

    Args:
        model: a transformers model with a head, or a PEFT model around one, not wrapped for distributed training.
    """
    inner = unwrap_peft(model)
    if _correct_gathers not in inner._forward_pre_hooks.values():
        inner.register_forward_pre_hook(_correct_gathers, with_kwargs=True)


def _correct_gathers(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Gather a trained head, and no frozen input embedding, in a training step, if FSDP2 shards them."""
    if not torch.is_grad_enabled():
        return
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if kwargs.get("fused_lm_head") and hasattr(head, "unshard") and any(x.requires_grad for x in head.parameters()):
        head.unshard()
    if hasattr(embedding, "set_unshard_in_backward"):
        needed = {id(x) for x in head.parameters()} if head is not None else set()  # tied to the embedding
        if not any(x.requires_grad or id(x) in needed for x in embedding.parameters()):
            embedding.set_unshard_in_backward(False)


def check_adapters(model: Any, peft_config: Any) -> None:
    """Raise a ValueError for adapters that add virtual tokens, or look for tokens in a sequence.

    Args:
        model: the model, or the name that the trainer loads it by.
        peft_config: configuration of the adapter to add, or None.
    """
    for config in (peft_config, *getattr(model, "peft_config", {}).values()):
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"peft_config: {type(config).__name__} adds virtual tokens to every sequence, which a packed row has "
                "no place for; use LoRA or another adapter of the weights"
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                "peft_config: alora_invocation_tokens are looked for in every sequence, which a packed row is not; use "
                "LoRA without them"
            )


def turn_off_dispatching(args: Any) -> None:
    """Make each process read its own batches, in place; accelerate's default for streams cuts one process's apart.

    Raises:
        ValueError: `accelerator_config.dispatch_batches` is true.
    """
    if args.accelerator_config.dispatch_batches:
        raise ValueError("dispatch_batches cuts batches apart, and packed rows are in one piece; set it to false")
    args.accelerator_config.dispatch_batches = False


def refuse_liger_losses(args: Any) -> None:
    """Raise a ValueError if TRL would compute log-probabilities by Liger, past the hooks that pack rows."""
    if args.use_liger_kernel and compare_versions("trl", "<", "1.15"):
        raise ValueError(
            "use_liger_kernel computes log-probabilities past the model's forward in this version of TRL; leave it "
            "out, or install trl>=1.15"
        )


def refuse_options(args: Any, *, learns_labels: bool = False) -> None:
    """Raise a ValueError for options that packed rows cannot have, or that the trainer's loss would ignore.

    Args:
        args: the trainer's arguments.
        learns_labels: whether the loss is that of each token's label, so that rows can be split over processes, and
            labels smoothed.
    """
    if not learns_labels:
        refuse_parts(args)
        if args.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={args.label_smoothing_factor} changes nothing here: only the loss of labels "
                "reads it, which this trainer does not compute; leave it at 0"
            )
    if args.neftune_noise_alpha is not None:
        raise ValueError(
            "neftune_noise_alpha scales its noise by the length of a sequence, and that of a packed row is another; "
            "leave it out"
        )


def prepare_arguments(model: Any, args: Any, peft_config: Any, *, learns_labels: bool = False) -> None:
    """Check a trainer's arguments for packed rows, and turn dispatched batches off, in place.

    Args:
        model: the model, or the name that the trainer loads it by.
        args: the trainer's arguments.
        peft_config: configuration of the adapter to add, or None.
        learns_labels: as in `refuse_options`.

    Raises:
        ValueError: an adapter adds virtual tokens or looks for tokens in a sequence, `neftune_noise_alpha` is set, or
            batches are dispatched. Packed rows cannot have these. Or rows are to be split or labels to be smoothed, and
            the trainer cannot.
    """
    refuse_options(args, learns_labels=learns_labels)
    check_adapters(model, peft_config)
    turn_off_dispatching(args)


def with_position_limit(collator: Any, model: Any) -> Any:
    """Return the collator, or a copy with the model's `max_position_embeddings` if it has no limit of its own."""
    if collator.max_position_embeddings is not None:
        return collator
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return replace(collator, max_position_embeddings=positions)


def map_style_datasets(train_dataset: Any, eval_dataset: Any) -> Iterator[tuple[str, Dataset]]:
    """Yield the name and the dataset of each of a trainer's map-style datasets.

    Streamed datasets are left out: the collator checks their examples batch by batch.
    """
    for name, dataset in _named_datasets(train_dataset, eval_dataset):
        if isinstance(dataset, Dataset):
            yield name, dataset


def _named_datasets(train_dataset: Any, eval_dataset: Any) -> list[tuple[str, Any]]:
    """Return the name and the dataset of each of a trainer's datasets."""
    evaluated = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    return [("train", train_dataset), *evaluated.items()]


def first_rows(train_dataset: Any, eval_dataset: Any) -> dict[str, Any]:
    """Return the first row of each of a trainer's datasets, by name; raise a ValueError for one without rows.

    Rows of Hugging Face datasets are Python objects, whatever the format.
    """
    rows: dict[str, Any] = {}
    for name, dataset in _named_datasets(train_dataset, eval_dataset):
        if dataset is None:
            continue
        rows[name] = first_row(dataset, name)
    return rows


def first_row(dataset: Any, name: str) -> Any:
    """Return the first row of a dataset; raise a ValueError with its name if it has none."""
    plain = unformatted(dataset) if hasattr(dataset, "with_format") else dataset
    row = next(iter(plain), None)
    if row is None:
        raise ValueError(f"the {name} dataset is empty; give it at least one row")
    return row


def text_datasets(train_dataset: Any, eval_dataset: Any, problem: str) -> tuple[Any, Any]:
    """Return a trainer's datasets as `without_media` returns them."""
    train = without_media(train_dataset, "train", problem)
    if isinstance(eval_dataset, dict):
        return train, {name: without_media(dataset, name, problem) for name, dataset in eval_dataset.items()}
    return train, without_media(eval_dataset, "eval", problem)


def without_media(dataset: Any, name: str, problem: str) -> Any:
    """Return a dataset without the columns of images, video and audio that are empty in every row.

    Rows of a stream are checked as they come, and messages in the first row alone.

    Args:
        dataset: the dataset, or None.
        name: its name, for messages.
        problem: what rows with images cannot do, and the way out.

    Raises:
        ValueError: the dataset has no rows, or a row has images, video or audio.
    """
    if dataset is None:
        return None
    first = first_row(dataset, name)

    def check(row: Mapping[str, Any], index: int) -> dict[str, Any]:
        for column, value in row.items():
            if (column in _MEDIA and _has_value(value)) or _has_media_in_messages(value):
                raise ValueError(
                    f"example {index} of the {name} dataset has images, video or audio in its column {column!r}; such "
                    f"{problem}"
                )
        return {}

    check(first, 0)
    columns = [column for column in _MEDIA if column in first]
    if not columns or (isinstance(dataset, Dataset) and dataset.format["type"] == "custom"):  # of a transform
        return dataset
    if not isinstance(dataset, Dataset):
        return dataset.map(check, with_indices=True, remove_columns=columns)
    tables: Any = dataset.select_columns(columns).with_format("arrow").iter(batch_size=1_000)
    index = 0
    for table in tables:
        if any(column.null_count < len(column) for column in table.columns):
            for nth, row in enumerate(table.to_pylist()):
                check(row, index + nth)
        index += len(table)
    return dataset.remove_columns(columns)


def _has_value(value: Any) -> bool:
    """Return whether a column of images, video or audio has any in a row."""
    return value is not None and not (isinstance(value, (str, list)) and all(item is None for item in value))


def _has_media_in_messages(value: Any) -> bool:
    """Return whether a column of a row is a conversation with images, video or audio in its messages."""
    turns = [turn for turn in value if isinstance(turn, Mapping)] if isinstance(value, list) else []
    contents = [turn["content"] for turn in turns if isinstance(turn.get("content"), list)]
    kinds = [str(part.get("type")) for content in contents for part in content if isinstance(part, Mapping)]
    return any(media in kind for kind in kinds for media in ("image", "video", "audio"))


def refuse_too_few_rows(trainer: Any) -> None:
    """Raise a ValueError if `dataloader_drop_last` drops all rows of a dataset, which are fewer than a batch."""
    args = trainer.args
    if not args.dataloader_drop_last:
        return
    processes = args.world_size // getattr(trainer, "_copies", trainer.get_tp_size())
    for name, dataset in map_style_datasets(trainer.train_dataset, trainer.eval_dataset):
        task = "train" if dataset is trainer.train_dataset else "eval"
        batch = processes * getattr(args, f"{task}_batch_size")
        if len(dataset) < batch:
            raise ValueError(
                f"dataloader_drop_last=True drops every row of the {name} dataset: {len(dataset)} as prepared, but a "
                f"batch of all processes has {batch}; lower per_device_{task}_batch_size, or leave it out"
            )


def refuse_sampling_by_length(trainer: Any) -> None:
    """Raise a ValueError if transformers would not find the lengths of a trainer's examples, or mistake them."""
    strategy, column = trainer.args.train_sampling_strategy, trainer.args.length_column_name
    if strategy not in ("group_by_length", "batch_rebalance"):
        return
    for name, dataset in map_style_datasets(trainer.train_dataset, trainer.eval_dataset):
        if column not in dataset.column_names:
            raise ValueError(
                f"train_sampling_strategy={strategy!r} needs the column {column!r}, which the {name} dataset, as "
                "prepared, lacks; leave it out: rows are packed, so that no padding depends on which examples share one"
            )


def log_sharing(trainer: Any, mode: str, indices: Tensor, sequences: Tensor) -> None:
    """Add `shared_tokens_saved`, over all processes, and `mask_sparsity` to a TRL trainer's metrics.

    Args:
        trainer: the trainer.
        mode: "train" or "eval".
        indices: mask vectors of the packed rows, int32 [R, 1, S, 1], 0 for padding.
        sequences: mask [N, L] of the sequences that the rows stand for, 0 for padding.
    """
    counts: Any = torch.stack([(indices > 0).sum(), sequences.sum()])
    packed_tokens, sequence_tokens = trainer.accelerator.reduce(counts).tolist()
    trainer._metrics[mode]["shared_tokens_saved"].append(1 - packed_tokens / sequence_tokens)
    log_sparsity(trainer, mode, indices)


def log_sparsity(trainer: Any, mode: str, indices: Tensor, *, skipped: bool = True) -> None:
    """Add `mask_sparsity` to a TRL trainer's metrics.

    To compute it, the host waits for the device. So it is only done at logging steps and in evaluation.

    Args:
        trainer: the trainer.
        mode: "train" or "eval".
        indices: mask vectors of the batch, int32 [R, 1, S, 1].
        skipped: whether the model's attention skips hidden tiles; if not, the metric is 0.
    """
    if mode == "eval" or trainer.state.global_step % max(1, int(trainer.state.logging_steps)) == 0:
        sparsity = FlashMask(indices, causal=True).sparsity() if skipped else 0.0
        trainer._metrics[mode]["mask_sparsity"].append(sparsity)
