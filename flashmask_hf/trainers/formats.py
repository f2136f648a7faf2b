"""Readers of datasets of preferences and rankings, and the rows that they refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from trl.data_utils import extract_prompt

_OTHER_NAMES = ("question", "instruction", "query", "input")
"""Unread names of a prompt's column."""

CONTEXTS = ("system", "input")
"""Unread columns with a part of the prompt, as in Intel/orca_dpo_pairs."""


def preference_columns(example: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the columns `prompt`, `chosen` and `rejected` of a row, all strings or all lists of messages.

    Rows have one of TRL's formats (https://huggingface.co/docs/trl/dataset_formats#preference), or a string as prompt
    and conversations as answers. A ValueError says what is wrong with a row.
    """
    missing = [column for column in ("chosen", "rejected") if not example.get(column)]
    if missing:
        raise ValueError(
            f"example {index} has no {' and no '.join(missing)}, or an empty one; remove it, or rename the columns to "
            f"prompt, chosen and rejected. It has: {', '.join(map(str, example))}"
        )
    name, prompt, answers = f"example {index}", example.get("prompt"), [example["chosen"], example["rejected"]]
    _refuse_unread(example, answers, name)
    if not isinstance(prompt, list) and isinstance(answers[0], str) != isinstance(answers[1], str):
        raise ValueError(f"{name} has one answer of text and one of messages; make them the same kind")
    prompt, answers = _in_one_form(prompt, answers, name)
    columns = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
    if prompt is None:
        if answers[0] == answers[1]:
            raise ValueError(f"{name} has the same conversation twice, chosen and rejected; remove it")
        columns = extract_prompt({"chosen": answers[0], "rejected": answers[1]})
    for column in ("chosen", "rejected"):
        if _empty(columns[column], ""):
            raise ValueError(f"{name} has an empty answer, {column}; remove it: dataset.filter(...)")
    return {column: columns[column] for column in ("prompt", "chosen", "rejected")}


def answer_sequences(example: Mapping[str, Any], eos_token: str | None, name: str) -> Sequence[Any]:
    """Return question and answer as one text or conversation, for each answer of a row, `chosen` first.

    The row is in a format of `MultiAnswerRewardTrainer`. Texts end with the `eos_token`. A TypeError or ValueError says
    what is wrong with a row.
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
    if len(answers) < 2:
        raise ValueError(f"{name} has {len(answers)} answers, but a preference needs two or more; remove it")
    _refuse_unread(example, answers, name)
    _refuse_unread_scores(example, name)
    for nth, answer in enumerate(answers):
        if _empty(answer, eos_token or ""):
            raise ValueError(f"answer {nth} of {name} is empty; remove the answer, or the example: dataset.filter(...)")
    prompt, answers = _in_one_form(prompt, answers, name)
    if isinstance(answers[0], list):
        return [[*(prompt or []), *answer] for answer in answers]
    if not eos_token:
        raise ValueError(f"{name} is text, which the tokenizer's eos_token ends, but it has none; give it one")
    return [(prompt or "") + answer.removesuffix(eos_token) + eos_token for answer in answers]


def _in_one_form(prompt: Any, answers: list[Any], name: str) -> tuple[Any, list[Any]]:
    """Return a prompt, or None, and answers, all strings or all lists of messages, with the prompt's turns once."""
    if isinstance(prompt, str) and not isinstance(answers[0], str):
        if all(_begins_with(answer, prompt) for answer in answers):
            return None, answers
        if not all(answer[0].get("role") == "assistant" for answer in answers):
            problem = f"the answers of {name} are conversations that begin neither with its prompt, a string, nor the"
            raise ValueError(f"{problem} assistant; make the prompt a list of messages, or remove the column")
        prompt = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list):
        answers = [[{"role": "assistant", "content": x}] if isinstance(x, str) else x for x in answers]
        if all(answer[: len(prompt)] == prompt and len(answer) > len(prompt) for answer in answers):
            answers = [answer[len(prompt) :] for answer in answers]
    return prompt, answers


def refuse_other_keys(parts: Sequence[Any], name: str, keys: tuple[str, str] = ("role", "content")) -> None:
    """Raise a ValueError if a conversation among these columns has other keys, as in ShareGPT."""
    for part in parts:
        first = part[0] if isinstance(part, list) and part else None
        if isinstance(first, Mapping) and keys[0] not in first:
            raise ValueError(
                f"{name} has messages with the keys {', '.join(first)}; rename them to {' and '.join(keys)}. TRL reads "
                "from and value in a column conversations, role and content in all others."
            )


def _refuse_unread(example: Mapping[str, Any], answers: Sequence[Any], name: str) -> None:
    """Raise a ValueError if a row has messages without roles, or text of its prompt in an unread column."""
    prompt = example.get("prompt")
    refuse_other_keys((prompt, *answers), name)
    for column in _OTHER_NAMES if prompt is None else ():
        text = example.get(column)
        if text and not all(_begins_with(answer, text) for answer in answers):
            raise ValueError(f"{name} has no prompt, and a column {column!r}, which is not read; rename or remove it")
    refuse_unread_context(example, answers, name)


def refuse_unread_context(example: Mapping[str, Any], answers: Sequence[Any], name: str) -> None:
    """Raise a ValueError if a column of context has text that is neither in the prompt nor in all answers."""
    for column in CONTEXTS:
        text = example.get(column)
        if not isinstance(text, str) or not text.strip() or _holds(example.get("prompt"), text):
            continue
        if not all(_holds(answer, text) for answer in answers):
            raise ValueError(
                f"{name} has a column {column!r} beside its prompt, which is not read; put its text into the prompt, "
                "or remove the column"
            )


def _refuse_unread_scores(example: Mapping[str, Any], name: str) -> None:
    """Raise a ValueError if a row without `scores` has a number per answer in another column."""
    if example.get("answers") is None or "scores" in example:
        return
    for column, values in example.items():
        if not isinstance(values, list) or len(values) != len(example["answers"]):
            continue
        if all(isinstance(value, Real) for value in values):
            problem = f"{name} has no scores, and a column {column!r} with a number per answer, which is not read"
            raise ValueError(f"{problem}: answers would be ranked by their order; rename it to scores, or remove it")


def _holds(part: Any, text: str) -> bool:
    """Return whether a string, a conversation or None contains a text."""
    texts = [part] if isinstance(part, str) else [value for message in part or () for value in message.values()]
    return any(text.strip() in str(held) for held in texts)


def _empty(answer: Any, eos_token: str) -> bool:
    """Return whether an answer has neither text before the end-of-sequence token nor tool calls."""
    if isinstance(answer, list):
        if not answer or answer[-1].get("tool_calls"):
            return not answer
        answer = answer[-1].get("content")
    return not (answer.removesuffix(eos_token).strip() if isinstance(answer, str) else answer)


def _begins_with(answer: Any, prompt: Any) -> bool:
    """Return whether a string, or a conversation after its system turn, begins with a prompt."""
    if isinstance(answer, str):
        return isinstance(prompt, str) and answer.startswith(prompt)
    opening = next((message for message in answer if message.get("role") != "system"), {})
    return opening.get("role") == "user" and opening.get("content") == prompt
