"""Modules in tiles of tokens: results and gradients of the plain model, one recomputation, and little memory."""

from __future__ import annotations

import copy
import gc
import pickle
from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tools.processes import result, run_cases
from tools.support import requires
from tools.tiny import EXACT, TRAINER_WARNINGS, assert_exact, assert_same_gradients, gradients_of
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from flashmask_hf.long_rows import keep_attention, tile_tokens
from flashmask_hf.long_rows.checkpointing import enable_checkpointing

pytestmark = [
    *TRAINER_WARNINGS,
    pytest.mark.filterwarnings("ignore:only norms are tiled:UserWarning"),
    # TorchDynamo reads .grad of the inputs of compiled layers
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def _float64(float64, request):
    """Compute in float64, norms included, but on a GPU."""
    torch.set_default_dtype(torch.float32 if request.node.get_closest_marker("gpu") else torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


TOKENS = 5
SHAPE = (2, 11)  # five tiles, one of which has tokens of both rows, and one two tokens
TILES = 5
LAYERS = 2
REENTRANT, ONCE = {"use_reentrant": True}, {"use_reentrant": False}
KEEPING = {"use_reentrant": False, "context_fn": keep_attention}


def model_of(family="llama", attention="sdpa", **changes):
    torch.manual_seed(0)
    settings = dict(
        vocab_size=48, hidden_size=16, intermediate_size=40, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    config = AutoConfig.for_model(family, **(settings | changes))
    options = {"attn_implementation": attention, "experts_implementation": "eager"}  # others take no float64
    model = AutoModelForCausalLM.from_config(config, **options).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return model


def tiled(model, tokens=TOKENS):
    model = copy.deepcopy(model)
    tile_tokens(model, tokens)
    return model


def with_adapter(model, dropout=0.0):
    config = LoraConfig(r=2, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
    return get_peft_model(model, config)


def tokens_of(shape=SHAPE):
    return torch.randint(3, 48, shape, generator=torch.Generator().manual_seed(1))


def gradients(model, run=None, ids=None):
    """Return the loss and the gradients by the names of the parameters."""
    ids = tokens_of() if ids is None else ids
    model.zero_grad()
    loss = (model if run is None else run)(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got, want):
    assert_exact([got[0]], [want[0]])
    assert_same_gradients(got[1], want[1])


def count_calls(model):
    """Return a counter of the calls of projections in MLPs."""
    calls = Counter()
    for name, module in model.named_modules():
        if name.endswith("mlp.down_proj"):
            module.register_forward_hook(lambda *args: calls.update(["calls"]))
    return calls


class Inner(nn.Module):
    """A gated MLP of its own parts."""

    def __init__(self, width=16, inner=24, **changes):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down_proj = nn.Linear(inner, width)
        for name, value in changes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


def inputs(*shape, requires_grad=True, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(**options).requires_grad_(requires_grad)


# Results


NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
LAYER = ["input_layernorm", "post_attention_layernorm"]


@pytest.mark.parametrize(
    ("family", "changes", "parts"),
    [
        ("llama", {}, [*LAYER, "mlp"]),
        ("mistral", {"sliding_window": 4}, [*LAYER, "mlp"]),
        ("phi3", {}, [*LAYER, "mlp"]),
        ("gemma", {}, [*LAYER, "mlp"]),
        ("gemma2", {}, [*LAYER, "mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"]),
        ("qwen3", {}, [*LAYER, "mlp", "self_attn.q_norm", "self_attn.k_norm"]),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, LAYER),
        ("gpt2", {"n_embd": 16, "n_layer": LAYERS, "n_head": 2, **NO_DROPOUT}, ["ln_1", "ln_2"]),
    ],
)
def test_results_equal_those_of_the_plain_model(family, changes, parts):
    plain = model_of(family, "eager" if family in ("gemma2", "gpt_oss") else "sdpa", **changes)
    model = copy.deepcopy(plain)
    names = tile_tokens(model, TOKENS)
    root, final = ("transformer.h", "transformer.ln_f") if family == "gpt2" else ("model.layers", "model.norm")
    assert sorted(names) == sorted([final, *(f"{root}.{i}.{part}" for i in range(LAYERS) for part in parts)])
    want = gradients(plain)
    assert_same(gradients(model), want)
    assert_same(gradients(enable_checkpointing(model, ONCE)), want)
    assert model.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("adapter", [None, "before", "after"])
@pytest.mark.parametrize("options", [None, REENTRANT, ONCE, KEEPING], ids=["plain", "reentrant", "once", "keeping"])
def test_checkpointing_and_adapters(options, adapter):
    plain = model_of(attention="flashmask" if options is KEEPING else "sdpa")
    model = copy.deepcopy(plain)
    if adapter == "after":
        tile_tokens(model, TOKENS)
    if adapter:
        torch.manual_seed(1)
        plain = with_adapter(plain)
        torch.manual_seed(1)
        model = with_adapter(model)
        model.enable_input_require_grads()
    if adapter != "after":
        tile_tokens(model, TOKENS)
    if options:
        enable_checkpointing(model, options)
    assert_same(gradients(model), gradients(plain))


@pytest.mark.parametrize("shape", [(7, 16), (1, 7, 16), (2, 3, 16), (2, 4, 3, 16), (1, 6, 16), (12, 16)])
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm, Inner])
def test_input_gradients_are_equal_to_the_bit(norm, shape):
    """Also of inputs and gradients that are not contiguous."""
    torch.manual_seed(0)
    plain = norm(16).double()
    model = tiled(plain, 3)
    for layout in (lambda x: x, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)):
        results = []
        for module in (plain, model):
            x = inputs(*shape, dtype=torch.double)
            out = module(layout(x))
            out.transpose(0, 1).pow(3).sum().backward()
            results.append((out, x.grad))
        for got, want in zip(results[1], results[0], strict=True):
            assert got.shape == want.shape
            if norm is Inner:  # a linear layer may choose another kernel for fewer rows
                assert_exact([got], [want])
            else:
                assert torch.equal(got, want)


def test_dropout_is_the_same_in_the_backward():
    """A tiled call equals calls of the plain module on its tiles, and moves the random state once."""
    mlp = with_adapter(nn.ModuleList([Inner()]), dropout=0.5).base_model.model[0].train()
    model = tiled(mlp, 3)
    x, y = inputs(2, 5, 16), inputs(2, 5, 16)
    torch.manual_seed(7)
    want = torch.cat([mlp(tile) for tile in x.flatten(0, 1)[None].split(3, 1)], 1).view_as(x)
    torch.manual_seed(7)
    got = model(y)
    assert torch.equal(got, want)
    state = torch.get_rng_state()
    torch.rand(3)
    moved = torch.get_rng_state()
    got.pow(2).sum().backward()
    assert torch.equal(torch.get_rng_state(), moved)
    want.pow(2).sum().backward()
    torch.set_rng_state(state)
    got, want = ([x.grad for x in (z, *part.parameters()) if x.requires_grad] for z, part in ((y, model), (x, mlp)))
    assert_exact(got, want)


@pytest.mark.parametrize("options", [REENTRANT, ONCE, KEEPING], ids=["reentrant", "once", "keeping"])
def test_dropout_under_checkpointing(options):
    """The gradient of the checkpointed model is that of the same tiles without checkpointing."""
    model = with_adapter(tiled(model_of(attention="flashmask")), dropout=0.5)
    model.enable_input_require_grads()
    results = []
    for kept in (None, options):
        if kept:
            enable_checkpointing(model, kept)
        torch.manual_seed(5)
        results.append(gradients(model))
    assert_same(*results)


def test_gradients_of_weights_are_summed_in_float32(monkeypatch):
    """A sum of 64 tiles in bfloat16 would err by several percent."""
    monkeypatch.undo()  # float32 stays float32
    torch.manual_seed(0)
    mlp, norm = Inner().bfloat16(), nn.RMSNorm(16).bfloat16()
    x = inputs(1, 512, 16, dtype=torch.bfloat16, requires_grad=False) + 1
    for module in (mlp, norm):
        exact, model = copy.deepcopy(module).double(), tiled(module, 8)
        for run, y in ((module, x), (model, x), (exact, x.double())):
            run(y).sum().backward()
        for p, q, r in zip(module.parameters(), model.parameters(), exact.parameters(), strict=True):
            assert q.grad.dtype == torch.bfloat16
            scale = r.grad.abs().max()
            plain, error = ((z.grad - r.grad).abs().max() / scale for z in (p, q))
            assert error <= 2 * plain + 2**-8


def test_autocast_is_the_same_in_the_backward(monkeypatch):
    """And its cache of weights keeps their history for a short call, which runs untiled."""
    monkeypatch.undo()  # float32 stays float32
    torch.manual_seed(0)
    plain = Inner().float()
    model = tiled(plain, 8)
    results = []
    for module in (plain, model):
        x, y = (inputs(1, n, 16, dtype=torch.float32) for n in (20, 4))
        with torch.autocast("cpu", torch.bfloat16):
            long, short = module(x), module(y)
        assert long.dtype == short.dtype == torch.bfloat16
        (long.float().sum() + short.float().sum()).backward()
        results.append([long, x.grad, y.grad, *(p.grad for p in module.parameters())])
    for got, want in zip(*results[::-1], strict=True):
        assert got.dtype == want.dtype
        # Gradients of 3 tiles, of the whole row, and of it and the short call are rounded to bfloat16.
        torch.testing.assert_close(got, want, rtol=0, atol=5 * 2**-8 * want.abs().max().item())
    assert torch.equal(results[0][0], results[1][0])
    # Without autocast in the backward the gradients would be float32's.
    assert torch.equal(results[0][1], results[1][1])


# Recomputation


class Kept:
    """Tensors that saved-tensor hooks keep elsewhere."""

    def __init__(self):
        self.tensors = []

    def pack(self, x):
        self.tensors.append(x.detach().clone())
        return len(self.tensors) - 1

    def unpack(self, place):
        return self.tensors[place]


@pytest.mark.filterwarnings(
    "ignore:A saved_tensors_hooks context:FutureWarning"
)  # torch 2.15: they do not see attention
@pytest.mark.parametrize("hooks", [False, True], ids=["", "hooks"])
@pytest.mark.parametrize(
    ("options", "adapter", "backward"),
    [
        (None, False, 1),
        (ONCE, False, 1),
        (ONCE, True, 1),
        (KEEPING, False, 1),
        (KEEPING, True, 1),
        (REENTRANT, True, 2),
    ],
    ids=["plain", "once", "once-adapter", "keeping", "keeping-adapter", "reentrant-adapter"],
)
def test_a_tile_runs_once_in_the_forward_and_once_in_the_backward(options, adapter, backward, hooks):
    """The recomputation of a layer stops before its MLP. Reentrant checkpointing has no such stop."""
    model = model_of(attention="flashmask")
    if adapter:
        model = with_adapter(model)
        model.enable_input_require_grads()
    tile_tokens(model, TOKENS)
    want = gradients(model)
    if options:
        enable_checkpointing(model, options)
    calls, kept = count_calls(model), Kept()
    ids = tokens_of()
    model.zero_grad()
    context = torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack) if hooks else torch.enable_grad()
    with context:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert calls["calls"] == LAYERS * TILES
    loss.backward()
    assert calls["calls"] == (1 + backward) * LAYERS * TILES
    assert_same((loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}), want)


