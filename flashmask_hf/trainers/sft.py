"""TRL's supervised fine-tuning trainer on rows that hold several documents each."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from flashmask_hf.backend.packed_rows import check_compiled, check_layers
from flashmask_hf.collators.language_modeling import (
    DataCollatorForPackedLanguageModeling,
    pack_dataset,
    packing_efficiency,
)
from flashmask_hf.names import FLASHMASK, VECTORS
from flashmask_hf.trainers.common import log_sparsity

__all__ = ["PackedSFTTrainer"]


class PackedSFTTrainer(SFTTrainer):
    """`trl.SFTTrainer` on packed rows: a row holds several documents, and each attends only to itself.

    TRL tokenizes the datasets, applies chat templates and builds labels, but truncates nothing. `pack_dataset` then
    packs the examples into rows of at most `args.max_length` tokens, and `DataCollatorForPackedLanguageModeling` adds
    the rows' labels, position ids and mask vectors. A dataset with a `seq_lengths` column is already packed and keeps
    its rows. With `args.packing` or `args.padding_free`, TRL packs and collates the rows instead.

    The model keeps its attention. "flashmask" reads the mask vectors; the implementations of transformers find the
    documents in the position ids. With "flashmask", the first step checks that every layer gets the mask.

    Logs add `tokens_per_second`, of all processes and without padding, and `mask_sparsity`, the fraction of tiles of
    the score matrix that are skipped (of one batch of this process, at logging steps and in evaluation).

    Args:
        model: as in `trl.SFTTrainer`.
        args: a `trl.SFTConfig`. `max_length` is the length of a row. `truncation_mode` says what to do with a longer
            example: TRL's "keep_start" and "keep_end" cut it, "error" or None raises.
        max_position_embeddings: the model's number of positions; a longer document raises. None skips the check.
        split: cut an example longer than a row into consecutive pieces, each a document of its own. Needs
            `truncation_mode` "error" or None.
        kwargs: the other arguments of `trl.SFTTrainer`. `data_collator` is replaced, unless TRL packs.

    Raises:
        TypeError: a tokenized column does not hold lists of integers.
        ValueError: `args.max_length` is None; or `pack_dataset` refuses a dataset or an example (the message names its
            index and the way out). In the first step: some layers do not get the mask, for example recurrent ones, and
            would mix documents.

    Example:
        ```python
        from datasets import load_dataset
        from flashmask_hf.trainers import PackedSFTTrainer
        from trl import SFTConfig

        args = SFTConfig(max_length=8192, model_init_kwargs={"attn_implementation": "flashmask"})
        dataset = load_dataset("trl-lib/Capybara", split="train")
        PackedSFTTrainer("Qwen/Qwen3-0.6B", args, train_dataset=dataset).train()
        ```
    """

    def __init__(
        self,
        model: Any,
        args: SFTConfig,
        *,
        max_position_embeddings: int | None = None,
        split: bool = False,
        **kwargs: Any,
    ):
        self._packing_options: dict[str, Any] = {
            "max_position_embeddings": max_position_embeddings,
            "split": split,
        }
        self._tokens_since_log: Any = 0
        self._last_log = time.perf_counter()
        if not _trl_packs(args):
            multiple = args.pad_to_multiple_of
            kwargs["data_collator"] = DataCollatorForPackedLanguageModeling(
                pad_to_multiple_of=multiple if isinstance(multiple, int) else None,
                max_position_embeddings=max_position_embeddings,
            )
        super().__init__(model=model, args=args, **kwargs)
        trained = self.accelerator.unwrap_model(self.model)
        if not _trl_packs(args) and trained.config.get_text_config()._attn_implementation == FLASHMASK:
            check_layers(trained)

    def _prepare_dataset(
        self,
        dataset: Dataset | IterableDataset,
        processing_class: Any,
        args: Any,
        packing: bool,
        formatting_func: Any,
        dataset_name: str,
    ) -> Dataset | IterableDataset:
        if _trl_packs(args):
            return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        untruncated = copy.copy(args)
        untruncated.max_length = None  # pack_dataset decides what happens to long examples
        tokenized = super()._prepare_dataset(
            dataset, processing_class, untruncated, False, formatting_func, dataset_name
        )
        if "seq_lengths" in next(iter(tokenized), {}):
            return tokenized  # packed already, as trainer.eval_dataset is
        with PartialState().main_process_first():  # the other processes read the result from the cache
            packed = pack_dataset(
                tokenized,
                args.max_length,
                truncation_mode=args.truncation_mode or "error",
                num_proc=args.dataset_num_proc,
                **self._packing_options,
            )
        if isinstance(tokenized, Dataset) and isinstance(packed, Dataset):
            PartialState().print(
                f"Packed {len(tokenized)} {dataset_name} examples into {len(packed)} rows of up to {args.max_length} "
                f"tokens; packing efficiency {packing_efficiency(packed, args.max_length):.1%}"
            )
        return packed

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute TRL's loss, and record the tokens and the mask sparsity of the batch."""
        tokens, mode = inputs["input_ids"].numel(), "train" if model.training else "eval"
        if VECTORS in inputs:
            indices = inputs[VECTORS]
            check_compiled(model, indices.device)
            tokens = (indices > 0).sum()  # padding has 0; stays on the device, so that the host does not wait
            log_sparsity(self, mode, indices)
        if mode == "train":
            self._tokens_since_log += tokens
        return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write TRL's log with the tokens per second since the last log."""
        if "loss" in logs:
            tokens: Any = torch.as_tensor(self._tokens_since_log, device=self.accelerator.device)
            tokens = self.accelerator.reduce(tokens)
            seconds = time.perf_counter() - self._last_log
            logs["tokens_per_second"] = round(tokens.item() / seconds, 1)
            self._tokens_since_log, self._last_log = 0, time.perf_counter()
        super().log(logs, start_time)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see `Trainer.train`."""
        self._tokens_since_log, self._last_log = 0, time.perf_counter()
        return super().train(*args, **kwargs)


def _trl_packs(args: SFTConfig) -> bool:
    """Return whether TRL itself packs and collates the rows."""
    return args.packing or args.padding_free
