"""Cases of `tests/parallel/test_models.py`: tiny models on rows split over a group, against one process."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tools.tiny import VOCAB, keep_float64, llama_config
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, MistralConfig
from transformers.distributed import DistributedConfig

import flashmask_hf
from flashmask_hf import FlashMask, masks
from flashmask_hf.collators import DataCollatorForPackedLanguageModeling, DataCollatorForTrees
from flashmask_hf.long_rows.checkpointing import enable_checkpointing
from flashmask_hf.parallel import contiguous_rows, sequence_parallel, split_rows

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}

CONFIGS: dict[str, Callable[[int, int], Any]] = {
    "llama": lambda heads, kv_heads: llama_config(**SIZES, num_attention_heads=heads, num_key_value_heads=kv_heads),
    "dropout": lambda heads, kv_heads: llama_config(
        **SIZES, num_attention_heads=heads, num_key_value_heads=kv_heads, attention_dropout=0.3
    ),
    "mistral": lambda heads, kv_heads: MistralConfig(
        **SIZES, num_attention_heads=heads, num_key_value_heads=kv_heads, sliding_window=9
    ),
    "gemma2": lambda heads, kv_heads: Gemma2Config(
        **SIZES,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        sliding_window=9,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
    ),
    "gpt_oss": lambda heads, kv_heads: GptOssConfig(
        **SIZES,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        sliding_window=9,
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
}


def model_of(kind: str, heads: int, kv_heads: int, layers: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model, the same in every process."""
    torch.manual_seed(0)
    config = CONFIGS[kind](heads, kv_heads)  # with heads of 8 dimensions
    config.num_hidden_layers = layers
    options = {"attn_implementation": "flashmask", "experts_implementation": "eager"}  # others take no float64
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options).train()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    return model


def tokens(count: int) -> list[int]:
    return torch.randint(2, VOCAB, (count,)).tolist()


def documents() -> dict[str, torch.Tensor]:
    """Return two rows of four documents and padding; nearly all labels of the first are in its first quarter."""
    torch.manual_seed(1)
    collate = DataCollatorForPackedLanguageModeling(max_length=128)
    batch = collate([{"input_ids": tokens(n)} for n in (33, 50, 41, 33, 11, 80)])
    batch["labels"][0, 40:120] = -100
    return batch


def trees() -> dict[str, torch.Tensor]:
    """Return a row of two shared questions, one with a third level, and padding."""
    torch.manual_seed(1)
    examples = [
        {"input_ids": [tokens(n) for n in (20, 9, 14, 6, 5)], "parents": [-1, 0, 0, 2, 2]},
        {"input_ids": [tokens(n) for n in (17, 8, 8, 21)], "parents": [-1, 0, 0, 0]},
    ]
    return DataCollatorForTrees(max_length=128)(examples)


def masked(vectors: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a row of random tokens under other mask vectors, with positions that count on."""
    torch.manual_seed(1)
    ids = torch.randint(2, VOCAB, (1, vectors.shape[2]))
    return {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.arange(ids.shape[1])[None],
        "startend_row_indices": vectors,
    }


def vectors_per_head(heads: int) -> dict[str, torch.Tensor]:
    """Return a row in which every head evicts keys of its own."""
    return masked(masks.random_eviction(128, generator=torch.Generator().manual_seed(5), heads=heads).indices)


def prefix_documents() -> dict[str, torch.Tensor]:
    """Return a row of documents that see their prefixes whole, which is not causal."""
    return masked(masks.prefix_lm_document([(10, 50), (20, 60), (3, 18)]).bidirectional().indices)


def learned(batch: dict[str, torch.Tensor]) -> int:
    found = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]
    return int((found != -100).sum())


def loss_of(model: Any, part: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    """Return the sum of the losses of a batch with shifted labels, divided by the number of labels of all processes."""
    labels = part.pop("shift_labels")
    logits = model(**part, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


def whole_rows(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch with shifted labels, as `RowSplit.shard` makes them, of one process."""
    part = {key: value for key, value in batch.items() if key != "labels"}
    part.setdefault("shift_labels", torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100))
    return part