def test_saved_tensor_hooks_see_the_input_only():
    """A hook that offloads gets no weight and no result of a tile."""
    kept, model = Kept(), tiled(Inner(), 3)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        model(inputs(1, 10, 16))
    assert [tuple(x.shape) for x in kept.tensors] == [(1, 10, 16)]


def test_inputs_are_released_by_the_backward():
    model, x = tiled(Inner(), 3), inputs(1, 10, 16)
    y = x * 2
    storage = torch.UntypedStorage._weak_ref(y.untyped_storage())
    out = model(y)
    del y
    assert not torch.UntypedStorage._expired(storage)
    out.sum().backward(retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    out.sum().backward()
    assert torch.equal(x.grad, first)
    assert torch.UntypedStorage._expired(storage)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


class Largest(TorchDispatchMode):
    """Mode that notes the largest number of elements of a result, and that of results of float32."""

    def __init__(self):
        super().__init__()
        self.numel, self.wide = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
                self.wide = max(self.wide, x.numel() if x.dtype == torch.float32 else 0)
        return out


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_no_result_of_a_whole_row_is_held(family, monkeypatch):
    """But inputs, outputs and their gradients: not the MLP's inner results, not a norm's float32 copy."""
    monkeypatch.undo()  # float32 stays float32
    row, tokens, width, inner = 1000, 10, 16, 100
    model = model_of(family, hidden_size=width, intermediate_size=inner, vocab_size=16).bfloat16()
    layer = model.model.layers[0]
    plain = Largest()
    x = inputs(1, row, width, dtype=torch.bfloat16)
    with plain:
        layer.mlp(layer.input_layernorm(x)).sum().backward()
    assert plain.numel >= row * inner
    assert plain.wide >= row * width
    tile_tokens(model, tokens)
    largest = Largest()
    with largest:
        layer.mlp(layer.input_layernorm(x)).sum().backward()
    assert largest.numel == row * width
    assert largest.wide < row * width / 2
    evaluated = Largest()
    with evaluated, torch.no_grad():
        layer.mlp(layer.input_layernorm(x))
    assert evaluated.numel == row * width


@pytest.mark.gpu
def test_peak_memory_on_a_gpu():
    """A plain MLP of 14 times the hidden size holds several rows of its width; a tiled one, rows of the hidden size."""
    requires("gpu")
    row, width, inner = 32768, 512, 7168
    model = model_of(hidden_size=width, intermediate_size=inner, num_hidden_layers=1).bfloat16().cuda()
    layer = model.model.layers[0]
    peaks, results = [], []
    for tokens in (None, 1024):
        if tokens:
            tile_tokens(model, tokens)
        x = inputs(1, row, width, dtype=torch.bfloat16, device="cuda")
        model.zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = layer.mlp(layer.input_layernorm(x))
        out.backward(torch.ones_like(out))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        results.append([out.detach(), x.grad, *(p.grad.clone() for p in layer.mlp.parameters())])
        del out
    hidden_row = row * width * 2
    assert peaks[0] > 4 * row * inner * 2
    weights = sum(p.numel() for p in layer.mlp.parameters())
    tile = 1024 * inner * 2
    assert peaks[1] < 8 * hidden_row + 12 * tile + weights * (4 + 4 + 2 + 2)
    for got, want in zip(*results[::-1], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


@pytest.mark.gpu
def test_dropout_on_a_gpu():
    requires("gpu")
    model = with_adapter(tiled(model_of()), dropout=0.5).cuda()
    model.enable_input_require_grads()
    results = []
    for options in (None, ONCE):
        if options:
            enable_checkpointing(model, options)
        torch.manual_seed(5)
        results.append(gradients(model, ids=tokens_of().cuda()))
    for name, grad in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], grad)
    mlp = with_adapter(nn.ModuleList([Inner()]), dropout=0.5).base_model.model[0].train().cuda()
    tiles = tiled(mlp, 3)
    x, y = inputs(1, 10, 16, device="cuda"), inputs(1, 10, 16, device="cuda")
    torch.manual_seed(7)
    want = torch.cat([mlp(tile) for tile in x.split(3, 1)], 1)
    torch.manual_seed(7)
    got = tiles(y)
    torch.rand(3, device="cuda")
    got.pow(2).sum().backward()
    want.pow(2).sum().backward()
    torch.testing.assert_close(y.grad, x.grad)


