"""What tests of training share: a tiny Llama, a tokenizer of whole words, and preferences in those words."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast, TrainingArguments

VOCAB = 64

# The flag's name since transformers 5.21, where the old one warns.
CHECKPOINTING = next(f for f in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, f))


def llama_config(**changes: Any) -> LlamaConfig:
    """Two layers, 64 token ids, 64 positions; 0 pads and 1 ends."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return LlamaConfig(**(settings | changes))


def word_tokenizer(*roles: str, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Splits at spaces and knows <pad>, <eos>, <unk>, the roles, and w3, w4 and so on, each at its own number."""
    names = ["<pad>", "<eos>", "<unk>", *roles]
    vocab = {name: i for i, name in enumerate(names)} | {f"w{i}": i for i in range(len(names), VOCAB)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(names[:3])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=chat_template
    )


def preference_rows(count: int = 8, seed: int = 0) -> list[dict[str, str]]:
    """Standard preference rows, of questions and answers of one to eight words."""
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(8, VOCAB, (count,), generator=generator).tolist())

    lengths = torch.randint(1, 9, (count, 3), generator=generator).tolist()
    return [{"prompt": words(q) + " ", "chosen": words(c), "rejected": words(r)} for q, c, r in lengths]


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """A preference row with its texts as messages."""
    return row | {
        "prompt": [{"role": "user", "content": row["prompt"].strip()}],
        "chosen": [{"role": "assistant", "content": row["chosen"]}],
        "rejected": [{"role": "assistant", "content": row["rejected"]}],
    }


def trainer_settings(output_dir: Any) -> dict[str, Any]:
    """Arguments of a quiet, short run on the CPU."""
    return {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        CHECKPOINTING: False,
    }
