"""TRL's supervised fine-tuning trainer on packed rows."""

from __future__ import annotations

import copy
import functools
import time
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from torch import Tensor
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer
from trl.trainer.utils import global_then_local_main_first

from flashmask_hf.collators.dataset import first_row, pack_dataset, unformatted, warn_of_weights
from flashmask_hf.collators.labels import MASK_COLUMNS, WEIGHT
from flashmask_hf.collators.language_modeling import DataCollatorForPackedLanguageModeling
from flashmask_hf.hf.packed.rows import check_compiled, check_layers, drop_padding_from_router_logits
from flashmask_hf.names import EXAMPLE_TOKENS, FLASHMASK, LABEL_WEIGHTS, VECTORS
from flashmask_hf.trainers.callbacks import add_callbacks
from flashmask_hf.trainers.context_parallel import ContextParallelMixin, check_context_parallel, pad_for_parts
from flashmask_hf.trainers.data_checks import check_prepared, each_dataset, without_media
from flashmask_hf.trainers.even_batches import EvenBatchesMixin
from flashmask_hf.trainers.image_rows import EXAMPLES
from flashmask_hf.trainers.loading import config_of, correct_gathers, flashmask_policy
from flashmask_hf.trainers.metrics import log_sparsity
from flashmask_hf.trainers.option_checks import checked_collator, prepared_arguments
from flashmask_hf.trainers.resume import ResumeMixin
from flashmask_hf.trainers.sft_data import check_columns, check_completions, check_sharing, packing_report
from flashmask_hf.trainers.sft_images import ImagesMixin, check_image_options, packs_images
from flashmask_hf.trainers.weighing import WeighingMixin, check_weighing, label_count, without_labels