# What must not go wrong unseen


def test_hooks_see_a_call_once():
    """A hook on a weight gets the whole gradient, those on the module whole rows; a hook on a part sees each tile."""
    torch.manual_seed(0)
    plain = Inner()
    model = tiled(plain, 3)
    seen = []
    for module in (plain, model):
        log = Counter()
        for p in module.parameters():
            p.register_hook(lambda grad, log=log: log.update(["weight"]) or 2 * grad)
            p.register_post_accumulate_grad_hook(lambda p, log=log: log.update(["accumulated"]))
        module.register_forward_hook(lambda *args, log=log: log.update([f"forward {tuple(args[2].shape)}"]))
        module.register_full_backward_hook(lambda *args, log=log: log.update([f"backward {tuple(args[2][0].shape)}"]))
        module(inputs(1, 10, 16)).sum().backward()
        seen.append((log, [p.grad for p in module.parameters()]))
    assert (
        seen[0][0]
        == seen[1][0]
        == Counter({"weight": 6, "accumulated": 6, "forward (1, 10, 16)": 1, "backward (1, 10, 16)": 1})
    )
    assert_exact(seen[1][1], seen[0][1])


def test_shared_modules_and_shared_weights():
    plain = model_of()
    plain.model.layers[1].mlp = plain.model.layers[0].mlp
    plain.model.layers[0].mlp.up_proj.weight = plain.model.layers[0].mlp.gate_proj.weight
    model = tiled(plain)
    want = gradients(plain)
    assert_same(gradients(model), want)
    assert_same(gradients(enable_checkpointing(model, ONCE)), want)


