"""Shapes of models with random weights, and their construction."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from flashmask_hf.long_rows.checkpointing import enable_checkpointing

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 131072,
    },
}


def build_model(
    shape: str, device: str, *, kind: Any = AutoModelForCausalLM, seed: int = 0, adapters: bool = False, **options: Any
) -> Any:
    """Build a Llama with random weights, attention "flashmask" and gradient checkpointing.

    It is in bfloat16, or in float32 on a CPU.

    Args:
        shape: one of `SHAPES`.
        device: "cuda" or "cpu".
        kind: transformers' auto class of the model.
        seed: seed of the weights.
        adapters: freeze the model and add LoRA adapters of rank 16 to all linear layers; returns a PEFT model.
        **options: further options of the model's configuration.
    """
    config = LlamaConfig(**{**SHAPES[shape], **options})
    torch.manual_seed(seed)
    with torch.device(device):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model = kind.from_config(config, attn_implementation="flashmask", dtype=dtype)
    if adapters:
        task = "CAUSAL_LM" if kind is AutoModelForCausalLM else "SEQ_CLS"
        lora = LoraConfig(r=16, target_modules="all-linear", task_type=task, init_lora_weights=False)
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    return enable_checkpointing(model, {"use_reentrant": False})
