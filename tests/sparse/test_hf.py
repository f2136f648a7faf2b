"""Hash-sparse attention and dropped queries and keys as the attention of a model."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tools.tiny import assert_exact, assert_same_gradients, llama_config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, MistralConfig
from transformers.utils import generic

from flashmask_hf import FlashMask, masks
from flashmask_hf.hf import attention, keywords
from flashmask_hf.hf.mask_hook import mask_hook
from flashmask_hf.long_rows.checkpointing import enable_checkpointing
from flashmask_hf.sparse import directions as drawing
from flashmask_hf.sparse import hf as sparse_backend
from flashmask_hf.sparse.directions import lsh_directions
from flashmask_hf.sparse.hf import hash_attention_forward, qk_attention_forward


@pytest.fixture(autouse=True)
def _isolate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start with the same random state, no keyword warned of and no compiled code."""
    torch.manual_seed(0)
    monkeypatch.setattr(keywords, "_warned", set())
    monkeypatch.setattr(attention, "_checked", set())
    torch.compiler.reset()
    yield
    torch.compiler.reset()


LENGTH = 24
WINDOW = 6
OPTIONS = {"flashmask_hash": {"n_buckets": 4}, "flashmask_qk": {"drop": 0.4}}


def model_with(attention: str, *, window: bool = False, **changes: Any) -> Any:
    """Return a random model, always the same, whose attention is far from uniform."""
    config: Any = llama_config(**changes)
    if window:
        config = MistralConfig(**{**config.to_diff_dict(), "sliding_window": WINDOW, "model_type": "mistral"})
    for name, options in OPTIONS.items() if attention in OPTIONS else ():
        setattr(config, name, options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(1))


def layer(config: Any = None, **attributes: Any) -> Any:
    module: Any = nn.Module()
    module.config = config or types.SimpleNamespace(**OPTIONS)
    for name, value in {"is_causal": True, "layer_idx": 1, **attributes}.items():
        setattr(module, name, value)
    return module