def test_a_second_call_changes_the_size_of_the_tiles():
    model = model_of()
    names = tile_tokens(model, 3)
    assert tile_tokens(model, TOKENS) == names
    calls = count_calls(model)
    with torch.no_grad():
        model(tokens_of())
    assert calls["calls"] == LAYERS * TILES


def test_short_rows_run_as_before():
    model = tiled(model_of(), SHAPE[0] * SHAPE[1])
    calls = count_calls(model)
    gradients(model)
    assert calls["calls"] == LAYERS


def test_rows_shorter_than_a_tile_are_tiled_together():
    model = tiled(model_of(), SHAPE[1])
    calls = count_calls(model)
    with torch.no_grad():
        model(tokens_of())
    assert calls["calls"] == LAYERS * SHAPE[0]


def test_generation_and_evaluation():
    plain = model_of().eval()
    model = tiled(plain)
    with torch.inference_mode():
        assert_exact(*([each(tokens_of()).logits] for each in (model, plain)))
        got, want = (m.generate(tokens_of((2, 9)), max_new_tokens=4, do_sample=False) for m in (model, plain))
        assert torch.equal(got, want)
    with torch.no_grad():
        assert not model(tokens_of()).logits.requires_grad


def test_inputs_and_weights_that_require_no_gradient():
    for x_grad in (False, True):
        for frozen in (["gate_proj"], ["gate_proj", "up_proj", "down_proj"]):
            torch.manual_seed(0)
            plain = Inner()
            for name in frozen:
                getattr(plain, name).requires_grad_(False)
            model = tiled(plain, 3)
            results = []
            for module in (plain, model):
                x = inputs(1, 10, 16, requires_grad=x_grad)
                out = module(x)
                if out.requires_grad:
                    out.sum().backward()
                results.append([out.requires_grad, x.grad, *(p.grad for p in module.parameters())])
            torch.testing.assert_close(results[1], results[0], rtol=0, atol=EXACT)
            assert results[0][0] == (x_grad or len(frozen) == 1)


