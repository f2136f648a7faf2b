"""What a recipe runs on when it is given no model or no dataset: real text that every Python has, and a tiny Llama.

The text is the standard library's documentation topics (`pydoc_data.topics`, what `help("lambda")` shows), as questions
and answers, with other questions' answers to prefer them to. Nothing is downloaded, and the same Python always gives
the same data, tokenizer and weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from datasets import Dataset, DatasetDict, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["build_model", "load", "preferences", "question_answers", "rankings"]

ANSWER_CHARACTERS = (80, 1600)
"""Answers end at the first paragraph that brings them over a length drawn from this range."""

COMPARED_CHARACTERS = (80, 400)
"""The same, where answers are compared."""

MOST_ANSWERS = 6
"""A ranking has two answers at least, and at most this many."""

LIBRARY = ("bltin", "debugger", "formatstrings", "string-methods", "typesf", "typesm", "typess")
"""How the names of topics on the standard library begin. The others are on the language."""

TEST_SHARE = 20
"""Every 20th question goes to the test split."""

FILES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
"""How a single file is read, by its suffix."""

PAD, EOS, USER, ASSISTANT = "<|pad|>", "<|eos|>", "<|user|>", "<|assistant|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    f"{ASSISTANT}{{% generation %}}{{{{ message['content'] }}}}{EOS}{{% endgeneration %}}"
    "{% else %}"
    f"{USER}{{{{ message['content'] }}}}"
    "{% endif %}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)


class _Example(NamedTuple):
    topic: str
    question: str
    answer: str


def load(name: str, config: str | None = None, *, streaming: bool = False) -> Any:
    """The dataset that `--dataset_name` means: of the Hub, a folder, or a single file.

    Args:
        name: name on the Hub, path of a folder, or path of a .json, .jsonl, .csv, .parquet or .txt file.
        config: configuration name.
        streaming: read it as it is needed.

    Returns:
        A dataset dictionary, by split.

    Raises:
        FileNotFoundError: `name` is a file's, and there is none.
    """
    if Path(name).suffix in FILES:
        if not Path(name).is_file():
            raise FileNotFoundError(f"dataset_name: there is no file {name}")
        return load_dataset(FILES[Path(name).suffix], data_files=name, streaming=streaming)
    return load_dataset(name, name=config, streaming=streaming)


def question_answers() -> DatasetDict:
    """Python's documentation topics as conversations, columns `prompt` and `completion`, splits `train` and `test`.

    A topic is cut between paragraphs into answers of widely varying length, in order.
    """

    def rows(examples: Sequence[_Example]) -> Iterator[dict[str, Any]]:
        for example in examples:
            yield {"prompt": [_user(example.question)], "completion": [_assistant(example.answer)]}

    return _splits(rows, ANSWER_CHARACTERS)


def preferences() -> DatasetDict:
    """The true answer to a question and one to reject, columns `prompt`, `chosen` and `rejected`, split as above.

    Questions are on the language. What is rejected is the true answer to a question on the standard library, the one
    most similar in length: a difference that even a tiny, untrained model learns to tell in a few steps.
    """

    def rows(examples: Sequence[_Example]) -> Iterator[dict[str, Any]]:
        language, library = _by_part(examples)
        for example in language:
            other = min(library, key=lambda other: abs(len(other.answer) - len(example.answer)))
            yield {
                "prompt": [_user(example.question)],
                "chosen": [_assistant(example.answer)],
                "rejected": [_assistant(other.answer)],
            }

    return _splits(rows, COMPARED_CHARACTERS)


def rankings() -> DatasetDict:
    """Two to six answers to a question, shuffled, columns `prompt`, `answers` and `scores`, split as above.

    The true answer has score 1; other answers on its topic have 0.5, and answers on the standard library, which no
    question is about, have 0.
    """
    drawn = random.Random(0)

    def rows(examples: Sequence[_Example]) -> Iterator[dict[str, Any]]:
        language, library = _by_part(examples)
        for example in language:
            siblings = [other for other in language if other.topic == example.topic and other.answer != example.answer]
            others = drawn.randint(1, MOST_ANSWERS - 1)
            related = drawn.sample(siblings, min(len(siblings), drawn.randint(0, others // 2)))
            answers = [(example, 1.0)]
            answers += [(other, 0.5) for other in related]
            answers += [(other, 0.0) for other in drawn.sample(library, others - len(related))]
            drawn.shuffle(answers)
            yield {
                "prompt": [_user(example.question)],
                "answers": [[_assistant(other.answer)] for other, _ in answers],
                "scores": [score for _, score in answers],
            }

    return _splits(rows, COMPARED_CHARACTERS)


def build_model(path: str | Path, *, positions: int = 1024) -> None:
    """Write a tiny, untrained Llama and its tokenizer to a folder that `from_pretrained` reads.

    Args:
        path: the folder.
        positions: `max_position_embeddings` of the model.
    """
    tokenizer: Any = build_tokenizer()
    tokenizer.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)  # from_config would shard it under ZeRO-3, and one process builds it
    model.generation_config.repetition_penalty = 1.2  # small models repeat themselves
    model.save_pretrained(path)


def build_tokenizer(vocab_size: int = 2048) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the documentation topics, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for _, text in sorted(topics.items())], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
    )


def _splits(rows: Callable[[Sequence[_Example]], Iterator[dict[str, Any]]], characters: tuple[int, int]) -> DatasetDict:
    """A dataset of each split; `rows` makes its rows of the split's examples."""
    lengths = random.Random(0)
    examples = []
    for topic, text in sorted(topics.items()):
        answers = _answers(text, lengths, characters)
        for part, answer in enumerate(answers, start=1):
            which = f", part {part} of {len(answers)}" if len(answers) > 1 else ""
            examples.append(_Example(topic, f'What does Python\'s documentation say about "{topic}"{which}?', answer))
    train = [example for index, example in enumerate(examples) if index % TEST_SHARE]
    return DatasetDict(
        {
            "train": Dataset.from_list(list(rows(train))),
            "test": Dataset.from_list(list(rows(examples[::TEST_SHARE]))),
        }
    )


def _by_part(examples: Sequence[_Example]) -> tuple[list[_Example], list[_Example]]:
    """Examples on the language, and those on the standard library."""
    parts: tuple[list[_Example], list[_Example]] = ([], [])
    for example in examples:
        parts[example.topic.startswith(LIBRARY)].append(example)
    return parts


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def _answers(text: str, lengths: random.Random, characters: tuple[int, int]) -> list[str]:
    answers: list[str] = []
    paragraphs: list[str] = []
    wanted = lengths.randint(*characters)
    for paragraph in _paragraphs(text):
        paragraphs.append(paragraph)
        if sum(map(len, paragraphs)) >= wanted:
            answers.append("\n\n".join(paragraphs))
            paragraphs, wanted = [], lengths.randint(*characters)
    return [*answers, "\n\n".join(paragraphs)] if paragraphs else answers


def _paragraphs(text: str) -> Iterator[str]:
    """Prose with its line breaks undone, and code as it is; tables drawn in characters are left out."""
    for paragraph in text.strip().split("\n\n"):
        lines = [line for line in paragraph.split("\n") if not set(line) <= set("*=-~^")]  # rules under headings
        if not any(line.lstrip().startswith(("|", "+-")) for line in lines):
            code = any(line.startswith(" ") for line in lines)
            yield "\n".join(lines) if code else " ".join(lines)
