"""What a recipe runs on when it is given no model or no dataset: real text that every Python has, and a tiny Llama.

The text is the standard library's documentation topics (`pydoc_data.topics`, what `help("lambda")` shows), as questions
and answers. Nothing is downloaded, and the same Python always gives the same data, tokenizer and weights.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from datasets import Dataset, DatasetDict, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

__all__ = ["build_model", "load", "question_answers"]

ANSWER_CHARACTERS = (80, 1600)
"""Answers end at the first paragraph that brings them over a length drawn from this range."""

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


def load(name: str | None, config: str | None = None, *, streaming: bool = False) -> Any:
    """The dataset that `--dataset_name` means: of the Hub, a folder, or a single file; without a name, the demo's.

    Args:
        name: name on the Hub, path of a folder, or path of a .json, .jsonl, .csv, .parquet or .txt file.
        config: configuration name.
        streaming: read it as it is needed.

    Returns:
        A dataset dictionary, by split.

    Raises:
        FileNotFoundError: `name` is a file's, and there is none.
    """
    if name is None:
        return question_answers()
    if Path(name).suffix in FILES:
        if not Path(name).is_file():
            raise FileNotFoundError(f"dataset_name: there is no file {name}")
        return load_dataset(FILES[Path(name).suffix], data_files=name, streaming=streaming)
    return load_dataset(name, name=config, streaming=streaming)


def question_answers() -> DatasetDict:
    """Python's documentation topics as conversations, columns `prompt` and `completion`, splits `train` and `test`.

    A topic is cut between paragraphs into answers of widely varying length, in order.
    """
    lengths = random.Random(0)
    examples = []
    for topic, text in sorted(topics.items()):
        answers = _answers(text, lengths)
        for part, answer in enumerate(answers, start=1):
            which = f", part {part} of {len(answers)}" if len(answers) > 1 else ""
            question = f'What does Python\'s documentation say about "{topic}"{which}?'
            examples.append(
                {
                    "prompt": [{"role": "user", "content": question}],
                    "completion": [{"role": "assistant", "content": answer}],
                }
            )
    test = examples[::TEST_SHARE]
    train = [example for index, example in enumerate(examples) if index % TEST_SHARE]
    return DatasetDict({"train": Dataset.from_list(train), "test": Dataset.from_list(test)})


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
        model = AutoModelForCausalLM.from_config(config)
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


def _answers(text: str, lengths: random.Random) -> list[str]:
    answers: list[str] = []
    paragraphs: list[str] = []
    wanted = lengths.randint(*ANSWER_CHARACTERS)
    for paragraph in _paragraphs(text):
        paragraphs.append(paragraph)
        if sum(map(len, paragraphs)) >= wanted:
            answers.append("\n\n".join(paragraphs))
            paragraphs, wanted = [], lengths.randint(*ANSWER_CHARACTERS)
    return [*answers, "\n\n".join(paragraphs)] if paragraphs else answers


def _paragraphs(text: str) -> Iterator[str]:
    """Prose with its line breaks undone, and code as it is; tables drawn in characters are left out."""
    for paragraph in text.strip().split("\n\n"):
        lines = [line for line in paragraph.split("\n") if not set(line) <= set("*=-~^")]  # rules under headings
        if not any(line.lstrip().startswith(("|", "+-")) for line in lines):
            code = any(line.startswith(" ") for line in lines)
            yield "\n".join(lines) if code else " ".join(lines)