def test_weights_without_a_part_in_the_result_get_no_gradient():
    """As those of adapters that are merged into frozen weights."""
    model = with_adapter(nn.ModuleList([Inner()]))
    mlp = model.base_model.model[0]
    model.merge_adapter()
    tile_tokens(mlp, 3)
    x = inputs(1, 10, 16)
    mlp(x).sum().backward()
    assert x.grad is not None
    out = mlp(x.detach())
    out.sum().backward()
    assert all(p.grad is None for p in mlp.parameters())


def test_weights_that_share_a_gradient(monkeypatch):
    """Autograd hands the same tensor to the two terms of a sum."""
    monkeypatch.undo()  # a sum in float32 stays in float32, and is found

    class Changed(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.change = nn.Parameter(torch.randn_like(self.weight))

        def forward(self, x):
            return nn.functional.linear(x, self.weight + self.change)

    torch.manual_seed(0)
    plain = Inner(up_proj=Changed(16, 24))
    model = tiled(plain, 3)
    for module in (plain, model):
        module(inputs(1, 10, 16)).sum().backward()
    assert_exact(*([*gradients_of(each).values()] for each in (model, plain)))


def test_plain_tensors_that_require_gradients_count_as_weights():
    """FSDP1 puts views of its flat parameter in the places of parameters."""
    torch.manual_seed(0)
    plain = Inner()
    model = tiled(plain, 3)
    flat = model.up_proj.weight.detach().flatten().requires_grad_()
    del model.up_proj.weight
    model.up_proj.weight = flat.view(24, 16)
    for module in (plain, model):
        module(inputs(1, 10, 16)).sum().backward()
    assert_exact([flat.grad.view(24, 16)], [plain.up_proj.weight.grad])


def test_a_weight_that_changes_before_the_backward_raises():
    model = tiled(Inner(), 3)
    out = model(inputs(1, 10, 16))
    with torch.no_grad():
        model.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"a weight of Inner was changed in place"):
        out.sum().backward()


