"""Data and model of the demos: questions and answers from Python's documentation, and a tiny untrained Llama.

The text is `pydoc_data.topics`. Answers to other questions serve as rejected ones. Nothing is downloaded, and
everything is deterministic for a version of Python.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from datasets import Dataset, DatasetDict, concatenate_datasets, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ANSWER_CHARACTERS = (80, 1600)
"""Range of the length at which an answer of `question_answers` ends, after the paragraph that reaches it."""

COMPARED_CHARACTERS = (80, 400)  # of `preferences` and `rankings`
PASSAGE_CHARACTERS = (200, 600)  # of `passages`
COPIED_WORDS = 10  # that `passages` asks for
MOST_ANSWERS = 6  # of a ranking; the fewest are two

LIBRARY = ("bltin", "debugger", "formatstrings", "string-methods", "typesf", "typesm", "typess")
"""Prefixes of the topics on the standard library; others are on the language."""

TEST_SHARE = 20  # each 20th question is in the test split

FILES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
"""Dataset builder of a single file, by its suffix."""

FACTS = {
    "What is a lambda expression?": "A lambda expression is a function without a name, written in one line.",
    "What does the pass statement do?": "The pass statement does nothing; it stands where a statement is needed.",
    "How does a generator return values?": "A generator returns its values one after another, with yield.",
    "What is the difference between a list and a tuple?": "A list can be changed, and a tuple cannot.",
    "How do I open a file so that it is closed again?": "Open it in a with statement, which closes it at the end.",
    "What does the finally clause do?": "The finally clause runs in any case, after an exception too.",
}
"""Short answers that the demo's model learns by heart."""

FACT_COPIES = 150  # of each fact in the training split

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
    """Load the datasets by split that `--dataset_name` names: on the Hub, in a folder, or in a file of `FILES`."""
    if Path(name).suffix in FILES:
        if not Path(name).stat().st_size:
            raise ValueError(f"the file {name} is empty")
        return load_dataset(FILES[Path(name).suffix], data_files=name, streaming=streaming)
    return load_dataset(name, name=config, streaming=streaming)


def question_answers() -> DatasetDict:
    """Build conversations from the topics: columns `prompt` and `completion`, splits `train` and `test`.

    Topics are cut between paragraphs. `train` also has copies of `FACTS`.
    """
    splits = _splits(_conversations, ANSWER_CHARACTERS)
    splits["train"] = concatenate_datasets([splits["train"], facts()["train"]])
    return splits


def facts() -> DatasetDict:
    """Build conversations from `FACTS`, copied in `train`, as `question_answers` does."""
    examples = [_Example("", question, answer) for question, answer in FACTS.items()]
    copies = {"train": FACT_COPIES, "test": 1}
    return DatasetDict({name: Dataset.from_list(list(_conversations(examples * n))) for name, n in copies.items()})


def _conversations(examples: Sequence[_Example]) -> Iterator[dict[str, Any]]:
    for example in examples:
        yield {"prompt": [_turn("user", example.question)], "completion": [_turn("assistant", example.answer)]}


def preferences() -> DatasetDict:
    """Build preferences: columns `prompt`, `chosen` and `rejected`, splits `train` and `test`.

    Questions are on the language. The rejected answer, on the standard library, is the one closest in length.
    """

    def rows(examples: Sequence[_Example]) -> Iterator[dict[str, Any]]:
        language, library = _by_part(examples)
        for example in language:
            other = min(library, key=lambda other: abs(len(other.answer) - len(example.answer)))
            yield {
                "prompt": [_turn("user", example.question)],
                "chosen": [_turn("assistant", example.answer)],
                "rejected": [_turn("assistant", other.answer)],
            }

    return _splits(rows, COMPARED_CHARACTERS)


