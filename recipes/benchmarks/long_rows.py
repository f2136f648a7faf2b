r"""Train on rows of hundreds of thousands of tokens: speed, memory, and the longest row that fits.

    python recipes/benchmarks/long_rows.py --shape llama-3.1-8b --tokens 262144 544768 --csv long_rows.csv
    python recipes/benchmarks/long_rows.py --shape llama-3.2-1b --tokens 65536 --documents 100   # `longest` for a GPU
    python recipes/benchmarks/long_rows.py --shape llama-3.2-1b --tokens 262144 --full
    accelerate launch --config_file recipes/configs/accelerate_fsdp2_cp.yaml recipes/benchmarks/long_rows.py \
        --tokens 544768 --host_gib 40   # a row over two GPUs; host_gib is per GPU, as are the figures of memory

Each run is `PackedSFTTrainer` with `LongRows`, on random weights under autocast: adapters of rank 16 over bfloat16, or
all weights in float32 (`--full`). A step is one row of `--documents` documents of random or equal (`--equal`) lengths.

`longest` is the longest row that fits, by the measure of short rows. The first step pins the host's memory.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

import numpy as np
import torch
from datasets import Dataset
from harness import GIB, Flag, Rows, amount, free_memory, largest, program, random_lengths
from peft import LoraConfig
from shapes import SHAPES, arguments_of, build_model, tokenizer
from trl import SFTConfig

from flashmask_hf.trainers import LongRows, PackedSFTTrainer

MEASURED = ("steps", "seconds_per_step", "tokens_per_second", "peak_gib", "host_gib", "attention", "longest")


def make_trainer(tokens: int, a: argparse.Namespace) -> PackedSFTTrainer:
    generator, count = torch.Generator().manual_seed(0), min(a.steps, 2)
    model = build_model(a.shape, a.device, full=a.full)
    shape, vocab = (count, tokens), model.config.vocab_size
    ids = torch.randint(0, vocab, shape, generator=generator, dtype=torch.int32).numpy()
    equal = np.diff(np.linspace(0, tokens, a.documents + 1, dtype=int)).tolist()
    lengths = [equal if a.equal else random_lengths(tokens, a.documents, generator) for _ in ids]
    data = Dataset.from_dict({"input_ids": list(ids), "seq_lengths": lengths})
    sizes = {"max_length": tokens, "max_steps": a.steps, "per_device_train_batch_size": 1, "logging_steps": 1}
    args = arguments_of(SFTConfig, a.device, learning_rate=1e-5, bf16=a.device == "cuda", **sizes)
    adapter = None if a.full else LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0)
    return PackedSFTTrainer(model, args, train_dataset=data, processing_class=tokenizer(), peft_config=adapter)


def train(tokens: int, a: argparse.Namespace) -> dict[str, object]:
    trainer = make_trainer(tokens, a)
    accelerator = trainer.accelerator
    rows = LongRows(trainer, keep_attention=a.keep_attention, host_gib=a.host_gib)
    trainer.add_callback(rows)
    try:
        trainer.train()
    finally:
        rows.on_train_end(trainer.args, trainer.state, trainer.control)  # frees the host's memory after an error, too
    rates = [entry["tokens_per_second"] for entry in trainer.state.log_history if "tokens_per_second" in entry]
    rate = statistics.median(rates[1:] or rates)  # between logs, without what `LongRows` measures
    figures = len(rates[1:] or rates), round(tokens / rate, 3), round(rate)
    peak = torch.cuda.max_memory_allocated() / GIB if a.device == "cuda" else 0.0
    peak = round(largest(peak, accelerator.device), 1) or ""
    host, attention = round((rows.host_bytes or 0) / GIB, 1), "kept" if rows.kept else "computed again"
    values = (*figures, peak, host, attention, rows.longest or "")
    case: dict[str, object] = {
        "shape": a.shape,
        "gpus": accelerator.num_processes,
        "trained": "all" if a.full else "adapters",
        "tokens": tokens,
    }
    case["documents"] = f"{a.documents} {'equal' if a.equal else 'random'}"
    return case | dict(zip(MEASURED, values, strict=True))


@program(
    __doc__,
    shape=Flag("llama-3.1-8b", SHAPES),
    tokens=[262144],
    documents=10,
    steps=Flag(2, help="the first is not counted, unless it is the only one"),
    equal=False,
    keep_attention=Flag(None, (0, 1), "default: if it fits", int),
    host_gib=Flag(None, help="host memory for checkpoints; default: what the GPU lacks", kind=amount),
    full=Flag(False, help="train all weights, not adapters"),
)
def main(a: argparse.Namespace) -> Iterator[Rows]:
    if a.keep_attention is not None:
        a.keep_attention = bool(a.keep_attention)
    if a.device == "cpu":  # on which nothing is measured
        a.keep_attention, a.host_gib = a.keep_attention or False, a.host_gib or 0
    for tokens in a.tokens:
        rows = [train(tokens, a)]
        free_memory()
        yield rows


if __name__ == "__main__":
    main()
