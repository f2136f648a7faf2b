"""Compiled training of Llama on packed rows: one graph, eager's gradients, no recompilation for other lengths.

Layers that do not get the mask raise in compiled models, too.
"""

import shutil

import pytest
import torch
import torch._dynamo.testing
from accelerate.utils import compile_regions
from tools import model_zoo
from tools.model_pairs import BOUND
from tools.support import covering, requires
from tools.tiny import assert_same_gradients, llama_config
from transformers import AutoModelForCausalLM

from flashmask_hf.collators import DataCollatorForPackedLanguageModeling
from flashmask_hf.hf.models import state_of
from flashmask_hf.hf.packed.rows import check_compiled, check_layers

DOCUMENTS = [
    [11, 3, 6], [9, 16], [4, 8, 2], [30], [1, 1, 5], [7, 7, 7], [2, 40], [13, 21], [5, 6, 7, 8], [64, 3], [17, 1, 33],
    [90, 5],
]  # fmt: skip
pytestmark = [
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32:UserWarning"),  # inductor's advice
    # TorchDynamo reads .grad of the inputs of compiled layers
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

CPU = torch.device("cpu")
WARM_UP = 2  # at the second length, the compiler finds which size is dynamic


def model_on(device):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama_config(num_hidden_layers=1), attn_implementation="flashmask")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else None
    return model.to(device)


def batch_of(lengths, given, device):
    examples = [{"input_ids": torch.randint(3, 48, (n,)).tolist()} for n in lengths]
    batch = dict(DataCollatorForPackedLanguageModeling()(examples))
    if given == "positions":
        del batch["startend_row_indices"]
    return {name: x.to(device) for name, x in batch.items()}


def gradients(model, run, batch):
    model.zero_grad()
    loss = run(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("device", "given", "backend"),
    [
        pytest.param("cpu", "vectors", "inductor", marks=pytest.mark.full),
        pytest.param("cpu", "vectors", "aot_eager", marks=pytest.mark.full),
        pytest.param("cpu", "positions", "aot_eager", marks=pytest.mark.full),
        pytest.param("cuda", "vectors", "inductor", marks=pytest.mark.gpu),
        pytest.param("cuda", "positions", "inductor", marks=pytest.mark.gpu),
    ],
)
def test_a_compiled_step_equals_eager_without_recompilation(device, given, backend):
    if device == "cuda":
        requires("gpu")
    elif backend == "inductor" and shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("inductor on a CPU needs a C++ compiler")
    torch.compiler.reset()
    model = model_on(device)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    torch._dynamo.utils.counters.clear()
    after = []
    for lengths in DOCUMENTS:
        batch = batch_of(lengths, given, device)
        loss, got = gradients(model, compiled, batch)
        after.append(counter.frame_count)
        want_loss, want = gradients(model, model, batch)
        torch.testing.assert_close(loss, want_loss, rtol=BOUND, atol=0)
        assert_same_gradients(got, want, BOUND)
    assert len(set(after[WARM_UP - 1 :])) == 1, after
    assert not torch._dynamo.utils.counters["graph_break"]


def whole(model):
    return torch.compile(model, backend="eager")


def regions(model):
    return compile_regions(model, backend="eager")


def layers_in_place(model):
    for layer in model.base_model.layers:
        layer.compile(backend="eager")
    return model


WAYS = [pytest.param(way, id=way.__name__) for way in (whole, regions, layers_in_place)]


@pytest.mark.parametrize(("way", "asked"), covering(1, WAYS, [False, True]))
def test_layers_that_get_the_mask_train_compiled(way, asked):
    torch.compiler.reset()
    model, batch = model_on("cpu"), batch_of([3, 4], "vectors", "cpu")
    want_loss, want = gradients(model, model, batch)
    check_layers(model)
    compiled = way(model)
    if asked:
        check_compiled(compiled, CPU)
        assert state_of(model.base_model).is_counted
        model.forward = None  # the check runs only once
        check_compiled(compiled, CPU)
        del model.forward
    loss, got = gradients(model, compiled, batch)
    torch.testing.assert_close(loss, want_loss, rtol=BOUND, atol=0)
    assert_same_gradients(got, want, BOUND)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["lfm2", "recurrent_gemma"])
def test_compiled_layers_that_mix_documents_raise(way, family):
    torch.compiler.reset()
    model = model_zoo.build(family, "flashmask")
    check_layers(model)
    with pytest.raises(ValueError, match=r"has recurrent or convolutional layers.*one document per row"):
        check_compiled(way(model), CPU)


def test_only_compiled_models_with_check_layers_are_checked():
    model = model_on("cpu")
    compiled = whole(model)
    check_compiled(compiled, CPU)  # without check_layers
    check_layers(model)
    check_compiled(model, CPU)  # not compiled: its first forward checks the layers
    model(input_ids=torch.ones(1, 2, dtype=torch.int64))  # without mask vectors, which checks nothing
    assert not state_of(model.base_model).is_counted
    model(**batch_of([3, 4], "vectors", "cpu"))
    assert state_of(model.base_model).is_counted


def test_uncompiled_calls_in_between_cause_no_recompilation():
    """Evaluation runs uncompiled and counts the calls of attention, which must not be a guard of the compiled graph."""
    torch.compiler.reset()
    model, counter = model_on("cpu"), torch._dynamo.testing.CompileCounter()
    check_layers(model)
    compiled = torch.compile(model, backend=counter)
    check_compiled(compiled, CPU)
    for _ in range(3):
        batch = batch_of([3, 4], "vectors", "cpu")
        compiled(**batch, use_cache=False)
        model(**batch, use_cache=False)
    assert counter.frame_count == 1