def rankings() -> DatasetDict:
    """Build rankings of shuffled answers: columns `prompt`, `answers`, `scores`, splits `train` and `test`.

    Questions are on the language. The true answer scores 1, others on its topic 0.5, on the standard library 0.
    """
    generator = random.Random(0)

    def rows(examples: Sequence[_Example]) -> Iterator[dict[str, Any]]:
        language, library = _by_part(examples)
        for example in language:
            siblings = [other for other in language if other.topic == example.topic and other.answer != example.answer]
            others = generator.randint(1, MOST_ANSWERS - 1)
            related = generator.sample(siblings, min(len(siblings), generator.randint(0, others // 2)))
            answers = [(example, 1.0), *((other, 0.5) for other in related)]
            answers += [(other, 0.0) for other in generator.sample(library, others - len(related))]
            generator.shuffle(answers)
            yield {
                "prompt": [_turn("user", example.question)],
                "answers": [[_turn("assistant", other.answer)] for other, _ in answers],
                "scores": [score for _, score in answers],
            }

    return _splits(rows, COMPARED_CHARACTERS)


def passages() -> DatasetDict:
    """Build prompts that ask for words of a passage: columns `prompt` and `passage`, splits `train` and `test`."""

    def rows(examples: Sequence[_Example]) -> Iterator[dict[str, Any]]:
        for example in examples:
            task = f"Repeat {COPIED_WORDS} words of this text, each once:\n\n{example.answer}"
            yield {"prompt": [_turn("user", task)], "passage": example.answer}

    return _splits(rows, PASSAGE_CHARACTERS)


def copied_words_reward(
    completions: Sequence[list[dict[str, str]]], passage: Sequence[str], **kwargs: Any
) -> list[float]:
    """Return the share of `COPIED_WORDS` words of its passage that each completion has."""
    copied = [
        _words(completion[0]["content"]) & _words(text) for completion, text in zip(completions, passage, strict=True)
    ]
    return [min(1.0, len(words) / COPIED_WORDS) for words in copied]


def build_model(
    path: str | Path, *, positions: int = 1024, initializer_range: float = 0.06, mask_token: str | None = None
) -> None:
    """Write a tiny, untrained Llama and its tokenizer to a folder.

    With transformers' `initializer_range` of 0.02, the demo of `sft.py` would need more steps to learn the facts.
    """
    tokenizer: Any = build_tokenizer()
    if mask_token is not None:
        tokenizer.add_special_tokens({"mask_token": mask_token})
    tokenizer.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)  # not from_config, which shards under ZeRO-3: one process builds it
    model.generation_config.repetition_penalty = 1.2  # small models repeat themselves
    model.save_pretrained(path)


def build_tokenizer(vocab_size: int = 2048) -> PreTrainedTokenizerFast:
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
    lengths = random.Random(0)
    examples = []
    for topic, text in sorted(topics.items()):
        answers = _answers(text, lengths, characters)
        for part, answer in enumerate(answers, start=1):
            which = f", part {part} of {len(answers)}" if len(answers) > 1 else ""
            examples.append(_Example(topic, f'What does Python\'s documentation say about "{topic}"{which}?', answer))
    splits = {
        "train": [example for index, example in enumerate(examples) if index % TEST_SHARE],
        "test": examples[::TEST_SHARE],
    }
    return DatasetDict({name: Dataset.from_list(list(rows(part))) for name, part in splits.items()})


def _by_part(examples: Sequence[_Example]) -> tuple[list[_Example], list[_Example]]:
    parts: tuple[list[_Example], list[_Example]] = ([], [])
    for example in examples:
        parts[example.topic.startswith(LIBRARY)].append(example)
    return parts


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


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
    """Yield paragraphs: prose without line breaks, code unchanged, no tables."""
    for paragraph in text.strip().split("\n\n"):
        lines = [line for line in paragraph.split("\n") if not set(line) <= set("*=-~^")]  # rules under headings
        if not any(line.lstrip().startswith(("|", "+-")) for line in lines):
            code = any(line.startswith(" ") for line in lines)
            yield "\n".join(lines) if code else " ".join(lines)