class PackedSFTTrainer(ImagesMixin, ResumeMixin, EvenBatchesMixin, ContextParallelMixin, WeighingMixin, SFTTrainer):
    """`trl.SFTTrainer` on packed rows, in which each document attends only to itself.

    > Rows

    TRL tokenizes datasets, and `pack_dataset` packs examples into rows of at most `args.max_length` tokens; a dataset
    with a `seq_lengths` column keeps its rows. With `args.packing` or `args.padding_free`, TRL packs instead. Each rank
    reads its own shards of a stream if they divide evenly, otherwise every n-th row; an epoch ends with the rank with
    the fewest rows. accelerate's context parallelism (`cp_size`, with FSDP2) splits rows over ranks
    (`flashmask_hf.parallel`), by default padded to a multiple of 128 * cp_size.

    > Images

    A dataset with a column `images` or `image` is packed into rows of raw examples, which workers process as rows are
    read. Images are never cut: a longer example raises. With `skip_prepare_dataset` in `args.dataset_kwargs`, a row is
    a batch of examples. On several ranks, calls without images run the image tower on a blank image.

    > Weights

    With a column `weight`, a number or one per token, the loss is sum(w * nll) / sum(abs(w)) over an optimizer step on
    all ranks. Entropy and accuracy count a token abs(w) times; the auxiliary loss of experts has no weights. A weight
    beside images raises.

    > Logs

    - `num_tokens`, `tokens_per_second`: of the examples of all ranks, without padding.
    - `keys_per_token`: mean number of a computed token's visible keys, before any sliding window.
    - `shared_tokens_saved`: fraction of the examples' tokens that shared prefixes save.
    - `mask_sparsity`: fraction of skipped tiles in one batch of this rank, at logging steps and in evaluation.
    - `eval_loss`, `eval_entropy`, `eval_mean_token_accuracy`: exact means over learned tokens of all ranks.

    Args:
        model: as in `trl.SFTTrainer`, like all arguments not listed. Loaded by name, it gets "flashmask", unless
            `args.model_init_kwargs` names another attention; an object keeps its own, with a warning if that skips no
            hidden tiles.
        args: a `trl.SFTConfig`, or None for its defaults. `truncation_mode` decides about examples longer than
            `max_length`: "keep_start" (TRL's default) and "keep_end" cut, "error" and None raise.
        data_collator: None, a `DataCollatorForPackedLanguageModeling`, or, with images, a
            `DataCollatorForPackedVisionLanguageModeling`; any collator if TRL packs.
        max_position_embeddings: number of positions; a longer document raises. None uses the model's number.
        max_image_tokens: maximum number of image tokens per row; None is `max_length`.
        split: cut an example longer than a row into consecutive documents. Needs `truncation_mode` "error" or None.
        row_length: maximum number of tokens per row, at least `max_length`; None is `max_length`.
        share_prefixes: compute common prefixes of a row's examples once, as `pack_dataset` does. Loss, gradients and
            metrics stay the same as unpacked; dropout draws once per shared token.
        loss_mean: "token", as in TRL, or "example", by which every example counts the same.

    Raises:
        TypeError: `args`, `data_collator` or a tokenized column has the wrong type.
        ValueError: for `max_length=None`, `packing_strategy="wrapped"`, `neftune_noise_alpha`, dispatched batches,
            sampling by length, prompt learning, activated LoRA, or `label_smoothing_factor` that the loss ignores; a
            dataset that is empty, or has video, audio, images for a text model, fewer rows than a batch with
            `dataloader_drop_last`, or text that TRL would not read; an example that does not fit a row; `cp_size` with
            images, TRL's packing, another attention, recurrent layers or smoothed labels; `share_prefixes` with images,
            TRL's packing, `split` or another loss than TRL's plain one; `max_image_tokens` without rows of images that
            it packs. In the first step, for layers that do not receive the mask, and prefixes shared by recurrent
            layers, compiled windows or an auxiliary loss of experts. In a worker, for a row with images that is longer
            than computed.

    Example:
        ```python
        from datasets import load_dataset
        from flashmask_hf.trainers import PackedSFTTrainer
        from trl import SFTConfig

        args = SFTConfig(max_length=8192)
        dataset = load_dataset("trl-lib/Capybara", split="train")
        PackedSFTTrainer("Qwen/Qwen3-0.6B", args, train_dataset=dataset).train()
        ```
    """

    def __init__(
        self,
        model: Any,
        args: SFTConfig | None = None,
        data_collator: Any = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        peft_config: Any = None,
        max_position_embeddings: int | None = None,
        max_image_tokens: int | None = None,
        split: bool = False,
        row_length: int | None = None,
        share_prefixes: bool = False,
        loss_mean: str = "token",
        **kwargs: Any,
    ):
        compute_loss_func = kwargs.get("compute_loss_func")
        args = prepared_arguments(args, model, peft_config, SFTConfig, SFTConfig, compute_loss_func)
        self._sums: Any = 0  # computed tokens, keys, examples' tokens since the last log, int64 [3] after a batch
        self._shares = False  # whether some batch shares prefixes
        self._last_log = time.perf_counter()
        self._logged_tokens = 0
        trl_packs = _trl_packs(args)
        parts = check_context_parallel(args, kwargs, trl_packs=trl_packs)
        if args.packing and args.packing_strategy == "wrapped":
            raise ValueError("packing_strategy='wrapped' does not record where documents begin; choose 'bfd'")
        config = config_of(model, args)
        self._packs_images = packs_images(train_dataset, config)
        as_text = functools.partial(without_media, images=self._packs_images)
        datasets = each_dataset(as_text, train_dataset, eval_dataset)
        given_collator = data_collator
        self._reads_weights = share_prefixes or loss_mean == "example"
        packs_text = _prepares_rows(args) and not (self._packs_images or trl_packs)
        own = {"row_length": row_length, "loss_mean": loss_mean, "share_prefixes": share_prefixes}
        defaults = {"row_length": None, "loss_mean": "token", "share_prefixes": False}
        changed = [name for name, default in defaults.items() if own[name] != default]
        if changed and not packs_text:
            way = "leave it, images, TRL's packing or skip_prepare_dataset out"
            raise ValueError(f"{changed[0]} needs rows of text that this trainer packs; {way}")
        if max_image_tokens is not None and not (self._packs_images and _prepares_rows(args)):
            way = "leave it or skip_prepare_dataset out"
            raise ValueError(f"max_image_tokens needs rows with images that this trainer packs; {way}")
        if self._reads_weights:
            check_weighing(args, compute_loss_func)
        if args.max_length is None and not trl_packs:
            raise ValueError("max_length is None, but packing needs it; set it to the number of tokens per row")
        if not trl_packs and max_position_embeddings is None:
            max_position_embeddings = getattr(config.get_text_config(), "max_position_embeddings", None)
        if self._packs_images:
            check_image_options(datasets, parts=parts, split=split, formatting_func=kwargs.get("formatting_func"))
            data_collator = None  # TRL's, for one example
        elif not trl_packs:
            collator = checked_collator(
                data_collator,
                DataCollatorForPackedLanguageModeling,
                pad_to_multiple_of=args.pad_to_multiple_of,
                max_position_embeddings=max_position_embeddings,
                completion_only_loss=None if _prepares_rows(args) else args.completion_only_loss,  # else packing labels
            )
            data_collator = pad_for_parts(collator, parts)
        self.row_length = row_length or args.max_length
        self._packing_options = own | {"max_position_embeddings": max_position_embeddings, "split": split}
        with flashmask_policy(model, args):
            super().__init__(model, args, data_collator, *datasets, processing_class, peft_config=peft_config, **kwargs)
        trained = self.accelerator.unwrap_model(self.model)
        correct_gathers(trained)
        add_callbacks(self, model)
        self._skips_tiles = trained.config.get_text_config()._attn_implementation == FLASHMASK
        if not trl_packs:
            # Trainer counts no labels for some classes (Qwen-VL, Gemma 4): TRL would average over batches and shards.
            self.model_accepts_loss_kwargs = True
            drop_padding_from_router_logits(trained)
            if self._skips_tiles:
                check_layers(trained)
        self._start_context_parallel(parts)
        if self._packs_images:
            self._start_images(given_collator, max_position_embeddings, max_image_tokens)
        check_prepared(self, by_length=_prepares_rows(args) and not trl_packs)
        if self._reads_weights:
            self._start_weighing()

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Dataset | IterableDataset:
        if self._packs_images:
            return self._pack_examples(dataset, dataset_name)
        dataset = without_media(unformatted(dataset), dataset_name)
        first = first_row(dataset, f"the {dataset_name} dataset")
        if dataset_name == "train" and "seq_lengths" not in first and (packing or not _trl_packs(args)):
            own = {name: self._packing_options[name] for name in ("split", "share_prefixes")}
            own |= {"max_length": args.max_length, "row_length": self.row_length}
            self._packed_by = {"packing": args.packing, **own}
        if "input_ids" not in first:
            check_columns(dataset, first, args.dataset_text_field, formatting_func is not None, dataset_name)
        if _trl_packs(args):
            warn_of_weights(first, f"the {dataset_name} dataset")  # otherwise pack_dataset warns
            if "seq_lengths" in first:
                return dataset  # packed already; TRL would join its rows' documents
            return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        # A row packed elsewhere may have no weight before others have.
        weighs = first.get(WEIGHT) is not None or (WEIGHT in first and "seq_lengths" in first)
        self._reads_weights |= weighs or LABEL_WEIGHTS in first
        if "seq_lengths" in first and self._packing_options["loss_mean"] == "example":
            raise ValueError(f"loss_mean='example' is too late for packed {dataset_name} rows; pass it to pack_dataset")
        if args.completion_only_loss and not args.assistant_only_loss and formatting_func is None:
            check_completions(first, dataset_name)
        untruncated = copy.copy(args)
        untruncated.max_length = None  # pack_dataset handles long examples
        tokenized = super()._prepare_dataset(
            dataset, processing_class, untruncated, False, formatting_func, dataset_name
        )
        if "seq_lengths" in first:
            return tokenized  # packed already
        with global_then_local_main_first():  # others read the cache
            packed = pack_dataset(
                tokenized,
                args.max_length,
                truncation_mode=args.truncation_mode or "error",
                num_proc=args.dataset_num_proc,
                **self._packing_options,
            )
        if isinstance(tokenized, Dataset) and isinstance(packed, Dataset):
            PartialState().print(packing_report(args, len(tokenized), packed, dataset_name, self.row_length))
        return packed

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        names: Any = ()
        if self._packs_images:
            names = EXAMPLES, self.args.dataset_text_field, WEIGHT  # the collator raises for a weight
        elif not _trl_packs(self.args):  # of rows packed elsewhere
            names = "position_ids", *MASK_COLUMNS, WEIGHT, LABEL_WEIGHTS, "example_lengths"
        self._signature_columns += [name for name in names if name not in self._signature_columns]

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Run Trainer's `predict` on raw or tokenized rows; results are of the packed rows."""
        config = self.args
        if not self._skip_prepare_dataset:
            packing = config.packing if config.eval_packing is None else config.eval_packing
            options = config, packing, self._formatting_func
            test_dataset = self._prepare_dataset(test_dataset, self.processing_class, *options, "test")
        return super().predict(test_dataset, *args, **kwargs)

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        # Trainer counts every pad token as padding, even a document's eos token.
        if VECTORS in inputs:
            inputs = inputs | {"attention_mask": inputs[VECTORS][:, 0, :, 0] > 0}
        super()._track_num_input_tokens(inputs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute TRL's loss, and record the batch's tokens, visible keys and mask sparsity."""
        self._record_batch(model, inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _record_batch(self, model: Any, inputs: dict[str, Any]) -> None:
        """Record a batch's tokens, visible keys and mask sparsity, and check a compiled model."""
        mode = "train" if model.training else "eval"
        examples = inputs.pop(EXAMPLE_TOKENS, None)
        if examples is not None and not self._shares:
            check_sharing(self)
            self._shares = mode == "train"
        if VECTORS in inputs:
            indices = inputs[VECTORS]
            check_compiled(model, indices.device)
            log_sparsity(self, mode, indices, skipped=self._skips_tiles)
            if mode == "train" and self._counts_rows:
                counts = _tokens_and_keys(indices) // self._rows_per_token  # the host does not wait
                self._sums += torch.cat([counts, counts[:1] if examples is None else examples.sum()[None]])
        elif mode == "train" and self._counts_rows:
            tokens = inputs["input_ids"].numel()
            self._sums += torch.tensor([tokens, 0, tokens], device=inputs["input_ids"].device)

    def _idle_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        return without_labels(batch)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Run Trainer's `prediction_step`, and record the batch's loss and learned tokens."""
        step = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if step[0] is not None and inputs.get("labels") is not None:
            self._record(step[0], *self._label_counts(inputs))
        return step

    def _label_counts(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the divisors of a batch's loss and of its entropy and accuracy, float32 []."""
        return label_count(inputs), label_count(inputs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write TRL's log with `num_tokens`, and `tokens_per_second` and `keys_per_token` since the last log."""
        if "loss" in logs:
            computed, keys, tokens = self._reduced_sums()
            seconds = time.perf_counter() - self._last_log
            logs["tokens_per_second"] = round(tokens / seconds, 1)
            if keys:
                logs["keys_per_token"] = round(keys / computed, 1)
            if self._shares:
                logs["shared_tokens_saved"] = 1 - computed / tokens
            self._logged_tokens += tokens
            self._total_train_tokens = self._logged_tokens  # TRL counts padding, too
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
            self._sums, self._last_log = 0, time.perf_counter()
        counted = self._metrics["train" if self.model.training else "eval"]
        of_all_ranks = any(name.endswith("_runtime") and name.startswith(("train", "eval")) for name in logs)
        if of_all_ranks and counted.get("num_tokens"):
            counted["num_tokens"] = [self._count_tokens()]
        super().log(logs, start_time)

    def _reduced_sums(self) -> list[int]:
        """Return the computed tokens, their visible keys, and the examples' tokens of all ranks since the last log."""
        sums = torch.as_tensor(self._sums, device=self.accelerator.device).expand(3)
        return self.accelerator.reduce(sums.contiguous()).tolist()

    def _count_tokens(self) -> int:
        return int(self._logged_tokens + self._reduced_sums()[2])

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        self._logged_tokens = self._total_train_tokens

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see `Trainer.train`."""
        self._sums, self._last_log, self._logged_tokens = 0, time.perf_counter(), self._total_train_tokens
        return super().train(*args, **kwargs)


def _trl_packs(args: SFTConfig) -> bool:
    """Return whether TRL packs and collates rows."""
    return args.packing or args.padding_free


def _prepares_rows(args: Any) -> bool:
    """Return whether the trainer tokenizes and packs datasets."""
    return not (args.dataset_kwargs or {}).get("skip_prepare_dataset")


def _tokens_and_keys(indices: Tensor) -> Tensor:
    """Count the tokens of packed rows and their visible keys, int64 [2].

    Mask indices are int32 [R, 1, S, 1 or 4]: first the row where those that see a token end, 0 for padding; last of 4
    where they start.
    """
    ends = indices[..., 0].flatten(1)
    rows = torch.arange(ends.shape[1], device=ends.device) if indices.shape[-1] == 1 else indices[..., 3].flatten(1)
    return torch.stack([(ends > 0).sum(), (ends - rows).clamp(min=0).sum()])