def heads(q_len: int = LENGTH, kv_len: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries of 4 heads, keys and values of 2."""
    return tuple(
        torch.randn(2, h, n, 8, dtype=torch.float64, requires_grad=True)
        for h, n in ((4, q_len), (2, kv_len), (2, kv_len))
    )  # type: ignore[return-value]


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Return the output [B, Sq, Hq, D] of eager attention under a bool mask [B, Hq, Sq, Skv]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
        visible = nn.functional.pad(visible, (0, 1), value=True)
    return (scores.softmax(-1).masked_fill(~visible, 0.0) @ v).transpose(1, 2)


def assert_same_layer(got: Tensor, want: Tensor, leaves: list[Tensor]) -> None:
    assert_exact([got], [want])
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(2))
    assert_exact(*(torch.autograd.grad((out * weight).sum(), leaves) for out in (got, want)))


# Registration and options


@pytest.mark.parametrize("name", OPTIONS)
def test_registered_and_not_flash_attention(name):
    assert AttentionInterface()[name] in (hash_attention_forward, qk_attention_forward)
    assert AttentionMaskInterface()[name] is mask_hook
    assert not generic.is_flash_attention_requested(requested_attention_implementation=name)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_saved_and_loaded(tmp_path, name):
    plain = AutoModelForCausalLM.from_config(llama_config())
    plain.save_pretrained(tmp_path / "plain")
    assert "flashmask" not in (tmp_path / "plain" / "config.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation=name, **{name: OPTIONS[name]})
    assert getattr(model.config, name) == OPTIONS[name]
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.save_pretrained(tmp_path / "sparse")
    assert getattr(AutoConfig.from_pretrained(tmp_path / "sparse"), name) == OPTIONS[name]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse", attn_implementation=name)
    assert torch.equal(again(tokens()).logits, model.eval()(tokens()).logits)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_the_attention_does_not_read_warn(tmp_path, name):
    """A config is saved without the name of its attention."""
    model_with(name).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    model.config.flashmask_hash, model.config.flashmask_qk = (OPTIONS[x] if x == name else None for x in OPTIONS)
    if name == "flashmask_qk":
        model.eval()(tokens())  # full attention is right in evaluation
        model.train()
    with pytest.warns(UserWarning, match=f"^config.{name} has options.*attn_implementation='sdpa' is full attention"):
        model(tokens())
    model(tokens())  # no second warning
    model.set_attn_implementation(name)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    again.config.flashmask_hash = again.config.flashmask_qk = None
    again(tokens())


def test_keywords_win_over_the_config():
    model, other = model_with("flashmask_hash"), model_with("flashmask_hash")
    other.config.flashmask_hash = {"n_buckets": 8, "seed": 3}
    got = model(tokens(), flashmask_hash=other.config.flashmask_hash).logits
    assert torch.equal(got, other(tokens()).logits)
    assert not torch.equal(got, model(tokens()).logits)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("flashmask_hash", None, ValueError, r"lacks 'n_buckets'; set config.flashmask_hash = \{'n_buckets': \.\.\.\}"),
        ("flashmask_hash", {"seed": 1}, ValueError, "flashmask_hash lacks 'n_buckets'"),
        ("flashmask_hash", {"n_buckets": 3}, ValueError, r"flashmask_hash\['n_buckets'\] must be even.*got 3"),
        ("flashmask_hash", {"n_buckets": 1}, ValueError, "attn_implementation='flashmask' for one bucket"),
        ("flashmask_hash", {"n_buckets": 4.0}, TypeError, r"\['n_buckets'\] must be an int, got 4\.0"),
        ("flashmask_hash", {"n_buckets": 4, "seed": -1}, ValueError, r"\['seed'\] must be in 0"),
        ("flashmask_hash", {"n_buckets": 4, "seed": "a"}, TypeError, r"\['seed'\] must be an int, got 'a'"),
        ("flashmask_hash", {"n_buckets": 4, "exclude_self": 1}, TypeError, r"\['exclude_self'\] must be True or False"),
        ("flashmask_hash", {"n_buckets": 4, "shared_qk": 0}, TypeError, r"\['shared_qk'\] must be True or False"),
        ("flashmask_hash", {"n_buckets": 4, "buckets": 4}, ValueError, "no option 'buckets'; it takes 'n_buckets'"),
        ("flashmask_hash", 16, TypeError, "flashmask_hash must be a dict of options, got int"),
        ("flashmask_qk", None, ValueError, r"lacks 'drop'; set config.flashmask_qk = \{'drop': \.\.\.\}"),
        ("flashmask_qk", {"drop": 1.5}, ValueError, r"flashmask_qk\['drop'\] is a probability.*got 1.5"),
        ("flashmask_qk", {"drop": True}, TypeError, r"flashmask_qk\['drop'\] must be a number, got bool"),
        ("flashmask_qk", {"drop": 0.1, "seed": 1}, ValueError, "flashmask_qk has no option 'seed'"),
    ],
)
def test_wrong_options_are_refused(name, options, error, message):
    model = model_with(name).train()
    setattr(model.config, name, options)
    with pytest.raises(error, match=message):
        model(tokens())
    if options is not None:  # without options, evaluation of "flashmask_qk" is full attention
        with pytest.raises(error, match=message):
            model.eval()(tokens())


# One layer


@pytest.mark.parametrize(
    ("options", "q_len", "softcap", "with_sinks"),
    [
        ({"n_buckets": 4}, LENGTH, None, False),
        ({"n_buckets": 6, "seed": 5, "exclude_self": True}, LENGTH, None, True),
        ({"n_buckets": 2}, 5, 3.0, False),
    ],
)
def test_hash_layer(options, q_len, softcap, with_sinks):
    """Queries and keys are hashed by the same directions, which all heads that share a key use."""
    q, k, v = heads(q_len)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if with_sinks else None
    config = types.SimpleNamespace(flashmask_hash=options)
    out, weights = hash_attention_forward(layer(config), q, k, v, None, softcap=softcap, s_aux=sinks)
    assert weights is None
    together = torch.cat([q.unflatten(1, (2, 2)).flatten(2, 3), k], 2)
    directions = lsh_directions(k.detach(), options.get("seed", 0), 1, options["n_buckets"] // 2)
    along = together @ directions
    bucket = torch.cat([along, -along], -1).argmax(-1)
    q_bucket = bucket[:, :, : 2 * q_len].unflatten(2, (2, q_len)).flatten(1, 2)
    k_bucket = bucket[:, :, 2 * q_len :].repeat_interleave(2, 1)
    ahead = torch.arange(q_len)[:, None] + LENGTH - q_len - torch.arange(LENGTH)
    causal = ahead > 0 if options.get("exclude_self") else ahead >= 0
    visible = causal & (q_bucket[..., :, None] == k_bucket[..., None, :])
    assert_same_layer(out, dense(q, k, v, visible, softcap, sinks), [q, k, v] if sinks is None else [q, k, v, sinks])
    if sinks is None:
        assert (out.transpose(1, 2)[~visible.any(-1)] == 0).all()


@pytest.mark.parametrize("q_len", [LENGTH, 5], ids=["all", "after a cache"])
def test_shared_qk_hashes_normalised_queries_once(monkeypatch: pytest.MonkeyPatch, q_len: int):
    hashed = []
    nearest = sparse_backend.nearest
    monkeypatch.setattr(sparse_backend, "nearest", lambda x, to: hashed.append(x.shape) or nearest(x, to))
    k = torch.nn.functional.normalize(torch.randn(2, 4, LENGTH, 8, dtype=torch.float64), dim=-1)
    q, v = 3 * k[:, :, -q_len:], torch.randn(2, 4, LENGTH, 8, dtype=torch.float64)
    found = []
    for shared in (False, True):
        hashed.clear()
        config = types.SimpleNamespace(flashmask_hash={"n_buckets": 4, "shared_qk": shared})
        found.append(hash_attention_forward(layer(config), q, k, v, None)[0])
        assert len(hashed) == (1 if shared and q_len == LENGTH else 2)
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_qk_layer_keeps_the_given_rows(training):
    q, k, v = heads()
    q_keep, k_keep = torch.rand(2, 4, LENGTH) < 0.6, torch.rand(2, 2, LENGTH) < 0.6
    module = layer(types.SimpleNamespace()).train(training)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    out, _ = qk_attention_forward(module, q, k, v, None, q_keep=q_keep, k_keep=k_keep, softcap=2.0, s_aux=sinks)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    visible = causal & q_keep[..., None] & k_keep.repeat_interleave(2, 1)[..., None, :]
    want = dense(q, k, v, visible, 2.0, sinks) * q_keep.transpose(1, 2)[..., None]
    assert_same_layer(out, want, [q, k, v, sinks])


def test_qk_layer_draws_at_every_call(monkeypatch):
    drawn: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, q_keep: Tensor, k_keep: Tensor, **_: Any) -> Tensor:
        drawn.extend((q_keep, k_keep))
        return q

    monkeypatch.setattr(sparse_backend, "qk_sparse_attention", attend)
    x = torch.randn(2, 4, 500, 8)
    for _ in range(2):
        qk_attention_forward(layer(), x, x, x, None)
    assert [keep.float().mean().item() for keep in drawn] == pytest.approx([0.6] * 4, abs=0.03)
    rows = torch.cat(drawn).flatten(0, 1).double()  # of every head, batch entry, side and call
    together = rows @ rows.T / rows.shape[1]
    assert together.fill_diagonal_(0.36).sub(0.36).abs().max() < 0.12  # they are independent


def test_directions_of_layers_heads_and_seeds_differ():
    key = torch.zeros(1, 2, 5, 8, dtype=torch.bfloat16)
    drawn = [lsh_directions(key, seed, index, 3) for seed in (0, 1) for index in (0, 1)]
    every = [heads for directions in drawn for heads in directions]
    assert all(x.shape == (8, 3) and x.dtype == torch.bfloat16 for x in every)
    assert not any(torch.equal(x, y) for i, x in enumerate(every) for y in every[:i])
    assert torch.equal(lsh_directions(key, 1, 0, 3), drawn[2])


def test_a_layer_of_fake_tensors():
    with FakeTensorMode():
        q, k, v = heads()
        out, _ = hash_attention_forward(layer(), q, k, v, None)
    assert type(out) is FakeTensor
    assert out.shape == (2, LENGTH, 4, 8)


def test_directions_are_even_on_the_sphere_and_independent():
    x = torch.empty(1, 64, 1, 64, dtype=torch.float64)
    drawn = lsh_directions(x, 2**32 - 1, 3, 64)
    torch.testing.assert_close(drawn.norm(dim=1), torch.ones(64, 64, dtype=torch.float64))
    vectors = 8 * drawn.mT.flatten(0, 1)  # 4096 of 64 dimensions
    assert vectors.mean().abs() < 0.01
    assert (vectors**4).mean().sub(3 * 64 / 66).abs() < 0.1
    assert (vectors.mT @ vectors / len(vectors) - torch.eye(64)).abs().max() < 0.1
    other = lsh_directions(x, 2**32 - 1, 4, 64)
    assert (64 * drawn * other).mean().abs() < 0.01


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("meta")], ids=["inference", "meta"])
def test_directions_are_drawn_once_and_follow_no_state_of_torch(monkeypatch: pytest.MonkeyPatch, mode):
    """Neither a random state nor a mode of torch has an effect, so every process has the same ones."""
    monkeypatch.setattr(drawing, "_drawn", {})
    key = torch.zeros(1, 2, 5, 8)
    want = lsh_directions(key, 7, 1, 4)
    drawing._drawn.clear()
    torch.manual_seed(5)
    with mode():
        lsh_directions(key, 7, 1, 4)
    again = lsh_directions(key, 7, 1, 4)
    assert type(again) is Tensor
    assert not again.is_inference()
    assert torch.equal(again, want)
    assert len(drawing._drawn) == 1
    again.zero_()
    assert torch.equal(lsh_directions(key, 7, 1, 4), want)


def test_directions_are_an_operator():
    torch.library.opcheck(lsh_directions, (torch.randn(2, 3, 5, 8, dtype=torch.bfloat16), 7, 1, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_has_the_directions_of_the_cpu_and_a_graph_copies_them(dtype):
    x = torch.zeros(1, 2, 5, 8, dtype=dtype)
    want, key = lsh_directions(x, 7, 1, 4), x.cuda()
    assert torch.equal(lsh_directions(key, 7, 1, 4).cpu(), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = lsh_directions(key, 7, 1, 4)
    graph.replay()
    assert torch.equal(captured.cpu(), want)


# Models


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_the_gpu_computes_what_the_cpu_does(name):
    """Loss and gradients are equal in float32, with packed documents and the same rows kept."""
    ids, positions = tokens(2), torch.cat([torch.arange(n) for n in (9, 12, 3)])[None].expand(2, -1)
    keeps = {"q_keep": torch.rand(2, 4, LENGTH) > 0.3, "k_keep": torch.rand(2, 2, LENGTH) > 0.3}
    found = []
    for device in ("cpu", "cuda"):
        model = model_with(name).train().to(device)
        more = {key: keep.to(device) for key, keep in keeps.items()} if name == "flashmask_qk" else {}
        given = ids.to(device)
        loss = model(given, position_ids=positions.to(device), labels=given, use_cache=False, **more).loss
        loss.backward()
        found.append([loss.detach().cpu(), *(x.grad.cpu() for x in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("how", ["evaluation", "drop 0"])
def test_nothing_dropped_is_flashmask(how):
    model, full = model_with("flashmask_qk"), model_with("flashmask")
    if how == "drop 0":
        model.train().config.flashmask_qk = {"drop": 0}
    assert torch.equal(model(tokens()).logits, full(tokens()).logits)
    model.train().config.flashmask_qk = {"drop": 0.4}
    assert not torch.equal(model(tokens()).logits, full(tokens()).logits)


def inputs_of(kind: str) -> dict[str, Any]:
    if kind == "positions":
        return {"position_ids": torch.cat([torch.arange(n) for n in (9, 12, 3)])[None].expand(2, -1)}
    if kind == "vectors":
        return {"startend_row_indices": masks.causal_document([9, 12, 3]).indices}
    if kind == "tree":  # the answers follow the question in position
        positions = torch.cat([torch.arange(9), torch.arange(9, 16), torch.arange(9, 17)])[None]
        return {"startend_row_indices": masks.share_question([(9, [7, 8])]).indices, "position_ids": positions}
    real = torch.ones(2, LENGTH, dtype=torch.int64)
    if kind == "left padding":
        real[0, :7] = 0
    if kind == "right padding":
        real[1, -7:] = 0
    return {"attention_mask": real}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("window", [False, True], ids=["full", "window"])
@pytest.mark.parametrize("kind", ["no mask", "positions", "vectors", "tree", "left padding", "right padding"])
@pytest.mark.parametrize("name", OPTIONS)
def test_masks_are_those_of_flashmask(monkeypatch, name, kind, window):
    """All tokens in one bucket, or all kept, give the results of "flashmask"."""
    monkeypatch.setattr(sparse_backend, "nearest", lambda x, _: torch.zeros(x.shape[:-1], dtype=torch.int64))
    model, full = (model_with(attention, window=window).double() for attention in (name, "flashmask"))
    inputs = inputs_of(kind)
    keep = {}
    if name == "flashmask_qk":
        keep = {f"{x}_keep": torch.ones(2, h, LENGTH, dtype=torch.bool) for x, h in (("q", 4), ("k", 2))}
    if window and kind == "tree":
        with pytest.raises(NotImplementedError, match=f"'{name}' takes causal masks with n = 1.*deeper than a sliding"):
            model(tokens(), **inputs, **keep)
        return
    got = model(tokens(), **inputs, **keep).logits
    real = inputs["attention_mask"].bool() if "attention_mask" in inputs else torch.ones(2, LENGTH, dtype=torch.bool)
    assert_exact([got[real]], [full(tokens(), **inputs).logits[real]])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("cached", [False, True])
def test_documents_do_not_see_each_other(cached):
    """Packed equals separate, and changing one document changes at most the rounding in the others."""
    model, ids = model_with("flashmask_hash").double(), tokens(1)
    positions = torch.cat([torch.arange(n) for n in (9, 12, 3)])[None]
    got = model(ids, position_ids=positions, use_cache=cached).logits
    assert_exact([got[:, 9:21]], [model(ids[:, 9:21]).logits])
    other = ids.clone()
    other[:, 9:21] = 3
    changed = model(other, position_ids=positions, use_cache=cached).logits
    for same in (slice(0, 9), slice(21, None)):
        assert_exact([changed[:, same]], [got[:, same]])
    assert not torch.equal(changed[:, 9:21], got[:, 9:21])


@pytest.mark.parametrize("name", OPTIONS)
def test_masks_that_cannot_be_sorted_are_refused(name):
    hidden = FlashMask(torch.tensor([[9, 12]], dtype=torch.int32).expand(1, 1, LENGTH, 2).contiguous(), causal=True)
    model = model_with(name).train()
    with pytest.raises(NotImplementedError, match=f"'{name}' takes causal masks.*got causal, n = 2"):
        model(tokens(), startend_row_indices=hidden.indices)
    with pytest.raises(NotImplementedError, match=r"got not causal, n = 4; use 'flashmask'"):
        model(tokens(), startend_row_indices=masks.global_sliding_window(LENGTH, 2, 4).indices)


def test_refusals_name_the_implementation():
    unfit = types.SimpleNamespace(model_type="whisper", _attn_implementation="flashmask_hash")
    config = type("Unfit", (), vars(unfit))()
    with pytest.raises(NotImplementedError, match="attn_implementation='flashmask_hash' refuses them"):
        mask_hook(batch_size=1, q_length=2, kv_length=2, config=config)


def test_layers_and_keywords_that_do_not_fit_are_refused():
    q, k, v = heads()
    with pytest.raises(NotImplementedError, match=r"'flashmask_hash'.*not causal"):
        hash_attention_forward(layer(is_causal=False), q, k, v, None)
    with pytest.raises(NotImplementedError, match=r"dropout=0.1 is not implemented .*'flashmask_qk'; load the model"):
        qk_attention_forward(layer(), q, k, v, None, dropout=0.1)
    with pytest.raises(NotImplementedError, match=r"block_mask.*'flashmask_hash'"):
        hash_attention_forward(layer(), q, k, v, None, block_mask=1)
    with pytest.raises(ValueError, match="q_keep and k_keep must be given together"):
        qk_attention_forward(layer(), q, k, v, None, q_keep=torch.ones(2, 4, LENGTH, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="a static cache makes such masks"):
        model_with("flashmask_hash").generate(
            tokens(), max_new_tokens=2, do_sample=False, cache_implementation="static", disable_compile=True
        )


@pytest.mark.parametrize("padding", ["none", "left"])
def test_greedy_generation_equals_forwards_without_a_cache(padding):
    model, ids = model_with("flashmask_hash", eos_token_id=None).double(), tokens(3, 9)
    real = torch.ones_like(ids)
    if padding == "left":
        real[0, :4], real[1, :2] = 0, 0
    want = ids
    for _ in range(10):
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        logits = model(want, attention_mask=real, position_ids=positions, use_cache=False).logits[:, -1]
        want = torch.cat([want, logits.argmax(-1, keepdim=True)], 1)
        real = nn.functional.pad(real, (0, 1), value=1)
    got = model.generate(ids, attention_mask=real[:, :9], max_new_tokens=10, do_sample=False)
    assert torch.equal(got, want)
    assert len(set(got[:, 9:].flatten().tolist())) > 3


def gradients(model: Any, run: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and every parameter's gradient, with the same rows dropped at every call."""
    model.zero_grad()
    torch.manual_seed(3)
    loss = (model if run is None else run)(tokens(), labels=tokens(), use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: copy.deepcopy(x.grad) for name, x in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradient_checkpointing_repeats_the_pattern(name, reentrant):
    model = model_with(name).train()
    loss, want = gradients(model)
    enable_checkpointing(model, {"use_reentrant": reentrant})
    again, got = gradients(model)
    assert torch.equal(again, loss)
    for parameter, gradient in want.items():
        assert torch.equal(got[parameter], gradient), parameter


@pytest.mark.usefixtures("float64")
def test_a_compiled_model_is_one_graph():
    model = model_with("flashmask_hash").double().train()
    loss, want = gradients(model)
    again, got = gradients(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert_exact([again], [loss])
    assert_same_gradients(got, want)


@pytest.mark.full
def test_a_compiled_model_draws_at_every_call():
    model = model_with("flashmask_qk").train()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    losses = [run(tokens(), labels=tokens(), use_cache=False).loss.item() for _ in range(3)]
    assert len(set(losses)) == 3


def test_under_autocast():
    model = model_with("flashmask_hash")
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens()).logits
    want = model(tokens()).logits
    # Rounding moves a few tokens to another bucket.
    assert nn.functional.cosine_similarity(logits.float(), want, dim=-1).median() > 0.9