def test_other_weights_in_the_backward_raise():
    """As after a change of the active adapter."""

    def freeze(model):
        model.up_proj.requires_grad_(False)

    def exchange(model):
        model.up_proj.weight = nn.Parameter(torch.zeros(24, 16))

    for change in (freeze, exchange):
        model = tiled(Inner(), 3)
        out = model(inputs(1, 10, 16))
        change(model)
        with pytest.raises(RuntimeError, match=r"Inner has other parameters that require gradients in its backward"):
            out.sum().backward()


def test_calls_with_more_than_one_tensor_and_keywords_run_as_before():
    class Wide(Inner):
        def forward(self, x):
            return super().forward(x)

    class GatedRMSNorm(nn.RMSNorm):
        def forward(self, x, gate=None):
            return super().forward(x) * gate

    model = nn.ModuleList([Wide(), GatedRMSNorm(16)])
    assert tile_tokens(model, 3) == ["0"]
    calls = Counter()
    model[0].up_proj.register_forward_hook(lambda *args: calls.update(["calls"]))
    model[0](x=inputs(1, 10, 16))
    assert calls["calls"] == 1
    with pytest.raises(TypeError, match="positional"):
        model[0](inputs(1, 10, 16), inputs(1, 10, 16))


@pytest.mark.parametrize("options", [None, ONCE], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("rows", [1, 2])
def test_activated_lora_runs_as_before(rows, options):
    """PEFT gives each adapted layer the number of activated tokens of every row, which says nothing of a tile."""
    config = LoraConfig(
        r=2, target_modules="all-linear", init_lora_weights=False, alora_invocation_tokens=[5, 7], task_type="CAUSAL_LM"
    )
    model = get_peft_model(model_of(), config)
    if options is not None:
        enable_checkpointing(model, options)
    ids = tokens_of((rows, 11)).clamp(min=8)
    ids[:, 6:8] = torch.tensor([5, 7])
    assert_same(gradients(tiled(model), ids=ids), gradients(model, ids=ids))


def test_adapters_of_each_row_run_as_before():
    model = with_adapter(model_of()).eval()
    ids, names = tokens_of(), ["default", "__base__"]
    with torch.no_grad():
        assert_exact(*([m(input_ids=ids, adapter_names=names).logits] for m in (tiled(model), model)))


def test_subclasses_of_tensors_run_as_before():
    """Tiles of a DTensor would be sent between devices."""

    class Other(torch.Tensor):
        pass

    model = tiled(Inner(), 3)
    calls = Counter()
    model.up_proj.register_forward_hook(lambda *args: calls.update(["calls"]))
    model(inputs(1, 10, 16).as_subclass(Other))
    assert calls["calls"] == 1


@pytest.mark.parametrize("out", [lambda x: (x, x), lambda x: x.mean(1), lambda x: x[:, :1]])
def test_a_module_that_is_no_function_of_tokens_raises(out):
    class Odd(Inner):
        def forward(self, x):
            return out(super().forward(x))

    model = tiled(Odd(), 3)
    with pytest.raises(TypeError, match=r"Odd must return one tensor with a row for each token, got"):
        model(inputs(1, 10, 16))


class HeadsRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 16))

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize(
    "module",
    [
        Inner(router=nn.Linear(16, 4)),
        Inner(scale=nn.Parameter(torch.ones(16))),
        Inner(down_proj=nn.Conv1d(24, 16, 3)),
        nn.LayerNorm((4, 16), elementwise_affine=False),
        type("ChannelLayerNorm", (nn.LayerNorm,), {"forward": lambda self, x: x})(16),
        HeadsRMSNorm(),
        nn.Linear(2, 2),
    ],
    ids=["router", "own weights", "convolution", "two dimensions", "channels", "heads", "linear"],
)
def test_other_modules_are_left_alone(module):
    with pytest.raises(ValueError, match=r"nothing to tile: \w+ has no gated MLP: .*gate_proj, up_proj and down_proj"):
        tile_tokens(module)


