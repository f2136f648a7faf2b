"""TRL's reward trainer on packed rows with shared questions."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from torch import Tensor
from transformers import ProcessorMixin
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer

from flashmask_hf.collators.reward import PADDING, DataCollatorForMultiAnswerReward
from flashmask_hf.hf.models import unwrap_peft
from flashmask_hf.hf.packed.rows import check_compiled
from flashmask_hf.names import PACKED_IDS, PACKED_INDEX, VECTORS
from flashmask_hf.trainers import data_checks
from flashmask_hf.trainers.callbacks import add_callbacks
from flashmask_hf.trainers.context_parallel import context_parallel_size, pad_for_parts
from flashmask_hf.trainers.even_batches import EvenBatchesMixin
from flashmask_hf.trainers.loading import flashmask_policy, run_packed_models
from flashmask_hf.trainers.metrics import log_sparsity
from flashmask_hf.trainers.option_checks import checked_collator, prepared_arguments
from flashmask_hf.trainers.resume import ResumeMixin
from flashmask_hf.trainers.reward_data import prepare_rows
from flashmask_hf.trainers.reward_losses import LOSSES, pair_mean
from flashmask_hf.trainers.split_answers import SplitAnswersMixin

logger = get_logger(__name__)

_NO_IMAGES = "for TRL has no reward trainer of images"


@dataclass
class MultiAnswerRewardConfig(RewardConfig):
    """Arguments of `MultiAnswerRewardTrainer`: `trl.RewardConfig` with the following.

    Args:
        loss_type: "pairwise" (`pairwise_loss`) or "listwise" (`plackett_luce_loss`), means over questions; equal with
            two answers.
        score_margin: a pair's margin is `score_margin` times the difference of its scores; 0 for no margins.
        row_length: number of tokens per row; None packs each batch into one row.
    """

    loss_type: Literal["pairwise", "listwise"] = field(
        default="pairwise",
        metadata={"help": "Mean Bradley-Terry loss of pairs of answers (pairwise), or Plackett-Luce loss (listwise)."},
    )
    score_margin: float = field(
        default=0.0,
        metadata={"help": "A pair's margin is `score_margin` times the difference of its scores. 0 for no margins."},
    )
    row_length: int | None = field(default=None, metadata={"help": "Tokens per packed row; None packs a batch in one."})

    def __post_init__(self):
        super().__post_init__()
        if self.loss_type not in list(LOSSES):  # a list, as DPO takes, cannot be looked up in a dict
            raise ValueError(f"loss_type must be one of {', '.join(LOSSES)}, got {self.loss_type!r}")


class MultiAnswerRewardTrainer(ResumeMixin, EvenBatchesMixin, SplitAnswersMixin, RewardTrainer):
    """`trl.RewardTrainer` for two or more answers to a question, which is computed once for all of them.

    With two answers, losses, gradients and metrics equal TRL's up to rounding. A model loaded by name gets the
    attention "flashmask". accelerate's context parallelism (`cp_size`, with FSDP2) splits packed rows over ranks.

    Rows of the dataset have one of these formats:

    - `answers`, a list of strings or of lists of messages, with `scores` (higher is better) or ranked, best first. The
      `prompt` is a column, a string or messages, or the answers' common prefix.
    - `chosen` and `rejected`, in any of TRL's preference formats, with an optional `margin`. With `score_margin`,
      `score_chosen` and `score_rejected` make the margin.
    - Tokenized rows, in the formats of `DataCollatorForMultiAnswerReward`.

    As in TRL, rows with an answer that exceeds `args.max_length` tokens with its question are dropped.

    The loss is the mean over questions of `args.loss_type`; ties do not count. `center_rewards_coefficient` adds the
    coefficient times the mean over pairs of (r_i + r_j)^2. In evaluation, predictions are the rewards and labels the
    scores, [questions, answers], padded with -100.

    Logs are TRL's: `accuracy` and `margin` are means over questions of means over pairs, and `num_tokens` counts a
    question once per answer. Logs add, over all ranks and batches, `accuracy_of_<N>_answers` and `shared_tokens_saved`,
    the fraction of `num_tokens` not computed; and `mask_sparsity`, the fraction of skipped tiles in this rank's batch.

    Args:
        model: as in `trl.RewardTrainer`, like all arguments not listed.
        args: a `MultiAnswerRewardConfig`, or a `trl.RewardConfig`, with defaults for the options that it lacks.
        data_collator: None, or a `DataCollatorForMultiAnswerReward`.

    Raises:
        TypeError: `args`, `data_collator` or a row has an unsupported type, or types that cannot be combined.
        ValueError: for another attention, `neftune_noise_alpha`, `label_smoothing_factor`, dispatched batches, prompt
            learning, activated LoRA, adapters of another task or that do not save the head, sampling by missing
            lengths, counts of `input_ids` (`include_num_input_tokens_seen`), `cp_size` with Liger or rotary positions
            by length, a processor, arguments that contradict each other, or a dataset that has images, a transform, an
            invalid row or no row left.

    Example:
        ```python
        from datasets import load_dataset
        from flashmask_hf.trainers import MultiAnswerRewardConfig, MultiAnswerRewardTrainer

        args = MultiAnswerRewardConfig(max_length=2048)
        dataset = load_dataset("HuggingFaceH4/ultrafeedback_binarized", split="train_prefs")
        MultiAnswerRewardTrainer("Qwen/Qwen3-0.6B", args=args, train_dataset=dataset).train()
        ```
    """

    _name = "Multi-answer reward"

    def __init__(
        self,
        model: Any,
        args: RewardConfig | None = None,
        data_collator: DataCollatorForMultiAnswerReward | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        peft_config: Any = None,
        **kwargs: Any,
    ):
        args = prepared_arguments(args, model, peft_config, RewardConfig, MultiAnswerRewardConfig)
        if isinstance(processing_class, ProcessorMixin):
            raise ValueError(f"processing_class must be a tokenizer, {_NO_IMAGES}; pass processing_class.tokenizer")
        as_text = functools.partial(data_checks.without_media, way=f"remove the column, {_NO_IMAGES}")
        datasets = data_checks.each_dataset(as_text, train_dataset, eval_dataset)
        if getattr(peft_config, "task_type", None) == "CAUSAL_LM":
            raise ValueError("peft_config: task_type='CAUSAL_LM' does not save a reward model's head; use 'SEQ_CLS'")
        if args.include_num_input_tokens_seen != "no" or "inputs" in args.include_for_metrics:
            raise ValueError(
                "include_num_input_tokens_seen and include_for_metrics=['inputs'] read input_ids, which has only the "
                "last token of each answer; leave them out (num_tokens in the log counts all tokens)"
            )
        if args.use_liger_kernel:
            _keep_forward(args)
        # A RewardConfig lacks our options; their defaults are class attributes.
        ours: Any = args if isinstance(args, MultiAnswerRewardConfig) else MultiAnswerRewardConfig
        self.loss_type: str = ours.loss_type
        collator = _collator(data_collator, ours.row_length, ours.score_margin, args.pad_to_multiple_of)
        self.score_margin = collator.score_margin
        parts = context_parallel_size(args)
        collator = pad_for_parts(collator, parts)
        self._counts = {mode: np.zeros(2) for mode in ("train", "eval")}  # computed and unshared tokens since a log
        with flashmask_policy(model, args):
            super().__init__(model, args, collator, *datasets, processing_class, peft_config=peft_config, **kwargs)
        _refuse_unsaved_head(self.model)
        run_packed_models(self)
        self._start_context_parallel(parts)
        add_callbacks(self, model)
        data_checks.check_prepared(self)
        self.label_names = ["scores"]
        pad_token_id = self.model.config.get_text_config().pad_token_id
        if pad_token_id == getattr(self.processing_class, "eos_token_id", None):
            logger.warning(
                "pad_token is eos_token: rewards are trained at the end-of-sequence token, but the saved model's "
                "forward reads them at the last token that is not padding. Give the tokenizer another pad_token."
            )
        data_checks.check_examples(self)

    def _prepare_dataset(
        self, dataset: Dataset | IterableDataset, processing_class: Any, args: RewardConfig, dataset_name: str
    ) -> Dataset | IterableDataset:
        return prepare_rows(dataset, processing_class, args, dataset_name, self.score_margin)

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = ["prompt_ids", "answers_ids", "scores", "chosen_ids", "rejected_ids", "margin"]

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of one batch, a mean over its questions."""
        check_compiled(model, inputs[VECTORS].device)
        labels = ("answer_counts", "token_counts", "scores", "margins")
        rows = {key: value for key, value in inputs.items() if key not in labels}
        outputs = self._on_shards(model)(**rows, use_cache=False)
        scores, counts = inputs["scores"], inputs["answer_counts"]
        # The head may round copies of one hidden state apart, so equal answers take the reward of the first.
        places = inputs[PACKED_INDEX].view(scores.shape)
        first = (places[:, :, None] == places[:, None]).int().argmax(2)
        rewards = outputs.logits.float().view(scores.shape).gather(1, first)
        real = torch.arange(scores.shape[1], device=scores.device) < counts[:, None]
        beats = (scores[:, :, None] > scores[:, None]) & real[:, :, None] & real[:, None]
        losses = LOSSES[self.loss_type](rewards - inputs.get("margins", 0.0), beats)
        if self.args.center_rewards_coefficient is not None:
            sums = rewards[:, :, None] + rewards[:, None]
            losses = losses + self.args.center_rewards_coefficient * pair_mean(sums**2, beats)
        loss = losses.mean()
        self._add_metrics("train" if model.training else "eval", rewards.detach(), real, beats, inputs)
        if not return_outputs:
            return loss
        return loss, SequenceClassifierOutputWithPast(logits=rewards.masked_fill(~real, PADDING))

    def _add_metrics(self, mode: str, rewards: Tensor, real: Tensor, beats: Tensor, inputs: dict[str, Any]) -> None:
        """Add the metrics of a batch; one gather transfers a row per question."""
        metrics, tokens = self._metrics[mode], self._counts[mode]
        log_sparsity(self, mode, inputs[VECTORS])
        ahead = rewards[:, :, None] - rewards[:, None]
        columns = [
            inputs["answer_counts"],
            *inputs["token_counts"].unbind(1),
            pair_mean(ahead > 0, beats),
            pair_mean(ahead, beats),
            rewards.masked_fill(~real, torch.inf).amin(1),
            rewards.masked_fill(~real, -torch.inf).amax(1),
            rewards.masked_fill(~real, 0.0).sum(1),
        ]
        # gather_for_metrics drops repeated examples at the end of the data, which training counts. Trainer reaches that
        # end before it computes the last step, whose batches would all be cut.
        gather = self.accelerator.gather if mode == "train" else self.accelerator.gather_for_metrics
        rows: Any = gather(torch.stack(columns, 1))
        counts, computed, unshared, accuracy, margin, least, most, total = rows.cpu().double().unbind(1)
        if mode == "train":  # the ranks of a group of tensor or context parallelism have the same batch
            self._total_train_tokens += int(unshared.sum()) // self._tp_size // self._cp_size
        tokens *= bool(metrics["margin"])  # a log clears the metrics
        tokens += computed.sum().item(), unshared.sum().item()
        metrics["shared_tokens_saved"] = [float(1 - tokens[0] / tokens[1])]
        metrics["num_tokens"] = [self._total_train_tokens]
        metrics["min_reward"].append(least.min().item())
        metrics["mean_reward"].append((total.sum() / counts.sum()).item())
        metrics["max_reward"].append(most.max().item())
        metrics["accuracy"].append(accuracy.mean().item())
        metrics["margin"].append(margin.mean().item())
        for count, share in zip(counts.tolist(), accuracy.tolist(), strict=True):
            metrics[f"accuracy_of_{count:.0f}_answers"].append(share)  # a log averages

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return Trainer's estimate for the packed rows; `input_ids` has only answers' last tokens."""
        return super().floating_point_ops(inputs | {"input_ids": inputs[PACKED_IDS]})

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run Trainer's `prediction_step`, and record the loss of the batch's questions and their number."""
        step = super().prediction_step(model, inputs, *args, **kwargs)
        self._record(step[0], torch.tensor(float(len(inputs["answer_counts"]))))
        return step

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Run Trainer's `predict` on raw or tokenized rows, without rows over `args.max_length`."""
        prepared = self._prepare_dataset(test_dataset, self.processing_class, self.args, "test")
        return super().predict(prepared, *args, **kwargs)


