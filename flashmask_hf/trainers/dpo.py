"""TRL's DPO trainer on packed rows in which every question is computed once."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from datasets.fingerprint import Hasher
from numpy.typing import NDArray
from transformers import PreTrainedModel
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.utils import global_then_local_main_first

from flashmask_hf.collators.preference import DataCollatorForSharedQuestion
from flashmask_hf.packed_backbone import check_compiled, run_packed
from flashmask_hf.trainers.formats import preference_columns
from flashmask_hf.trainers.sharing import limit_positions, log_sparsity, named_datasets, output_dir, prepare

__all__ = ["SharedQuestionDPOConfig", "SharedQuestionDPOTrainer"]

logger = logging.getLogger(__name__)


@dataclass
class SharedQuestionDPOConfig(DPOConfig):
    """Arguments of `SharedQuestionDPOTrainer`: those of `trl.DPOConfig`, and these.

    Args:
        truncation_mode: TRL's "keep_start" and "keep_end", or "error": an example over `max_length` raises.
        row_length: None puts each batch into one packed row. A number makes rows of that many tokens.
    """

    truncation_mode: str = field(
        default="keep_start",
        metadata={
            "help": "What to do with a question and answer of more than `max_length` tokens: 'keep_start' cuts the "
            "answer's end, 'keep_end' the question's start, 'error' raises.",
            "choices": ["keep_start", "keep_end", "error"],
        },
    )
    row_length: int | None = field(
        default=None,
        metadata={
            "help": "Number of tokens of a packed row. If `None`, a batch is one row. A question and its answers stay "
            "in one row."
        },
    )


class SharedQuestionDPOTrainer(DPOTrainer):
    """`trl.DPOTrainer` that computes each question once, for both of its answers, in policy and reference alike.

    Arguments, losses, metrics and options are TRL's, and so are the results, up to the rounding of sums in another
    order: the backbone runs a packed row, and its hidden states go to TRL's head and losses in TRL's own layout. Logs
    add `shared_tokens_saved`, the share of tokens that sharing saved, and `mask_sparsity`, the share of tiles of the
    score matrix that are skipped.

    The data may be in any of TRL's preference formats, in that of `HuggingFaceH4/ultrafeedback_binarized` (see
    `preference_columns`), or tokenized (`prompt_ids`, `chosen_ids`, `rejected_ids`). Where it differs from TRL:

    - The model's attention is "flashmask": set if the model is given by name, checked if not.
    - An empty question or answer, a missing column, and a question and answer that exceed the model's positions raise
      before the first step.
    - `truncation_mode="keep_end"` cuts a question alike for both answers; "error" raises for what is too long. How many
      examples "keep_start" cuts is logged.
    - `pad_to_multiple_of` is that of the packed row.
    - NEFTune, dispatched batches, prompt learning, activated LoRA, and FSDP2's RAM-efficient loading of a reference
      model raise.

    Args:
        model: as in `trl.DPOTrainer`.
        ref_model: as there.
        args: a `SharedQuestionDPOConfig`, or a `trl.DPOConfig`, which leaves the rest at its defaults.
        data_collator: None, or a `DataCollatorForSharedQuestion`, which then decides on lengths, as in TRL.
        train_dataset: as there.
        eval_dataset: as there.
        processing_class: as there; a tokenizer.
        peft_config: as there.
        kwargs: the other arguments of `trl.DPOTrainer`.

    Raises:
        TypeError: `data_collator` is of another kind.
        ValueError: the model's attention is not "flashmask", or does not take packed rows; an option is one of those
            above; the data has images; or an example does not serve (the message names its index and the way out).
    """

    _name = "Shared-question DPO"

    def __init__(
        self,
        model: Any,
        ref_model: PreTrainedModel | None = None,
        args: DPOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        peft_config: Any = None,
        **kwargs: Any,
    ):
        if args is None:
            args = SharedQuestionDPOConfig(output_dir(model, "DPO"))
        prepare(model, args, peft_config)
        if data_collator is None:
            settings: Any = args  # TRL has made a number of pad_to_multiple_of, or None
            data_collator = DataCollatorForSharedQuestion(
                max_length=args.max_length,
                truncation_mode=args.truncation_mode,
                row_length=getattr(args, "row_length", None),
                pad_to_multiple_of=settings.pad_to_multiple_of,
            )
        elif not isinstance(data_collator, DataCollatorForSharedQuestion):
            raise TypeError(
                f"data_collator must be a DataCollatorForSharedQuestion, got {type(data_collator).__name__}; leave it "
                "out, or use trl.DPOTrainer"
            )
        if {"image", "images"} & set(next(iter(train_dataset or ()), ())):
            raise ValueError("rows with images cannot share a question yet; use trl.DPOTrainer, or remove the column")
        self._sharing = False
        self._makes_reference = ref_model is None
        super().__init__(
            model=model,
            ref_model=ref_model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            peft_config=peft_config,
            **kwargs,
        )
        self._share_questions()

    def _share_questions(self) -> None:
        """Once the models are there: hook them, and check what only they tell."""
        if self._sharing:
            return
        self._sharing = True
        if self.ref_model is not None and self.is_fsdp_enabled:
            _refuse_empty_reference(self.accelerator.state.fsdp_plugin)
        run_packed(self.accelerator.unwrap_model(self.model))
        if self.ref_model is not None:
            reference: Any = self.accelerator.unwrap_model(self.ref_model)
            if self._makes_reference:  # until TRL 1.15 without the policy's attention
                reference.set_attn_implementation("flashmask")
            run_packed(reference)
        self.data_collator = limit_positions(self.data_collator, self.model)
        for name, dataset in named_datasets(self):
            self._check_lengths(dataset, name)

    def _check_lengths(self, dataset: Any, name: str) -> None:
        """Raise for examples that the collator or the model would refuse, and log how many will be cut."""
        if not isinstance(dataset, Dataset):
            return  # a stream's are seen as they come
        collator: Any = self.data_collator
        question, chosen, rejected = _column_lengths(dataset, ("prompt_ids", "chosen_ids", "rejected_ids"))
        limit, mode, row = collator.max_length, collator.truncation_mode, collator.row_length

        def refuse(bad: NDArray[np.bool_], problem: str) -> None:
            if bad.any():
                raise ValueError(f"{name} example {int(bad.argmax())}, as prepared, {problem}")

        refuse(np.minimum.reduce([question, chosen, rejected]) < 0, "lacks a column; remove it from the dataset")
        refuse(question < 1, "has an empty question: nothing would predict its answers' first tokens; remove it")
        refuse(np.minimum(chosen, rejected) < 1, "has an answer that adds no token to its question; remove it")
        longest = question + np.maximum(chosen, rejected)
        if limit is not None and (longest > limit).any():
            over = np.maximum(longest - limit, 0)
            if mode == "error":
                refuse(over > 0, f"has more than max_length={limit} tokens with an answer; raise it, or choose "
                                 "truncation_mode='keep_start' or 'keep_end'")  # fmt: skip
            logger.warning(
                "%d of %d %s examples have more than max_length=%d tokens with their longest answer, the first is "
                "example %d: truncation_mode=%r cuts them.",
                np.count_nonzero(over), len(over), name, limit, int((over > 0).argmax()), mode,
            )  # fmt: skip
            if mode == "keep_start":
                refuse(question >= limit, f"has a question that fills max_length={limit}; raise it, or remove it")
                chosen, rejected = (np.minimum(answer, limit - question) for answer in (chosen, rejected))
            else:
                refuse(over >= question, f"has an answer that fills max_length={limit}; raise it, or remove it")
                question = question - over
            longest = np.minimum(longest, limit)
        positions = collator.max_position_embeddings
        if positions is not None:
            refuse(longest > positions, f"is deeper than the model's {positions} positions (max_position_embeddings) "
                                        "with an answer; set max_length to fit, or take another model")  # fmt: skip
        if row is not None:
            refuse(question + chosen + rejected > row, f"has more than row_length={row} tokens; make rows longer, set "
                                                       "max_length, or remove it")  # fmt: skip

    def _prepare_dataset(
        self, dataset: Dataset | IterableDataset, processing_class: Any, args: Any, dataset_name: str
    ) -> Dataset | IterableDataset:
        first = next(iter(dataset), None)
        if first is None:
            raise ValueError(f"the {dataset_name} dataset is empty")
        if {"prompt_ids", "chosen_ids", "rejected_ids"} <= set(first):
            if self._sharing:  # given to `evaluate`
                self._check_lengths(dataset, dataset_name)
            return dataset
        options: dict[str, Any] = {"with_indices": True}
        columns = [name for name in first if name not in ("tools", "chat_template_kwargs")]
        if isinstance(dataset, Dataset):
            options |= {"num_proc": args.dataset_num_proc, "desc": f"Reading {dataset_name} dataset"}
        with global_then_local_main_first():
            dataset = dataset.map(preference_columns, remove_columns=columns, **options)
        prepared = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        if isinstance(dataset, Dataset) and isinstance(prepared, Dataset) and len(prepared) < len(dataset):
            logger.warning(
                "Dropped %d of %d %s examples, whose question alone fills max_length=%d.",
                len(dataset) - len(prepared), len(dataset), dataset_name, args.max_length,
            )  # fmt: skip
            if not len(prepared):
                raise ValueError(
                    f"every question of the {dataset_name} dataset fills max_length {args.max_length}; raise it"
                )
        if self._sharing:
            self._check_lengths(prepared, dataset_name)
        return prepared

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        self._share_questions()  # TRL comes here from its own __init__
        if isinstance(dataset, Dataset):  # whose fingerprint names TRL's cache file; these options change the values
            collator: Any = self.data_collator
            options = (collator.max_length, collator.truncation_mode, self.ld_alpha)
            dataset = copy.copy(dataset)
            dataset._fingerprint = Hasher.hash((dataset._fingerprint, options))
        return super()._precompute_ref_logps(dataset, name, batch_size)

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """TRL's log-probabilities of the reference, of one batch."""
        check_compiled(model, inputs["startend_row_indices"].device)
        return super().compute_ref_log_probs(model, inputs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        for part in (model, self.ref_model):
            if part is not None:
                check_compiled(part, inputs["startend_row_indices"].device)
        self._log_sharing(inputs, "train" if model.training else "eval")
        return super()._compute_loss(model, inputs, return_outputs)

    def _log_sharing(self, inputs: dict[str, Any], mode: str) -> None:
        indices = inputs["startend_row_indices"]
        counts: Any = torch.stack([(indices > 0).sum(), inputs["attention_mask"].sum()])  # padding has 0 in both
        sums: Any = self.accelerator.reduce(counts)
        tokens, unshared = sums.tolist()
        self._metrics[mode]["shared_tokens_saved"].append(1 - tokens / unshared)
        log_sparsity(self, mode, indices)


def _refuse_empty_reference(plugin: Any) -> None:
    """Raise where TRL 1.16 would leave the reference model's weights unread on every process but the first."""
    if plugin.fsdp_version == 2 and plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "fsdp_cpu_ram_efficient_loading leaves a reference model empty on all processes but the first: TRL shards "
            "it with FSDP2 without sending the weights; set it to false in accelerate's configuration, or train an "
            "adapter, which needs no reference model"
        )


def _column_lengths(dataset: Dataset, columns: tuple[str, ...]) -> list[NDArray[np.int64]]:
    """Lengths of the lists in some columns, int64 [rows] each, -1 for none, read batch by batch."""
    tables: Any = dataset.select_columns(list(columns)).with_format("arrow").iter(batch_size=10_000)
    parts = [
        [table[column].combine_chunks().value_lengths().fill_null(-1).to_numpy() for column in columns]
        for table in tables
    ]
    return [np.concatenate(part).astype(np.int64) for part in zip(*parts, strict=True)]
