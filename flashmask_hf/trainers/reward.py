"""TRL's reward trainer on packed rows in which every question is computed once, with two or more answers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.utils import global_then_local_main_first

from flashmask_hf.collators.forest import number
from flashmask_hf.collators.reward import (
    PADDING,
    DataCollatorForMultiAnswerReward,
    answer_scores,
    shared_prefix,
)
from flashmask_hf.packed_backbone import check_compiled, run_packed
from flashmask_hf.trainers.formats import answer_sequences
from flashmask_hf.trainers.sharing import limit_positions, log_sparsity, named_datasets, output_dir, prepare

__all__ = ["MultiAnswerRewardConfig", "MultiAnswerRewardTrainer", "pairwise_loss", "plackett_luce_loss"]

logger = get_logger(__name__)


def pairwise_loss(rewards: Tensor, beats: Tensor) -> Tensor:
    """Of each question, the mean over its ordered pairs of -log sigmoid(r_i - r_j).

    With two answers, the Bradley-Terry loss of `trl.RewardTrainer`; with more, that of InstructGPT
    (https://huggingface.co/papers/2203.02155, section 3.5, equation 1).

    Args:
        rewards: [B, N], minus margins.
        beats: bool [B, N, N], true where answer i is better than answer j; in each question at least once.

    Returns:
        [B].
    """
    return _pair_mean(-nn.functional.logsigmoid(rewards[:, :, None] - rewards[:, None]), beats)


def plackett_luce_loss(rewards: Tensor, beats: Tensor) -> Tensor:
    """Of each question, the negative log-likelihood of its ranking under the Plackett-Luce model.

    The likelihood is the product, over the answers, of the chance softmax(r_i) to be taken first from among itself and
    all that it beats. Equal answers do not compete. With two answers, the loss is `pairwise_loss`.

    Args and returns as there.
    """
    behind = torch.where(beats, rewards[:, None] - rewards[:, :, None], -torch.inf)
    return torch.cat([torch.zeros_like(behind[..., :1]), behind], -1).logsumexp(-1).sum(1)


def _pair_mean(values: Tensor, beats: Tensor) -> Tensor:
    """Mean of values [B, N, N] over the pairs of each question, [B]."""
    return torch.where(beats, values, 0.0).sum((1, 2)) / beats.sum((1, 2))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"pairwise": pairwise_loss, "listwise": plackett_luce_loss}


@dataclass
class MultiAnswerRewardConfig(RewardConfig):
    """Arguments of `MultiAnswerRewardTrainer`: those of `trl.RewardConfig`, and these.

    Args:
        loss_type: "pairwise" (`pairwise_loss`) or "listwise" (`plackett_luce_loss`). Both are means over questions, and
            the same with two answers.
        score_margin: coefficient of the scores in the margins: a pair's rewards are asked to differ by more than
            `score_margin` times the difference of its scores. 0 for no margins.
        row_length: None puts each batch into one packed row. A number makes rows of that many tokens.
    """

    loss_type: Literal["pairwise", "listwise"] = field(
        default="pairwise",
        metadata={
            "help": "The loss of a question: 'pairwise', the mean of the Bradley-Terry losses of its pairs of answers, "
            "or 'listwise', the negative log-likelihood of their ranking under the Plackett-Luce model."
        },
    )
    score_margin: float = field(
        default=0.0,
        metadata={
            "help": "The margin of a pair of answers is this times the difference of their scores. 0 for no margins."
        },
    )
    row_length: int | None = field(
        default=None,
        metadata={
            "help": "Number of tokens of a packed row. If `None`, a batch is one row. A question and its answers stay "
            "in one row."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        if self.loss_type not in LOSSES:
            raise ValueError(f"loss_type must be one of {', '.join(LOSSES)}, got {self.loss_type!r}")


class MultiAnswerRewardTrainer(RewardTrainer):
    """`trl.RewardTrainer` for two or more answers to a question, which it computes once for all of them.

    With two answers, losses, gradients and metrics are TRL's, up to the rounding of sums in another order. The model's
    attention is "flashmask": set if the model is given by name, checked if not.

    A row of the dataset is text or conversations, tokenized exactly as TRL does, in one of these formats:

    - `answers`, a list, with `scores` (numbers, higher is better) or ranked, best first; and `prompt`, or answers that
      begin with it. Strings, or lists of messages; to a `prompt` of messages, an answer may be a string.
    - `chosen` and `rejected`, in all of TRL's preference formats, with an optional `margin`. With `score_margin`,
      `score_chosen` and `score_rejected` are used.
    - The same with a `prompt` that is a string and conversations as answers, which begin with it or do without:
      `HuggingFaceH4/ultrafeedback_binarized` as it is.
    - Tokenized: what `DataCollatorForMultiAnswerReward` takes.

    Rows with a question and answer of more than `args.max_length` tokens are dropped, as in TRL, and the log says how
    many (of a streamed dataset, whose length is not known, it does not).

    The loss is the mean over questions of `args.loss_type`, whose ties count for nothing, and with
    `center_rewards_coefficient` of that times the mean over pairs of (r_i + r_j)^2. In evaluation, predictions are the
    rewards and labels the scores, [questions, answers], padded with -100.

    Logs are TRL's, where `accuracy` and `margin` are means over questions of those of their pairs, and `num_tokens`
    counts a question once per answer. They add `accuracy_of_<N>_answers` for each number of answers,
    `shared_tokens_saved`, the share of these tokens that was not computed, and `mask_sparsity`, the share of tiles of
    the score matrix that are skipped (of a batch of this process, at logging steps and in evaluation). The first two
    are exact over the log's interval, or the evaluation, and all processes.

    Args:
        model: as in `trl.RewardTrainer`.
        args: a `MultiAnswerRewardConfig`, or a `trl.RewardConfig`, which leaves the rest at its defaults.
        data_collator: None, or a `DataCollatorForMultiAnswerReward`.
        train_dataset: as in `trl.RewardTrainer`.
        eval_dataset: as there.
        processing_class: as there.
        peft_config: as there; no prompt learning.
        kwargs: the other arguments of `trl.RewardTrainer`.

    Raises:
        TypeError: `data_collator` is of another kind; or a row of the dataset mixes what cannot be mixed.
        ValueError: the model's attention is not "flashmask", the adapter adds virtual tokens, arguments contradict each
            other, a dataset has a transform, no row is left, or one does not serve. Messages name the row's index and
            the way out.
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
        if args is None:
            args = MultiAnswerRewardConfig(output_dir(model, "Reward"))
        settings: Any = args
        prepare(model, args, peft_config)
        if settings.include_num_input_tokens_seen not in (False, "no") or "inputs" in settings.include_for_metrics:
            raise ValueError(
                "include_num_input_tokens_seen and include_for_metrics=['inputs'] read input_ids, which holds only the "
                "last token of each answer here; leave them out (num_tokens in the log counts all tokens)"
            )
        # A RewardConfig lacks our fields; their defaults are on the class.
        ours: Any = args if isinstance(args, MultiAnswerRewardConfig) else MultiAnswerRewardConfig
        self.loss_type: str = ours.loss_type
        collator = _collator(data_collator, ours.row_length, ours.score_margin, args.pad_to_multiple_of)
        self.score_margin = collator.score_margin
        # Per mode and metric: a sum, and what to divide it by when it is logged.
        self._ratios: dict[str, dict[str, list[float]]] = {
            mode: defaultdict(lambda: [0.0, 0.0]) for mode in ("train", "eval")
        }
        super().__init__(
            model=model,
            args=args,
            data_collator=collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            peft_config=peft_config,
            **kwargs,
        )
        trained: Any = self.model
        run_packed(trained)
        self.data_collator = collator = limit_positions(collator, trained)
        self.label_names = ["scores"]
        text_config, tokenizer = trained.config.get_text_config(), self.processing_class
        if text_config.pad_token_id == getattr(tokenizer, "eos_token_id", None):
            logger.warning(
                "pad_token is eos_token: rewards are trained at the end-of-sequence token, but the saved model's own "
                "forward reads them at the last token that is not padding, one before. Give the tokenizer another "
                "pad_token, so that both are the same."
            )
        for name, dataset in named_datasets(self):
            _check_margins(dataset, name)
            dataset.map(
                _check,
                with_indices=True,
                fn_kwargs={"collator": collator, "dataset_name": name},
                num_proc=args.dataset_num_proc,
                desc=f"Checking {name} dataset",
            )

    def _prepare_dataset(
        self, dataset: Dataset | IterableDataset, processing_class: Any, args: RewardConfig, dataset_name: str
    ) -> Dataset | IterableDataset:
        shown = _unformatted(dataset)
        first = next(iter(shown), None)
        if first is None:
            raise ValueError(f"the {dataset_name} dataset is empty")
        map_style = isinstance(dataset, Dataset)  # IterableDataset.map has neither num_proc nor desc
        options: dict[str, Any] = {"num_proc": args.dataset_num_proc} if map_style else {}
        with global_then_local_main_first():
            if not ({"prompt_ids", "answers_ids"} <= set(first) or {"chosen_ids", "rejected_ids"} <= set(first)):
                if map_style:
                    if dataset.format["type"] == "custom":
                        raise ValueError(
                            f"the {dataset_name} dataset has a transform (with_transform), which could not run anew in "
                            "each epoch, since examples are tokenized once; apply it with dataset.map(...) before"
                        )
                    options["desc"] = f"Tokenizing {dataset_name} dataset"
                dataset = shown.map(
                    _tokenize,
                    with_indices=True,
                    remove_columns=list(first),
                    fn_kwargs={
                        "tokenizer": processing_class,
                        "dataset_name": dataset_name,
                        "score_margin": self.score_margin,
                    },
                    **options,
                )
            if args.max_length is None:
                return dataset
            if map_style:
                options["desc"] = f"Filtering {dataset_name} >{args.max_length} tokens"
            kept = dataset.filter(_fits, fn_kwargs={"max_length": args.max_length}, **options)
        if isinstance(dataset, Dataset) and isinstance(kept, Dataset) and len(kept) < len(dataset):
            if not len(kept):
                raise ValueError(
                    f"every example of the {dataset_name} dataset has an answer that brings it over max_length "
                    f"{args.max_length}; raise it"
                )
            logger.warning(
                f"Dropped {len(dataset) - len(kept)} of {len(dataset)} examples of the {dataset_name} dataset, which "
                f"have more than max_length={args.max_length} tokens with an answer."
            )
        return kept

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = ["prompt_ids", "answers_ids", "scores", "chosen_ids", "rejected_ids", "margin"]

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of one batch, a mean over its questions; see the class."""
        settings: Any = self.args
        check_compiled(model, inputs["startend_row_indices"].device)
        labels = ("answer_counts", "token_counts", "scores", "margins")
        outputs = model(**{key: value for key, value in inputs.items() if key not in labels}, use_cache=False)
        scores, counts = inputs["scores"], inputs["answer_counts"]
        rewards = outputs.logits.float().view(scores.shape)
        real = torch.arange(scores.shape[1], device=scores.device) < counts[:, None]
        beats = (scores[:, :, None] > scores[:, None]) & real[:, :, None] & real[:, None]
        loss = LOSSES[self.loss_type](rewards - inputs.get("margins", 0.0), beats).mean()
        if settings.center_rewards_coefficient is not None:
            sums = rewards[:, :, None] + rewards[:, None]
            loss = loss + settings.center_rewards_coefficient * _pair_mean(sums**2, beats).mean()
        self._measure("train" if model.training else "eval", rewards.detach(), real, beats, inputs)
        if not return_outputs:
            return loss
        padded: Any = rewards.masked_fill(~real, PADDING)
        return loss, SequenceClassifierOutputWithPast(logits=padded)

    def _measure(self, mode: str, rewards: Tensor, real: Tensor, beats: Tensor, inputs: dict[str, Any]) -> None:
        """Collect what `log` writes: one row of numbers per question, of all processes in one transfer."""
        metrics, ratios = self._metrics[mode], self._ratios[mode]
        log_sparsity(self, mode, inputs["startend_row_indices"])
        ahead = rewards[:, :, None] - rewards[:, None]
        columns = [
            inputs["answer_counts"],
            *inputs["token_counts"].unbind(1),
            _pair_mean((ahead > 0).float(), beats),
            _pair_mean(ahead, beats),
            rewards.masked_fill(~real, torch.inf).amin(1),
            rewards.masked_fill(~real, -torch.inf).amax(1),
            rewards.masked_fill(~real, 0.0).sum(1),
        ]
        # At the end of the data gather_for_metrics cuts a batch to what is no repetition. Training counts repetitions,
        # and Trainer is at the end before it computes the first batch of the last step: it would cut all of them.
        gather = self.accelerator.gather if mode == "train" else self.accelerator.gather_for_metrics
        rows: Any = gather(torch.stack([column.float() for column in columns], 1))
        counts, computed, unshared, accuracy, margin, least, most, total = rows.cpu().double().unbind(1)
        if mode == "train":
            repeats: Any = self._tp_size  # the ranks of a tensor parallel group have the same batch
            self._total_train_tokens += int(unshared.sum()) // repeats
        metrics["num_tokens"] = [self._total_train_tokens]
        metrics["min_reward"].append(least.min().item())
        metrics["mean_reward"].append((total.sum() / counts.sum()).item())
        metrics["max_reward"].append(most.max().item())
        metrics["accuracy"].append(accuracy.mean().item())
        metrics["margin"].append(margin.mean().item())
        for count, share in zip(counts.tolist(), accuracy.tolist(), strict=True):
            _add(ratios[f"accuracy_of_{count:.0f}_answers"], share, 1)
        _add(ratios["shared_tokens_saved"], (unshared - computed).sum().item(), unshared.sum().item())

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Trainer's estimate, of the packed rows: `input_ids` holds only the last token of each answer."""
        return super().floating_point_ops(inputs | {"input_ids": inputs["packed_input_ids"]})

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, without what an earlier prediction measured and never logged."""
        self._metrics["eval"].clear()
        self._ratios["eval"].clear()
        return super().evaluation_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's log, with the metrics that are exact over several batches."""
        model: Any = self.model
        mode = "train" if model.training else "eval"
        for name, (total, divisor) in sorted(self._ratios[mode].items()):
            self._metrics[mode][name] = [total / divisor]
        self._ratios[mode].clear()
        super().log(logs, start_time)


def _add(ratio: list[float], total: float, divisor: float) -> None:
    ratio[0] += total
    ratio[1] += divisor


def _collator(given: Any, row_length: int | None, score_margin: float, multiple: Any) -> Any:
    """The collator given, if it agrees with the arguments, or one made of them."""
    if given is None:
        return DataCollatorForMultiAnswerReward(
            row_length=row_length, score_margin=score_margin, pad_to_multiple_of=multiple
        )
    if not isinstance(given, DataCollatorForMultiAnswerReward):
        raise TypeError(
            f"data_collator must be a DataCollatorForMultiAnswerReward, got {type(given).__name__}; leave it out, or "
            "use trl.RewardTrainer"
        )
    for name, value in (("row_length", row_length), ("score_margin", score_margin)):
        if value and value != getattr(given, name):
            raise ValueError(
                f"args.{name} is {value}, but that of data_collator is {getattr(given, name)}; set it in one place"
            )
    return given


def _check(
    example: dict[str, Any],
    index: int,
    *,
    collator: DataCollatorForMultiAnswerReward,
    dataset_name: str,
) -> None:
    collator.check(example, f"example {index} of the {dataset_name} dataset, as prepared,")


def _unformatted(dataset: Any) -> Any:
    """The columns that a format shows, without it: chat templates know nothing of arrays and tensors."""
    if isinstance(dataset, Dataset):
        shown = dataset.format
        if shown["type"] == "custom":  # a transform, which may make the columns
            return dataset
        if not shown["output_all_columns"]:
            dataset = dataset.select_columns(shown["columns"])
    return dataset.with_format(None)


def _check_margins(dataset: Dataset, name: str) -> None:
    """Raise if some rows have a margin and others have not: they could not share a batch."""
    missing = [margin is None for margin in dataset["margin"]] if "margin" in dataset.column_names else []
    if any(missing) and not all(missing):
        raise ValueError(
            f"example {missing.index(True)} of the {name} dataset, as prepared, has no margin, but others have; give "
            "every example one (0.0 for no margin), or remove the column"
        )


def _fits(example: dict[str, Any], max_length: int) -> bool:
    if example.get("answers_ids") is not None:
        return len(example["prompt_ids"]) + max(map(len, example["answers_ids"]), default=0) <= max_length
    return max(len(example["chosen_ids"]), len(example["rejected_ids"])) <= max_length


def _tokenize(
    example: dict[str, Any], index: int, *, tokenizer: Any, dataset_name: str, score_margin: float
) -> dict[str, Any]:
    """The tokens of an example's question and answers, its scores and margin, if any."""
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
    ranked = example.get("answers") is not None  # which a row of joined datasets may not be, while others are
    if "margin" in example:
        tokenized["margin"] = example["margin"]
    if "answers" in example and "scores" in example:
        tokenized["scores"] = example["scores"] if ranked else None
        if ranked:
            answer_scores(example["scores"], len(tokens), name)
    if not ranked and score_margin and "score_chosen" in example and "score_rejected" in example:
        if example.get("margin") is not None:
            raise ValueError(
                f"{name} has a margin, and scores that score_margin={score_margin} makes another of; remove the margin "
                "column, or set score_margin=0"
            )
        columns = ("score_chosen", "score_rejected")
        chosen, rejected = (number(example[column], f"{column} of {name}") for column in columns)
        tokenized["margin"] = score_margin * (chosen - rejected)
    return tokenized