def results(model: Any, loss: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Return the loss and the gradients, summed over a group."""
    found = [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    if group is not None:
        for x in found:
            dist.all_reduce(x, group=group)
    return found


def of_one_process(group: Any, model: Any, whole: dict[str, torch.Tensor]) -> list[torch.Tensor] | None:
    """Return `results` of whole rows in process 0, and None in the others, which compare nothing."""
    if group.rank():
        return None
    loss = loss_of(model, whole_rows(whole), learned(whole))
    loss.backward()
    return results(model, loss)


def differences(got: list[torch.Tensor], want: list[torch.Tensor] | None) -> dict[str, float]:
    """Return how far loss and gradients are off in process 0, relative to the loss and to the largest gradient."""
    if want is None:
        return {}
    largest = max(y.abs().max().item() for y in want[1:])
    assert largest > 0.1
    worst = max((x - y).abs().max().item() for x, y in zip(got[1:], want[1:], strict=True))
    return {"loss": (got[0] / want[0] - 1).abs().item(), "gradients": worst / largest}


@contextlib.contextmanager
def kept_float64() -> Iterator[None]:
    """Let models of float64 cast nothing to float32."""
    with pytest.MonkeyPatch.context() as patch:
        keep_float64(patch)
        yield


def rows_of(
    batch: dict[str, torch.Tensor], size: int, layout: str | None, heads: int = 8, kv_heads: int = 4
) -> torch.Tensor:
    """Return the rows of each process; without a layout, those that the heads ask for."""
    vectors = batch["startend_row_indices"]
    mask = FlashMask(vectors, causal=vectors.shape[-1] < 4)
    if layout is None:
        return split_rows(mask, size, heads, kv_heads)
    if layout == "interleaved":  # blocks of 4 rows in turns, those of every other turn backwards
        turns = torch.arange(vectors.shape[2]).view(-1, size, 4)
        turns[1::2] = turns[1::2].flip(1)
        return turns.transpose(0, 1).flatten(1)
    rows = contiguous_rows(vectors.shape[2], size)
    return rows.flip(0) if layout == "reversed" else rows


def compare(
    kind: str = "llama",
    heads: int = 8,
    kv_heads: int = 4,
    batch: Callable[[], dict[str, torch.Tensor]] = documents,
    exchange: Any = None,
    layout: str | None = None,
    prepare: Callable[[Any], Any] = lambda model: model,
) -> Callable[[Any], dict[str, float]]:
    """Return a case: loss and gradients of a split row against those of one process."""

    @kept_float64()
    def case(group: Any) -> dict[str, float]:
        whole = batch()
        model = model_of(kind, heads, kv_heads, dtype=torch.float64)
        torch.manual_seed(3)
        want = of_one_process(group, model, whole)
        model.zero_grad()
        prepare(model)
        rows = rows_of(whole, group.size(), layout, heads, kv_heads)
        torch.manual_seed(3 + group.rank())  # dropout takes the first process's
        with sequence_parallel(group, rows, whole["position_ids"], exchange=exchange) as split:
            loss = loss_of(model, split.shard(whole), learned(whole))
            loss.backward()
        return differences(results(model, loss, group), want)

    return case


@kept_float64()
def snippet(group: Any) -> dict[str, float]:
    """Run the code of docs/parallel.md as pasted, but for its numbers of heads, against one process."""
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
    code = re.findall(r"```py\n(.*?)```", page, re.DOTALL)[0].replace("heads=32, kv_heads=8", "heads=8, kv_heads=4")
    batch, model = documents(), model_of("llama", 8, 4, dtype=torch.float64)
    want = of_one_process(group, model, batch)
    model.zero_grad()
    held = {"group": group, "batch": batch, "model": model, "cross_entropy": torch.nn.functional.cross_entropy}
    exec(code, held | {"number_of_labels_of_all": learned(batch)}, held)
    return differences(results(model, held["loss"], group), want)


def checkpointed(options: dict[str, Any]) -> Callable[[Any], Any]:
    return lambda model: enable_checkpointing(model, options)


@kept_float64()
def compiled(group: Any) -> dict[str, Any]:
    """Return how far a compiled model is off in steps whose masks and rows differ, and how often it is compiled."""
    found, graphs = [], CompileCounterWithBackend("aot_eager")
    model = model_of("llama", 8, 4, layers=1, dtype=torch.float64)
    forward = model.model.forward
    fast = torch.compile(forward, backend=graphs, fullgraph=True)
    for whole in (documents(), {key: value.flip(0) for key, value in documents().items()}):
        model.zero_grad()
        want = of_one_process(group, model, whole)
        model.zero_grad()
        rows = rows_of(whole, group.size(), "interleaved")
        with sequence_parallel(group, rows, whole["position_ids"], exchange="keys") as split:
            model.model.forward = fast
            loss = loss_of(model, split.shard(whole), learned(whole))
            loss.backward()
            model.model.forward = forward
        found.append(differences(results(model, loss, group), want))
    return {key: max(x[key] for x in found) for key in found[0]} | {"graphs": graphs.frame_count}


@kept_float64()
def two_layouts(group: Any) -> dict[str, float]:
    """Return how far the loss of one batch is off in two layouts, one after the other, on the same mask vectors."""
    model, batch = model_of("llama", 8, 4, dtype=torch.float64), documents()
    count = learned(batch)
    with torch.no_grad():
        want = loss_of(model, whole_rows(batch), count)
        off = []
        for layout in ("interleaved", "contiguous", "reversed"):
            rows = rows_of(batch, group.size(), layout)
            with sequence_parallel(group, rows, batch["position_ids"], exchange="keys") as split:
                loss = loss_of(model, split.shard(batch), count)
            dist.all_reduce(loss)
            off.append((loss / want - 1).abs().item())
    return {"loss": max(off), "gradients": 0.0}


def no_positions(group: Any) -> dict[str, Any]:
    """Return whether a batch without positions is split into the same parts as with those of the split."""
    batch = documents()
    bare = {key: value for key, value in batch.items() if key != "position_ids"}
    rows = rows_of(batch, group.size(), "interleaved")
    with sequence_parallel(group, rows, batch["position_ids"]) as split:
        want = split.shard(batch)
        parts = [split.shard(bare), split.shard({**batch, "position_ids": None})]
    return {"equal": all(x.keys() == want.keys() and all(torch.equal(x[k], want[k]) for k in want) for x in parts)}


def whole_row_calls(group: Any) -> dict[str, Any]:
    """Return whether calls with whole rows, and generation, give the same to the bit in the context as without."""
    model = model_of("llama", 8, 4).eval()
    batch = documents()
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    prompt = batch["input_ids"][:, :20]

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return model(**inputs).logits, model.generate(prompt, max_new_tokens=3, do_sample=False)

    want = run()
    with sequence_parallel(group, rows_of(batch, group.size(), None), batch["position_ids"]):
        got = run()
    return {"equal": all(map(torch.equal, got, want))}


def tensor_parallel_model(group: Any, model: Any) -> Any:
    """Return a copy of a model that is loaded with transformers' plan of tensor parallelism."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, 0)
        model.save_pretrained(folders[0])  # writes in process 0 alone
        dist.barrier()
        config = DistributedConfig(tp_size=group.size())
        loaded = AutoModelForCausalLM.from_pretrained(
            folders[0], attn_implementation="flashmask", dtype=model.dtype, distributed_config=config
        )
        dist.barrier()
    return loaded.train()


def tensor_parallel(
    kind: str = "llama", batch: Callable[[], dict[str, torch.Tensor]] = documents
) -> Callable[[Any], dict[str, float]]:
    """Return a case: loss and gradients under tensor parallelism against those of one process."""

    @kept_float64()
    def case(group: Any) -> dict[str, float]:
        whole = batch()
        model = model_of(kind, 8, 4, dtype=torch.float64)
        torch.manual_seed(3)
        want = of_one_process(group, model, whole)
        model = tensor_parallel_model(group, model)
        torch.manual_seed(3)
        assert model.model.layers[0].self_attn.q_proj.weight.to_local().shape[0] == 64 // group.size()
        loss = loss_of(model, whole_rows(whole), learned(whole))
        loss.backward()
        got = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in results(model, loss)]
        return differences(got, want)

    return case


