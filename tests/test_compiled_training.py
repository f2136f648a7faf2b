"""A compiled training step of Llama on packed rows: one graph, the same gradients, no compilation for other lengths."""

import shutil

import pytest
import torch
import torch._dynamo.testing
from support import requires
from tiny import llama_config
from transformers import AutoModelForCausalLM

from flashmask_hf.collators import DataCollatorForPackedLanguageModeling

DOCUMENTS = [
    [11, 3, 6], [9, 16], [4, 8, 2], [30], [1, 1, 5], [7, 7, 7], [2, 40], [13, 21], [5, 6, 7, 8], [64, 3], [17, 1, 33],
    [90, 5],
]  # fmt: skip
pytestmark = pytest.mark.filterwarnings(
    "ignore:TensorFloat32 tensor cores for float32:UserWarning"
)  # inductor's advice

WARM_UP = 2  # the second length tells the compiler which size is not a constant


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
        ("cpu", "vectors", "inductor"),
        ("cpu", "positions", "aot_eager"),
        pytest.param("cuda", "vectors", "inductor", marks=pytest.mark.gpu),
        pytest.param("cuda", "positions", "inductor", marks=pytest.mark.gpu),
    ],
)
def test_training_step(device, given, backend):
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
        torch.testing.assert_close(loss, want_loss, rtol=1e-4, atol=1e-5)
        for name, x in want.items():
            assert (got[name] - x).abs().max() <= 1e-4 * max(x.abs().max().item(), 1e-3), (lengths, name)
    assert len(set(after[WARM_UP - 1 :])) == 1, after
    assert not torch._dynamo.utils.counters["graph_break"]
