"""Measure GRPO with shared prompts and with stock TRL: tokens per second, peak memory, and the first importance ratio.

    python recipes/benchmarks/reinforcement.py --csv grpo.csv
    python recipes/benchmarks/reinforcement.py --models llama-3.2-1b --cases 512:512 1024:256 --groups 2 4
    python recipes/benchmarks/reinforcement.py --models tiny --device cpu

A micro-batch is one group or several (`--groups`): each has a prompt of the stated length, and G completions whose
lengths are drawn uniformly between half of the stated length and all of it, padded to all of it, as TRL pads to the
longest of a generation batch. Every provider runs the micro-batch in one forward, as TRL does. The models have random
weights, in bfloat16 (float32 on a CPU). All weights of llama-3.2-1b are trained, and a LoRA adapter of rank 16 on every
linear layer of qwen3-4b, with gradient checkpointing unless it is turned off. With `--compile` each layer is compiled,
as the recipes do with `--torch_compile`, for every provider alike.

`update` is forward and backward of the trainer's loss, without generation and without an optimizer; `forward` is the
pass without gradients that computes the log-probabilities before an update. Tokens per second count the tokens of all
prompts and completions without padding, a prompt once for each completion, for every provider. Packing rows on the host
is inside the times, and compilation is not. Peak memory includes weights and gradients.

`flashmask` is `SharedPromptGRPOTrainer`. `flashmask_unshared` packs the same sequences into a row without sharing,
which tells the gain from padding and the gain from sharing apart. `tree_fa3` packs as TRL's experimental AsyncGRPO
does, and its packing is not in the times. The others are `trl.GRPOTrainer` on the padded batch, with transformers' own
masks; flex_attention compiles as transformers does, from the second shape on for sizes that vary. Providers whose
packages or kernels are not there are left out.

Before the times, log-probabilities of all providers must agree: they may differ by at most a tenth of what another
prompt of the same length changes (root mean square, the columns `difference` and `other_prompt`), and the norms of the
gradients by 10%. `first_ratio_max` and `first_ratio_mean` are of |ratio - 1| between the log-probabilities before the
update, computed for a generation batch of several micro-batches, and those of the update's first forward, after TRL's
shuffle.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import gc
import logging
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo.config
from datasets import Dataset
from harness import append_rows, attempt, missing
from peft import LoraConfig, get_peft_model
from shapes import SHAPES
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import packing as tree_packing
from trl.models.utils import disable_gradient_checkpointing

from flashmask_hf.collators import Forest, pack_forests
from flashmask_hf.trainers import SharedPromptGRPOConfig, SharedPromptGRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import compile_layers

PADDED = ("sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
PROVIDERS = ("flashmask", "flashmask_unshared", *PADDED, "tree_fa3")

IDS: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
QWEN3_4B: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
}
LLAMA_CASES = ["512:512", "1024:256", "4096:256", "512:4096", "16384:64"]
# configuration, rank of the adapter or 0, and lengths of prompts and completions
MODELS: dict[str, tuple[Any, int, list[str]]] = {
    "llama-3.2-1b": (LlamaConfig(**SHAPES["llama-3.2-1b"], **IDS), 0, LLAMA_CASES),
    "qwen3-4b": (Qwen3Config(**QWEN3_4B, **IDS), 16, ["1024:256", "4096:256"]),
    "tiny": (LlamaConfig(**SHAPES["tiny"], **IDS), 4, ["64:16", "16:32"]),
}


def unavailable(provider: str, device: str) -> str:
    """Return why a provider cannot run here, or ""."""
    if provider == "tree_fa3":
        try:
            tree_packing._flash_attn()
        except Exception as error:  # of the network, the package `kernels` or its trust in the publisher
            return f"its kernel cannot be loaded: {error}"
    return missing(provider, device)


class StockTrainer(GRPOTrainer):
    """TRL's trainer on completions that are given, as the only example, instead of generated."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return dict(inputs[0])