def test_arguments():
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        tile_tokens(Inner(), 0)
    for wrong in (1.5, True, None):
        with pytest.raises(TypeError, match="tokens must be an int, got"):
            tile_tokens(Inner(), wrong)


def test_a_model_without_gated_mlps_is_told():
    with pytest.warns(UserWarning, match=r"only norms are tiled: GPT2LMHeadModel has no gated MLP"):
        tile_tokens(model_of("gpt2", n_embd=16, n_layer=1, n_head=2))


def test_a_patch_of_the_forward_is_what_tiles_run():
    model = Inner()
    forward = model.forward
    model.forward = lambda x, scale=2: scale * forward(x)
    want = model(inputs(1, 10, 16))
    tile_tokens(model, 3)
    tile_tokens(model, 4)
    assert_exact([model(inputs(1, 10, 16)), model(inputs(1, 10, 16), scale=4)], [want, 2 * want])


def replace_forwards(model):
    """Replace the forwards of MLPs as Liger does when a trainer starts, by functions that count their calls."""
    calls = []

    def counted(self, x):
        calls.append(x.shape[1])
        return type(self).forward(self, x)

    for module in model.modules():
        if type(module).__name__ == "LlamaMLP":
            module.__dict__["forward"] = counted.__get__(module, type(module))
    return calls


@pytest.mark.parametrize(
    ("adapter", "compiled"), [(False, False), (True, False), pytest.param(False, True, marks=pytest.mark.full)]
)
def test_a_later_patch_runs_in_tiles(adapter, compiled):
    torch.compiler.reset()
    plain = model_of()
    plain = with_adapter(plain) if adapter else plain
    model = tiled(plain)
    tile_tokens(model, TOKENS)
    copied = copy.deepcopy(model)
    for each in (model, copied):
        calls = replace_forwards(each)
        run = torch.compile(each, backend="eager") if compiled else each
        assert_same(gradients(each, run), gradients(plain))
        assert max(calls) == TOKENS
        assert len(calls) == 2 * LAYERS * TILES


# Life of a model


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_tiled_and_independent(clone):
    model = tiled(model_of())
    other = clone(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    calls = count_calls(other)
    assert_same(gradients(other), gradients(model_of()))
    assert calls["calls"] == 2 * LAYERS * TILES


def test_a_tiled_model_is_saved_as_before(tmp_path):
    plain = model_of()
    tiled(plain).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert loaded.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_adapters_are_merged():
    model = with_adapter(tiled(model_of())).eval()
    with torch.no_grad():
        want = model(tokens_of()).logits
        merged = model.merge_and_unload()
        calls = count_calls(merged)
        assert_exact([merged(tokens_of()).logits], [want])
    assert calls["calls"] == LAYERS * TILES


@pytest.mark.parametrize(
    ("options", "backend"),
    [pytest.param(None, "eager", id="plain"), pytest.param(ONCE, "aot_eager", id="once")],
)
@pytest.mark.full
def test_a_compiled_model(options, backend):
    torch.compiler.reset()
    plain = model_of(num_hidden_layers=1)
    model = tiled(plain)
    if options:
        enable_checkpointing(model, options)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter)
    frames = []
    for length in (11, 12, 16):
        ids = tokens_of((2, length))
        assert_same(gradients(model, compiled, ids), gradients(plain, ids=ids))
        frames.append(counter.frame_count)
    assert frames[1] == frames[2]  # no recompilation once lengths are known to differ


def test_a_whole_graph():
    """There is one for short rows; long ones say why there is none."""
    torch.compiler.reset()
    mlp = Inner()
    torch.compile(tiled(mlp, 10), backend="eager", fullgraph=True)(inputs(1, 10, 16))
    with pytest.raises(Unsupported, match="tile_tokens runs tiles uncompiled: leave fullgraph at False"):
        torch.compile(tiled(mlp, 3), backend="eager", fullgraph=True)(inputs(1, 10, 16))


@pytest.mark.full
def test_data_parallel_training(run_folder):
    """DDP and FSDP2 of two processes, with gradient accumulation, give the gradients of one process."""
    result(run_cases(run_folder, "tools.tiled_ranks", (2,)), 2, "tiled")
