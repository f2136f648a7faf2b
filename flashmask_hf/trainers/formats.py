"""Readers of datasets of preferences and rankings, and the rows that they refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from trl.data_utils import extract_prompt

__all__ = ["CONTEXTS", "answer_sequences", "preference_columns", "refuse_other_keys", "refuse_unread_context"]

_OTHER_NAMES = ("question", "instruction", "query", "input")
"""Other names of a prompt's column, which nothing reads."""

CONTEXTS = ("system", "input")
"""Columns with a part of the prompt, as in Intel/orca_dpo_pairs, which nothing reads."""


def preference_columns(example: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the columns `prompt`, `chosen` and `rejected` of a row, all strings or all lists of messages.

    Rows are in one of TRL's formats, standard (strings) or conversational (lists of messages), with the prompt in a
    column or as the common prefix of both answers (https://huggingface.co/docs/trl/dataset_formats#preference). Or they
    have a string as prompt and conversations as answers, as in `HuggingFaceH4/ultrafeedback_binarized`. A prompt that
    conversations repeat as their first turns counts once.

    Raises:
        ValueError: a column is missing or has another name, a system prompt has its own column, messages have no role,
            an answer is empty, or one answer is a string and the other a conversation. The message has the row's
            `index` in the dataset.
    """
    missing = [column for column in ("chosen", "rejected") if not example.get(column)]
    if missing:
        raise ValueError(
            f"example {index} has no {' and no '.join(missing)}, or an empty one; remove it, or rename the columns to "
            f"prompt, chosen and rejected. It has: {', '.join(map(str, example))}"
        )
    prompt, chosen, rejected = example.get("prompt"), example["chosen"], example["rejected"]
    refuse_other_keys((prompt, chosen, rejected), f"example {index}")
    _refuse_unread_prompt(example, (chosen, rejected), f"example {index}")
    refuse_unread_context(example, (chosen, rejected), f"example {index}")
    if not isinstance(prompt, list) and isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError(f"example {index} has one answer of text and one of messages; make them the same kind")
    if isinstance(prompt, str) and not isinstance(chosen, str):
        prompt = _first_turns(prompt, [chosen, rejected], f"example {index}")
    if isinstance(prompt, list):
        chosen, rejected = (
            [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
            for answer in (chosen, rejected)
        )
        chosen, rejected = _without(prompt, [chosen, rejected])
    if prompt is None:
        if chosen == rejected:
            raise ValueError(f"example {index} has the same conversation twice, chosen and rejected; remove it")
        parts: Any = extract_prompt({"chosen": chosen, "rejected": rejected})
        prompt, chosen, rejected = parts["prompt"], parts["chosen"], parts["rejected"]
    for column, answer in (("chosen", chosen), ("rejected", rejected)):
        if _empty(answer, ""):
            raise ValueError(f"example {index} has an empty answer, {column}; remove it: dataset.filter(...)")
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def answer_sequences(example: Mapping[str, Any], eos_token: str | None, name: str) -> Sequence[Any]:
    """Return question and answer as one text or one conversation, for each answer of a row, `chosen` first.

    Args:
        example: the row, in a format of `MultiAnswerRewardTrainer`.
        eos_token: token that ends each text, added if it is missing. Conversations do not need it.
        name: the example's name in error messages.

    Raises:
        TypeError: answers or prompt have an unsupported type, or types that cannot be combined.
        ValueError: a column is missing or has another name, a system prompt has its own column, messages have no role,
            an answer is empty, or there are fewer than two answers.
    """
    if example.get("answers") is not None:
        answers = example["answers"]
    elif example.get("chosen") is not None and example.get("rejected") is not None:
        answers = [example["chosen"], example["rejected"]]
    else:
        raise ValueError(
            f"{name} has no answers, and no chosen and rejected; rename the columns to prompt, answers and scores, or "
            f"to prompt, chosen and rejected. It has: {', '.join(map(str, example))}"
        )
    prompt = example.get("prompt")
    texts = isinstance(answers, list) and all(isinstance(answer, str) for answer in answers)
    if not texts and not (isinstance(answers, list) and all(isinstance(answer, list) for answer in answers)):
        raise TypeError(f"answers of {name} must all be strings, or all lists of messages, got {answers!r:.200}")
    if prompt is not None and not isinstance(prompt, (str, list)):
        raise TypeError(f"prompt of {name} must be a string or a list of messages, got {prompt!r:.200}")
    refuse_other_keys((prompt, *answers), name)
    if len(answers) < 2:
        raise ValueError(f"{name} has {len(answers)} answers, but a preference needs two or more; remove it")
    _refuse_unread_prompt(example, answers, name)
    refuse_unread_context(example, answers, name)
    _refuse_unread_scores(example, name)
    for nth, answer in enumerate(answers):
        if _empty(answer, eos_token or ""):
            raise ValueError(f"answer {nth} of {name} is empty; remove the answer, or the example: dataset.filter(...)")
    if texts:
        if isinstance(prompt, list):
            return [[*prompt, {"role": "assistant", "content": answer}] for answer in answers]
        if not eos_token:
            raise ValueError(f"{name} is text, which the tokenizer's eos_token ends, but it has none; give it one")
        return [(prompt or "") + answer.removesuffix(eos_token) + eos_token for answer in answers]
    if prompt is None or isinstance(prompt, list):
        return [[*(prompt or []), *answer] for answer in _without(prompt or [], answers)]
    turns = _first_turns(prompt, answers, name)
    return [[*(turns or []), *answer] for answer in answers]


def _without(prompt: list[dict[str, Any]], answers: Sequence[Any]) -> list[Any]:
    """Return conversations without the turns of the prompt, if all of them begin with it."""
    repeated = all(answer[: len(prompt)] == prompt and len(answer) > len(prompt) for answer in answers)
    return [answer[len(prompt) :] if repeated else answer for answer in answers]


def refuse_other_keys(parts: Sequence[Any], name: str) -> None:
    """Raise a ValueError if a conversation among these columns has no roles, as in ShareGPT."""
    for part in parts:
        first = part[0] if isinstance(part, list) and part else None
        if isinstance(first, Mapping) and "role" not in first:
            raise ValueError(f"{name} has messages with the keys {', '.join(first)}; rename them to role and content")


def _refuse_unread_prompt(example: Mapping[str, Any], answers: Sequence[Any], name: str) -> None:
    """Raise a ValueError if a row has its prompt in a column of another name, and not in its answers."""
    if example.get("prompt") is not None:
        return
    for column in _OTHER_NAMES:
        text = example.get(column)
        if text and not all(_begins_with(answer, text) for answer in answers):
            raise ValueError(
                f"{name} has no prompt, and a column {column!r}, which is not read; rename it to prompt, or remove it"
            )


def refuse_unread_context(example: Mapping[str, Any], answers: Sequence[Any], name: str) -> None:
    """Raise a ValueError if a row has a column of context whose text is neither in the prompt nor in all answers."""
    for column in CONTEXTS:
        text = example.get(column)
        if not isinstance(text, str) or not text.strip() or _holds(example.get("prompt"), text):
            continue
        if not all(_holds(answer, text) for answer in answers):
            raise ValueError(
                f"{name} has a column {column!r} beside its prompt, which is not read; put its text into the prompt "
                "(as a message, if that is a list of messages), or remove the column"
            )


def _refuse_unread_scores(example: Mapping[str, Any], name: str) -> None:
    """Raise a ValueError if a row of `answers` without `scores` has a number per answer in another column."""
    if example.get("answers") is None or "scores" in example:
        return
    for column, values in example.items():
        if not isinstance(values, list) or len(values) != len(example["answers"]):
            continue
        if all(isinstance(value, Real) for value in values):
            raise ValueError(
                f"{name} has no scores, and a column {column!r} with a number per answer, which is not read: answers "
                "would be ranked by their order; rename it to scores, or remove it"
            )


def _holds(part: Any, text: str) -> bool:
    """Return whether a string, a conversation or None contains a text."""
    texts = [part] if isinstance(part, str) else [value for message in part or () for value in message.values()]
    return any(text.strip() in str(held) for held in texts)


def _first_turns(prompt: str, answers: Sequence[Any], name: str) -> list[dict[str, Any]] | None:
    """Return the turns that a prompt string adds before conversations, or None if they begin with it."""
    if all(_opens_with(answer, prompt) for answer in answers):
        return None
    if all(answer[0].get("role") == "assistant" for answer in answers):
        return [{"role": "user", "content": prompt}]
    raise ValueError(
        f"the answers of {name} are conversations that neither begin with its prompt, a string, nor with the "
        "assistant; make the prompt a list of messages, or remove the column"
    )


def _empty(answer: Any, eos_token: str) -> bool:
    """Return whether an answer has no text but the end-of-sequence token, and no tool calls."""
    if isinstance(answer, list):
        if not answer or answer[-1].get("tool_calls"):
            return not answer
        answer = answer[-1].get("content")
    return not (answer.removesuffix(eos_token).strip() if isinstance(answer, str) else answer)


def _begins_with(answer: Any, prompt: Any) -> bool:
    """Return whether an answer, a string or a conversation, begins with the prompt."""
    if isinstance(answer, str):
        return isinstance(prompt, str) and answer.startswith(prompt)
    return _opens_with(answer, prompt)


def _opens_with(conversation: list[dict[str, Any]], prompt: Any) -> bool:
    """Return whether the first turn of a conversation, after a system turn, is the user's prompt."""
    opening = next((message for message in conversation if message.get("role") != "system"), {})
    return opening.get("role") == "user" and opening.get("content") == prompt