def _keep_forward(args: Any) -> None:
    """Make Liger replace layers only; raise a ValueError for its fused loss, which calls a language model's head."""
    config = args.liger_kernel_config or {}
    if config.get("fused_linear_cross_entropy"):
        raise ValueError("liger_kernel_config: fused_linear_cross_entropy needs a language model's head; leave it out")
    args.liger_kernel_config = {**config, "fused_linear_cross_entropy": False}


def _refuse_unsaved_head(model: Any) -> None:
    """Raise a ValueError if adapters of a PEFT model learn, but the head, random at first, is not saved with them."""
    inner = unwrap_peft(model)
    if inner is model or not any(parameter.requires_grad for parameter in inner.parameters()):
        return
    from peft.utils import ModulesToSaveWrapper  # there is an adapter, so peft is installed

    for name, module in inner.named_children():
        if module is inner.base_model or isinstance(module, ModulesToSaveWrapper):
            continue
        if any(True for _ in module.parameters()):
            raise ValueError(
                f"peft_config: the adapter does not save the weights of the head {name!r}, random in a loaded "
                f"model; set task_type='SEQ_CLS', or modules_to_save=[{name!r}]"
            )


def _collator(given: Any, row_length: int | None, score_margin: float, multiple: Any) -> Any:
    """Return the given collator if it agrees with the arguments, or build one."""
    options = {"row_length": row_length, "score_margin": score_margin}
    collator = checked_collator(given, DataCollatorForMultiAnswerReward, pad_to_multiple_of=multiple, **options)
    for name, value in options.items():
        own = getattr(collator, name)
        if value and value != own:
            raise ValueError(f"args.{name} is {value}, but data_collator.{name} is {own}; set it in one place")
    return collator