class SharedTrainer(SharedPromptGRPOTrainer, StockTrainer):
    """This package's trainer on completions that are given instead of generated."""


class RepackedTrainer(StockTrainer):
    """TRL's trainer, whose model is called by a function in `call` instead of with the padded batch."""

    call: Callable[..., Any]

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        def packed(**inputs: Any) -> Any:
            return type(self).call(model, logits_to_keep, **inputs)

        return super()._get_per_token_logps_and_entropies(
            packed, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )


def call_unshared(
    model: Any, keep: int, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **kwargs: Any
) -> Any:
    """Call a model with a padded batch packed into one row, in which every sequence is a document of its own."""
    ids, real = input_ids.cpu().numpy(), attention_mask.bool().cpu().numpy()
    lengths = real.sum(1)
    rows = pack_forests([Forest.from_trees(row[here]) for row, here in zip(ids, real, strict=True)])
    index = np.arange(ids.size).reshape(ids.shape) % rows.input_ids.size
    for row, (start, size) in enumerate(zip(rows.starts.tolist(), lengths.tolist(), strict=True)):
        index[row, real[row]] = np.arange(start, start + size)
    width = keep + 1  # the loss reads the completions, which begin at the hidden state before them
    packed = rows.indexed_batch(np.ascontiguousarray(index[:, -width:]))
    return model(
        input_ids=input_ids[:, -width:],
        attention_mask=attention_mask[:, -width:],
        labels=labels[:, -width:],
        **{name: x.to(input_ids.device) for name, x in packed.items()},
        **kwargs,
    )


