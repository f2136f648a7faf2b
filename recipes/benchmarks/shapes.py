"""Models with random weights and packed rows of random tokens."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from harness import random_lengths
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma3Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen3Config,
)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig
from trl.trainer.utils import add_fused_lm_head

from flashmask_hf.collators import DataCollatorForPackedLanguageModeling
from flashmask_hf.long_rows.checkpointing import enable_checkpointing
from flashmask_hf.trainers import (
    MultiAnswerRewardConfig,
    MultiAnswerRewardTrainer,
    PackedSFTTrainer,
    SharedQuestionDPOTrainer,
)

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "vocab_size")  # fmt: skip


def _shape(*sizes: int, **more: Any) -> dict[str, Any]:
    options = {"max_position_embeddings": 2**22, "tie_word_embeddings": True}
    return {**dict(zip(SIZES, sizes, strict=True)), **options, **more}


def _qwen_vl(depth: int, width: int, mlp: int, whole: list[int], *text: int) -> dict[str, Any]:
    """Return options of a Qwen2.5-VL, whose last token ids are of images and videos."""
    options, head_dim = _shape(*text), text[0] // text[3]
    sections = [head_dim // 8, 3 * head_dim // 16, 3 * head_dim // 16]
    options["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    tower = {"depth": depth, "hidden_size": width, "intermediate_size": mlp, "out_hidden_size": text[0]}
    ids = {"image_token_id": text[5] - 1, "video_token_id": text[5] - 2, "tie_word_embeddings": True}
    return {"text_config": options, "vision_config": tower | {"fullatt_block_indexes": whole}, **ids}


def _gemma(side: int, depth: int, width: int, mlp: int, *text: int, **more: Any) -> dict[str, Any]:
    """Return options of a Gemma 3 for images of `side` x `side` pixels; the last token id is of images."""
    tower = {"image_size": side, "num_hidden_layers": depth, "hidden_size": width, "intermediate_size": mlp}
    ids = {"image_token_index": text[5] - 1, "mm_tokens_per_image": (side // 56) ** 2, "tie_word_embeddings": True}
    heads = {"patch_size": 14, "num_attention_heads": 16}
    return {"text_config": _shape(*text, **more), "vision_config": tower | heads, **ids}


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _shape(2048, 8192, 16, 32, 8, 128256, head_dim=64, **ROPE),
    "llama-3.1-8b": _shape(4096, 14336, 32, 32, 8, 128256, head_dim=128, **ROPE | {"tie_word_embeddings": False}),
    "qwen3-0.6b": _shape(
        1024, 3072, 28, 16, 8, 151936, head_dim=128, rope_parameters=ROPE["rope_parameters"] | {"rope_theta": 1e6}
    ),
    "tiny": _shape(256, 512, 2, 4, 2, 1024, head_dim=64),
    "bert-base": NO_DROPOUT,
    "bert-tiny": NO_DROPOUT | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    "qwen2.5-vl-3b": _qwen_vl(32, 1280, 3420, [7, 15, 23, 31], 2048, 11008, 36, 16, 2, 151936),
    "gemma-3-4b": _gemma(896, 27, 1152, 4304, 2560, 10240, 34, 8, 4, 262208, head_dim=256, sliding_window=1024),
    "qwen2.5-vl-tiny": _qwen_vl(2, 256, 96, [1], 64, 96, 2, 4, 2, 1024),
    "gemma-3-tiny": _gemma(112, 2, 128, 96, 64, 96, 2, 4, 2, 1024, head_dim=16),
}
FAMILIES: dict[str, Any] = {
    "bert": BertConfig,
    "qwen3": Qwen3Config,
    "qwen2.5-vl": Qwen2_5_VLConfig,
    "gemma-3": Gemma3Config,
}

# Trainer and arguments of this package and of TRL by task; TRL's SFT packs other rows. ORPO and KTO are TRL's alone.
TRAINERS: dict[str, tuple[tuple[Any, Any], ...]] = {
    "sft": ((PackedSFTTrainer, SFTConfig),),
    "lora": ((PackedSFTTrainer, SFTConfig),),
    "dpo": ((SharedQuestionDPOTrainer, DPOConfig), (DPOTrainer, DPOConfig)),
    "reward": ((MultiAnswerRewardTrainer, MultiAnswerRewardConfig), (RewardTrainer, RewardConfig)),
    "orpo": ((ORPOTrainer, ORPOConfig),),
    "kto": ((KTOTrainer, KTOConfig),),
}


def build_model(
    shape: str,
    device: str,
    *,
    kind: Any = AutoModelForCausalLM,
    seed: int = 0,
    rank: int = 0,
    fused: bool = False,
    full: bool = False,
    checkpointing: bool = True,
    **options: Any,
) -> Any:
    """Build a model with random weights and attention "flashmask".

    Args:
        shape: one of `SHAPES`.
        device: "cuda" or "cpu".
        kind: transformers' auto class.
        seed: of the weights.
        rank: of LoRA adapters on all linear layers; 0 trains all weights.
        fused: whether the model has TRL's head.
        full: whether weights are in float32, as on a CPU, instead of bfloat16.
        checkpointing: whether layers are recomputed in the backward.
        **options: of the configuration.
    """
    family = next((made for prefix, made in FAMILIES.items() if shape.startswith(prefix)), LlamaConfig)
    config = family(**{**SHAPES[shape], **options})
    torch.manual_seed(seed)
    with torch.device(device):
        dtype = torch.float32 if full or device == "cpu" else torch.bfloat16
        model = kind.from_config(config, attn_implementation="flashmask", dtype=dtype)
    if fused:
        add_fused_lm_head(model)
    if rank:
        task = "CAUSAL_LM" if kind is AutoModelForCausalLM else "SEQ_CLS"
        lora = LoraConfig(r=rank, target_modules="all-linear", task_type=task, init_lora_weights=False)
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    return (enable_checkpointing(model, {"use_reentrant": False}) if checkpointing else model).train()


def gradient_norm(model: torch.nn.Module) -> float:
    return float(torch.nn.utils.get_total_norm([x.grad for x in model.parameters() if x.grad is not None]))


def arguments_of(config: Any, device: str, **options: Any) -> Any:
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": device == "cpu"}
    return config(**{"output_dir": tempfile.mkdtemp(), "bf16": False, **quiet, **options})


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "why": 2, "so": 3, "no": 4}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def packed_row(lengths: list[int], vocab: int, device: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    collate = DataCollatorForPackedLanguageModeling(completion_only_loss=False)
    documents = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
    return {key: value.to(device) for key, value in collate([{"input_ids": ids} for ids in documents]).items()}


def make_rows(length: int, count: int, vocab: int, device: str = "cuda") -> list[dict[str, torch.Tensor]]:
    """Draw packed rows of `length` tokens of 1 to 10 documents (FlashMask, appendix A.2.1)."""
    generator, rows = torch.Generator().manual_seed(0), []
    for _ in range(count):
        documents = int(torch.randint(1, 11, (1,), generator=generator))
        rows.append(packed_row(random_lengths(length, documents, generator), vocab, device, generator))
    return rows