def refused_vectors_per_head(group: Any) -> dict[str, Any]:
    """Return the messages of vectors per head under tensor parallelism."""
    model = tensor_parallel_model(group, model_of("llama", 8, 4))
    local = vectors_per_head(4 // group.size())  # those of one process's key-value heads, were they taken as such
    whole = vectors_per_head(4)  # as many as query heads of one process
    rows = rows_of(whole, group.size(), "contiguous")

    def in_parts(exchange: Any) -> None:
        with sequence_parallel(group, rows, whole["position_ids"], exchange=exchange) as split:
            loss_of(model, split.shard(whole), 1)

    return messages_of(
        {
            "local": lambda: model(**local, use_cache=False),
            "whole": lambda: model(**whole, use_cache=False),
            "keys": lambda: in_parts("keys"),
            "heads": lambda: in_parts("heads"),
        }
    )


def messages_of(wrong: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return type and message of the error of each call."""
    found: dict[str, Any] = {}
    for name, run in wrong.items():
        try:
            run()
            found[name] = "nothing raised"
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def refusals(group: Any) -> dict[str, Any]:
    """Return the messages of the errors of wrong calls."""
    model = model_of("llama", 8, 4)
    batch = documents()
    size = group.size()
    rows = rows_of(batch, size, "contiguous")
    dealt = rows_of(batch, size, "interleaved")  # of which no process has the first rows alone
    positions = batch["position_ids"]

    def call(split: Any, **changes: Any) -> Any:
        part = split.shard(batch)
        return model(
            **{"input_ids": part["input_ids"], "position_ids": part["position_ids"], "use_cache": False} | changes
        )

    def in_context(run: Callable[[Any], Any], rows: Any = rows, **options: Any) -> Callable[[], Any]:
        def wrong() -> None:
            with sequence_parallel(group, rows, positions, **options) as split:
                run(split)

        return wrong

    vectors = batch["startend_row_indices"]
    part = 128 // size
    late = torch.ones(2, part, dtype=torch.int64)
    late[:, -1] = 0
    with sequence_parallel(group, rows, positions) as split:
        shard = split.shard(batch)
    cache = model(batch["input_ids"][:, :4], use_cache=True).past_key_values
    turned = model_of("llama", 8, 4)
    turned.config.rope_parameters["rope_type"] = "dynamic"
    dropping = model_of("dropout", 8, 4)
    wrong: dict[str, Callable[[], Any]] = {
        "rotary positions": in_context(
            lambda split: turned(**{k: v for k, v in split.shard(batch).items() if k != "shift_labels"})
        ),
        "no context": lambda: model(**{k: v for k, v in shard.items() if k != "shift_labels"}, use_cache=False),
        "no vectors": in_context(lambda split: call(split)),
        "vectors of another row": in_context(lambda split: call(split, startend_row_indices=vectors[:, :, : 128 - 8])),
        "vectors of a part": in_context(
            lambda split: call(split, startend_row_indices=vectors[:, :, split.own_rows]), dealt
        ),
        "no positions": in_context(lambda split: call(split, startend_row_indices=vectors, position_ids=None), dealt),
        "other positions": in_context(lambda split: split.shard({**batch, "position_ids": positions + 1})),
        "positions of more rows": in_context(
            lambda split: split.shard({**batch, "position_ids": positions.repeat(2, 1)})
        ),
        "vectors out of range": in_context(
            lambda split: call(split, startend_row_indices=vectors + 100), exchange="keys"
        ),
        "rows of dropout": in_context(
            lambda split: dropping(**{k: v for k, v in split.shard(batch).items() if k != "shift_labels"}),
            dealt,
            exchange="keys",
        ),
        "vectors below 0": in_context(lambda split: call(split, startend_row_indices=vectors - 100), exchange="keys"),
        "cache": in_context(
            lambda split: call(split, startend_row_indices=vectors, past_key_values=cache, position_ids=None)
        ),
        "heads of vectors": in_context(
            lambda split: call(split, startend_row_indices=vectors.expand(-1, 3, -1, -1)), exchange="heads"
        ),
        "no int32": in_context(lambda split: call(split, startend_row_indices=vectors.long())),
        "2D mask": in_context(lambda split: call(split, startend_row_indices=vectors, attention_mask=late)),
        "dense mask": in_context(
            lambda split: call(split, startend_row_indices=vectors, attention_mask=torch.ones(1, 1, part, part) > 0)
        ),
        "labels without a shift": in_context(
            lambda split: call(split, startend_row_indices=vectors, labels=split.shard(batch)["input_ids"])
        ),
        "key": in_context(lambda split: split.shard({**batch, "attention_mask": batch["input_ids"]})),
        "length": in_context(lambda split: split.shard({**batch, "input_ids": batch["input_ids"][:, 1:]})),
        "no vectors in the batch": in_context(lambda split: split.shard({"input_ids": batch["input_ids"]})),
        "exchange": in_context(lambda split: None, exchange="rows"),
        "parts": lambda: sequence_parallel(group, rows[:1], positions).__enter__(),
        "rows twice": lambda: sequence_parallel(group, rows.clamp(max=126), positions).__enter__(),
        "descending": lambda: sequence_parallel(group, rows.flip(1), positions).__enter__(),
        "float rows": lambda: sequence_parallel(group, rows.float(), positions).__enter__(),
        "positions": lambda: sequence_parallel(group, rows, positions[:, 1:]).__enter__(),
    }
    if size == 4:
        six = model_of("llama", 6, 2)
        wrong["6 heads"] = in_context(
            lambda split: six(**{k: v for k, v in split.shard(batch).items() if k != "shift_labels"}, use_cache=False),
            exchange="heads",
        )
    return messages_of(wrong)


def other_batches(group: Any) -> dict[str, Any]:
    """Return the messages of all processes of a new group for batches that differ, and how often they are compared."""
    batch, own = documents(), dist.new_group(list(range(group.size())))
    ids, vectors = batch["input_ids"], batch["startend_row_indices"]
    last = group.rank() == group.size() - 1
    changed = {"tokens": {"input_ids": ids.flip(1)}, "vectors": {"startend_row_indices": vectors.flip(0)}}

    def shard(batch: dict[str, torch.Tensor]) -> None:
        rows = contiguous_rows(ids.shape[1], group.size())
        with sequence_parallel(own, rows, batch["position_ids"]) as split:
            split.shard(batch)

    found: dict[str, Any] = {}
    with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gather:
        for name, change in changed.items():
            messages = messages_of({name: lambda change=change: shard({**batch, **(change if last else {})})})
            found[name] = [""] * group.size()
            dist.all_gather_object(found[name], messages[name])
        before = gather.call_count
        for _ in range(3):
            shard(batch)
        found["comparisons"] = gather.call_count - before
    return found


CASES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "documents": snippet,
    "exchange of heads": compare(exchange="heads"),
    "exchange of keys": compare(exchange="keys"),
    "heads, interleaved rows": compare(exchange="heads", layout="interleaved"),
    "heads, parts in another order": compare(exchange="heads", layout="reversed"),
    "keys, interleaved rows": compare(exchange="keys", layout="interleaved"),
    "keys, contiguous rows": compare(exchange="keys", layout="contiguous"),
    "keys, parts in another order": compare(exchange="keys", layout="reversed"),
    "one key-value head": compare(kv_heads=1, exchange="heads"),
    "two key-value heads": compare(kv_heads=2, exchange="heads"),
    "6 heads": compare(heads=6, kv_heads=2),
    "6 heads without groups": compare(heads=6, kv_heads=6),
    "trees, heads": compare(batch=trees, exchange="heads"),
    "trees, keys": compare(batch=trees, exchange="keys", layout="interleaved"),
    "prefixes, heads": compare(batch=prefix_documents, exchange="heads"),
    "prefixes, keys": compare(batch=prefix_documents, exchange="keys", layout="interleaved"),
    "window, heads": compare("mistral", exchange="heads"),
    "window, keys": compare("mistral", exchange="keys"),
    "trees in a window, heads": compare("mistral", batch=trees, exchange="heads"),
    "trees in a window, keys": compare("mistral", batch=trees, exchange="keys", layout="interleaved"),
    "window and softcap, heads": compare("gemma2", exchange="heads"),
    "window and softcap, keys": compare("gemma2", exchange="keys"),
    "window and sinks, heads": compare("gpt_oss", exchange="heads"),
    "window and sinks, keys": compare("gpt_oss", exchange="keys"),
    "vectors per head, keys": compare(batch=lambda: vectors_per_head(8), exchange="keys"),
    "checkpointing": compare(exchange="heads", prepare=checkpointed({"use_reentrant": False})),
    "checkpointing, keys": compare(
        exchange="keys", layout="interleaved", prepare=checkpointed({"use_reentrant": False})
    ),
    "checkpointing that keeps attention": compare(
        exchange="keys", prepare=checkpointed({"use_reentrant": False, "context_fn": flashmask_hf.keep_attention})
    ),
    "dropout, heads": compare("dropout", exchange="heads", layout="reversed"),
    "dropout, keys": compare(
        "dropout",
        exchange="keys",
        layout="reversed",
        prepare=checkpointed({"use_reentrant": False, "context_fn": flashmask_hf.keep_attention}),
    ),
    "tensor parallel": tensor_parallel("dropout"),
    "tensor parallel, trees in a window": tensor_parallel("mistral", trees),
    "tensor parallel refusals": refused_vectors_per_head,
    "two layouts": two_layouts,
    "compiled": compiled,
    "no positions": no_positions,
    "whole rows": whole_row_calls,
    "refusals": refusals,
    "other batches": other_batches,
}

GROUPS = {name: (4,) for name in CASES if ", " in name} | {"compiled": (2,)}
GROUPS |= {name: (2,) for name in CASES if name.startswith("tensor parallel,")}
"""Groups of 4 run everything but what takes long, groups of 2 a case of each kind."""