def call_tree(model: Any, keep: int, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **kwargs: Any) -> Any:
    """Call a model with a batch packed into a trie, as TRL's experimental AsyncGRPO does."""
    scored = attention_mask.bool().clone()
    scored[:, :-keep] = False
    key = (input_ids.data_ptr(), tuple(input_ids.shape), int(input_ids.sum()))
    if key not in _TREES:  # AsyncGRPO packs in advance, so this is not in the times
        row = tree_packing.TreeRow()
        for ids, real, mask in zip(input_ids.cpu(), attention_mask.bool().cpu(), scored.cpu(), strict=True):
            row.add({"input_ids": ids[real], "completion_mask": mask[real], "old_log_probs": torch.zeros(len(ids)),
                     "advantage": 0.0, "group_id": 0})  # fmt: skip
        _TREES[key] = {name: x.to(input_ids.device) for name, x in row.pack().items()}
    packed = _TREES[key]
    tree = {name: packed[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    tree["tree_max_seqlen_q"], tree["tree_max_seqlen_k"] = packed["tree_max_seqlens"].tolist()
    rows = {name: packed[name][None] for name in ("input_ids", "position_ids", "shift_labels")}
    outputs = model(**rows, **tree, **kwargs)
    for name in ("log_probs", "entropy"):
        values = outputs[name][0][packed["token_index"]]
        outputs[name] = values.new_zeros(scored.shape).masked_scatter(scored, values)
    return outputs


_TREES: dict[Any, dict[str, Tensor]] = {}


class UnsharedTrainer(RepackedTrainer):
    """TRL's trainer on packed rows without sharing."""

    call = staticmethod(call_unshared)


class TreeTrainer(RepackedTrainer):
    """TRL's trainer on rows of its own tries, with gathered keys and values."""

    call = staticmethod(call_tree)


class Bench:
    """A model and the trainers that run it in turns."""

    def __init__(self, model: str, rank: int, arguments: Any):
        self.device, self.generations = arguments.device, arguments.generations
        self.micro_batches = arguments.micro_batches
        config = MODELS[model][0]
        self.vocab = config.vocab_size
        torch.manual_seed(0)
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        with torch.device(self.device):
            self.model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask", dtype=dtype)
        if rank:
            adapter = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
            self.model = get_peft_model(self.model, adapter, autocast_adapter_dtype=False)
        tree_packing.register_tree_attention()
        self.shared: Any = self._trainer(SharedTrainer, SharedPromptGRPOConfig)
        self.shared.state.global_step = 1  # not a logging step, in which the sparsity of the mask is computed
        self.unshared: Any = self._trainer(UnsharedTrainer, GRPOConfig)
        self.tree: Any = self._trainer(TreeTrainer, GRPOConfig)
        self.stock: Any = self._trainer(StockTrainer, GRPOConfig)
        self.model.train()

    def _trainer(self, trainer: Any, config: Any) -> Any:
        words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "why": 2}, unk_token="<pad>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
        args = config(
            output_dir=tempfile.mkdtemp(),
            report_to="none",
            bf16=False,
            use_cpu=self.device == "cpu",
            max_steps=1,
            per_device_train_batch_size=self.generations,
            num_generations=self.generations,
            gradient_accumulation_steps=self.micro_batches,
        )
        dataset = Dataset.from_list([{"prompt": "why"}] * 1024)  # more than a batch; the batches are made here

        def reward(completions: Any, **_: Any) -> list[float]:
            return [0.0] * len(completions)

        made = trainer(self.model, reward, args, dataset, processing_class=tokenizer)
        made.current_gradient_accumulation_steps = self.micro_batches
        return made

    def use(self, provider: str) -> Any:
        """Set the model's attention to that of a provider, and return the provider's trainer."""
        self.model.set_attn_implementation("flashmask" if provider == "flashmask_unshared" else provider)
        special = {"flashmask": self.shared, "flashmask_unshared": self.unshared, "tree_fa3": self.tree}
        return special.get(provider, self.stock)

    def draw(self, prompt: int, completion: int, groups: int) -> dict[str, Tensor]:
        """Draw groups of a prompt and its completions, as the batch that TRL makes after generation."""
        generator = torch.Generator().manual_seed(prompt + completion)
        rows = groups * self.generations

        def tokens(count: int, length: int) -> Tensor:
            return torch.randint(3, self.vocab, (count, length), generator=generator)

        lengths = torch.randint(completion // 2, completion + 1, (rows, 1), generator=generator)
        mask = (torch.arange(completion) < lengths).long()
        batch = {
            "prompt_ids": tokens(groups, prompt).repeat_interleave(self.generations, 0),
            "prompt_mask": torch.ones(rows, prompt, dtype=torch.int64),
            "completion_ids": tokens(rows, completion) * mask,
            "completion_mask": mask,
            "advantages": torch.randn(rows, generator=generator),
            "num_items_in_batch": mask.sum(),
        }
        return {name: x.to(self.device) for name, x in batch.items()}

    def log_probabilities(self, provider: str, batch: dict[str, Tensor], rows: int | None = None) -> Tensor:
        """Return the log-probability of each token of the completions, 0 for padding.

        Args:
            provider: one of `PROVIDERS`.
            batch: a generation batch, made by `draw`.
            rows: number of rows of one forward; None runs all in one.
        """
        trainer = self.use(provider)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        keep = batch["completion_ids"].shape[1]
        values, *_ = trainer._get_per_token_logps_and_entropies(
            self.model, ids, mask, keep, batch_size=rows, compute_entropy=torch.is_grad_enabled()
        )
        return values * batch["completion_mask"]

    def forward(self, provider: str, batch: dict[str, Tensor], rows: int | None = None) -> Tensor:
        """Compute log-probabilities without gradients, as TRL does before an update."""
        with torch.no_grad(), disable_gradient_checkpointing(self.model):
            return self.log_probabilities(provider, batch, rows)

    def update(self, provider: str, batch: dict[str, Tensor]) -> None:
        """Run forward and backward of the loss."""
        self.use(provider).compute_loss(self.model, batch).backward()

    def gradient_norm(self) -> float:
        """Return the norm of all gradients, and clear them."""
        gradients = [x.grad for x in self.model.parameters() if x.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        self.model.zero_grad(set_to_none=True)
        return norm

    def first_ratio(self, provider: str, prompt: int, completion: int, groups: int) -> tuple[float, float]:
        """Return the largest and the mean |ratio - 1| over the tokens of a generation batch, on its way through TRL."""
        batch = self.draw(prompt, completion, groups * self.micro_batches)
        batch["old_per_token_logps"] = self.forward(provider, batch, groups * self.generations)
        trainer = self.use(provider)
        trainer._buffered_inputs = None
        torch.manual_seed(0)  # of the shuffle
        differences = []
        for step in range(self.micro_batches):
            trainer._step = step
            part = trainer._prepare_inputs([batch])
            new = self.log_probabilities(provider, part).detach()
            ratios = (new - part["old_per_token_logps"])[part["completion_mask"] > 0].double().exp()
            differences.append((ratios - 1).abs())
        off = torch.cat(differences)
        return float(off.max()), float(off.mean())


def compare(bench: Bench, batch: dict[str, Tensor], providers: list[str], found: dict[str, dict[str, Any]]) -> None:
    """Warm up, and exit unless the providers agree with SDPA, or with the first that runs where SDPA does not."""
    results: dict[str, Tensor] = {}
    norms: dict[str, float] = {}
    for name in providers:
        for kind, function in (("forward", bench.forward), ("update", bench.update)):
            made = attempt(lambda name=name, function=function: function(name, batch))
            if isinstance(made, str):
                found[name][f"{kind}_tokens_per_second"] = made
                bench.model.zero_grad(set_to_none=True)
            elif kind == "forward":
                results[name] = made[0].float()
            else:
                norms[name] = bench.gradient_norm()
    first = next((name for name in ("sdpa", *results) if name in results), None)
    if first is None:
        return
    real = batch["completion_mask"] > 0

    def difference(values: Tensor) -> float:
        return float((values - results[first])[real].square().mean().sqrt())

    other = batch | {"prompt_ids": 3 + (batch["prompt_ids"] - 2) % (bench.vocab - 3)}
    control = difference(bench.forward(first, other).float())
    for name, values in results.items():
        found[name] |= {"difference": f"{difference(values):.3g}", "other_prompt": f"{control:.3g}"}
        if not difference(values) <= 0.1 * control:
            raise SystemExit(f"the log-probabilities of {name} and {first} disagree: {found[name]}")
    if norms and max(norms.values()) > 1.1 * min(norms.values()):
        raise SystemExit(f"norms of gradients disagree: {norms}")


def measure(
    bench: Bench, prompt: int, completion: int, groups: int, providers: list[str], arguments: Any
) -> list[dict[str, Any]]:
    """Return a row of figures per provider, for micro-batches of `groups` prompts."""
    found: dict[str, dict[str, Any]] = {name: {} for name in providers}
    batch = bench.draw(prompt, completion, groups)
    compare(bench, batch, providers, found)
    tokens = int(batch["prompt_mask"].sum() + batch["completion_mask"].sum())
    order = random.Random(0)
    for kind, function in (("update", bench.update), ("forward", bench.forward)):
        running = [name for name in providers if f"{kind}_tokens_per_second" not in found[name]]
        seconds: dict[str, list[float]] = {name: [] for name in running}
        peaks = dict.fromkeys(running, 0.0)
        start = time.perf_counter()
        for turn in range(arguments.turns):
            if turn >= 3 and time.perf_counter() - start > arguments.seconds:
                break
            for name in order.sample(running, len(running)):
                made = attempt(lambda name=name, function=function: function(name, batch))
                bench.model.zero_grad(set_to_none=True)
                if isinstance(made, str):
                    found[name][f"{kind}_tokens_per_second"] = made
                    running.remove(name)
                else:
                    seconds[name].append(made[1])
                    peaks[name] = max(peaks[name], made[2])
        medians = {name: statistics.median(seconds[name]) for name in running}
        for name, median in medians.items():
            found[name] |= {
                f"{kind}_tokens_per_second": round(tokens / median),
                f"{kind}_peak_gib": round(peaks[name], 2),
                f"{kind}_against_sdpa": round(medians["sdpa"] / median, 3) if "sdpa" in medians else "",
                f"{kind}_turns": len(seconds[name]),
            }
    for name in [name for name in ("flashmask", "sdpa") if name in providers]:
        made = attempt(lambda name=name: bench.first_ratio(name, prompt, completion, groups))
        if not isinstance(made, str):
            largest, mean = made[0]
            found[name] |= {"first_ratio_max": f"{largest:.3g}", "first_ratio_mean": f"{mean:.3g}"}
    names = ("tokens_per_second", "peak_gib", "against_sdpa", "turns")
    kinds = [f"{kind}_{name}" for kind in ("update", "forward") for name in names]
    columns = [*kinds, "difference", "other_prompt", "first_ratio_max", "first_ratio_mean"]
    shape = {"generations": bench.generations, "groups": groups, "prompt": prompt, "completion": completion}
    return [
        {**shape, "tokens": tokens, "provider": name, **{x: found[name].get(x, "") for x in columns}}
        for name in providers
    ]


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama-3.2-1b", "qwen3-4b"], choices=MODELS)
    parser.add_argument("--cases", nargs="+", help="PROMPT:COMPLETION, in tokens; default: those of each model")
    parser.add_argument("--generations", type=int, default=8, help="completions of a prompt, G")
    parser.add_argument("--groups", type=int, nargs="+", default=[1], help="prompts of a micro-batch")
    parser.add_argument(
        "--micro-batches", type=int, default=2, help="micro-batches of a generation batch, for the first ratio"
    )
    parser.add_argument("--checkpointing", nargs="+", default=["on"], choices=["on", "off"])
    parser.add_argument("--compile", action="store_true", help="compile each layer")
    parser.add_argument("--lora", type=int, help="rank of the adapter, 0 for none; default: that of each model")
    parser.add_argument("--providers", nargs="+", default=list(PROVIDERS), choices=PROVIDERS)
    parser.add_argument("--turns", type=int, default=5, help="measurements of each provider")
    parser.add_argument("--seconds", type=float, default=30, help="start no turn after the third later than this")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--csv", help="file to write the figures to")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("a GPU is needed; --models tiny --device cpu tries the program without one")
    torch._dynamo.config.recompile_limit = 256  # flex_attention is compiled for every shape
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning)
    providers = []
    for name in arguments.providers:
        reason = unavailable(name, arguments.device)
        if reason:
            print(f"{name} is left out: {reason}", flush=True)
        else:
            providers.append(name)
    rows: list[dict[str, object]] = []
    compiled = "on" if arguments.compile else "off"
    for model in arguments.models:
        rank = MODELS[model][1] if arguments.lora is None else arguments.lora
        torch._dynamo.reset()  # else head_dim counts as a size that varies
        bench = Bench(model, rank, arguments)
        if arguments.compile:
            compile_layers(bench.model)
        for checkpointing in arguments.checkpointing:
            switch = f"gradient_checkpointing_{'enable' if checkpointing == 'on' else 'disable'}"
            getattr(bench.model, switch)()
            for case in arguments.cases or MODELS[model][2]:
                prompt, completion = map(int, case.split(":"))
                for groups in arguments.groups:
                    start = time.perf_counter()
                    found = measure(bench, prompt, completion, groups, providers, arguments)
                    setting = {"model": model, "lora": rank, "checkpointing": checkpointing, "compiled": compiled}
                    append_rows(arguments.csv, rows, [{**setting, **row} for row in found])
                    seconds = time.perf_counter() - start
                    print(f"{model} {case}, {groups} x {arguments.generations}: {seconds:.0f} s", flush=True)
                    _TREES.clear()
        del bench
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
