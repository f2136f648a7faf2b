"""Error messages that the collators and `pack_dataset` share. `name` is the example's name, for example "example 3"."""

from __future__ import annotations


def empty(name: str) -> str:
    """Message of an example without tokens."""
    return f"{name} is empty; remove it: dataset.filter(lambda example: len(example['input_ids']) > 0)"


def padded(name: str) -> str:
    """Message of an example with padding."""
    return f"{name} holds padding (zeros in attention_mask); tokenize with padding=False"


def negative(column: str, least: int) -> str:
    """Message of negative token ids, which are usually labels."""
    return f"{column} has {least}, but token ids must not be negative; are these labels, in which -100 is not learned?"


def unequal(column: str, name: str, entries: int, tokens: int) -> str:
    """Message of a column that is not as long as `input_ids`."""
    return f"{column} of {name} has {entries} entries, but its input_ids have {tokens}; they must be one to one"


def too_long(name: str, length: int, max_length: int, can_split: bool = False) -> str:
    """Message of an example that exceeds `max_length`."""
    ways = "raise max_length, or choose truncation_mode='keep_start' or 'keep_end'" + ", or split=True" * can_split
    return f"{name} has {length} tokens, more than max_length {max_length}; {ways}"


def too_deep(name: str, depth: int, positions: int) -> str:
    """Message of an example with a path that exceeds the model's positions."""
    return (
        f"{name} is {depth} tokens deep, but the model has {positions} positions (max_position_embeddings); shorten it"
    )


def two_margins(name: str, score_margin: float) -> str:
    """Message of an example with a margin, and with scores of which `score_margin` makes a margin."""
    return f"{name} has a margin, and scores that score_margin={score_margin} makes another of; remove one of them"
