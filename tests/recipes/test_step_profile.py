"""The profile of a training step: kinds of kernels by name and by module, and shares of a step."""

from __future__ import annotations

import pytest
import torch
from tools.recipes import RECIPES
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from flashmask_hf.kernels.hopper import backward_kernel as hopper_backward
from flashmask_hf.kernels.hopper import dq_order
from flashmask_hf.kernels.hopper import forward_kernel as hopper_forward
from flashmask_hf.kernels.portable import backward as portable_backward
from flashmask_hf.kernels.portable import forward as portable_forward
from flashmask_hf.kernels.shared import padding, plan_kernels, row_statistics

pytestmark = [
    # of TRL's head, which has no fused kernel on a CPU, and of torch's profiler
    pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning"),
]


@pytest.fixture
def benchmark(monkeypatch):
    """The benchmark and the one whose steps it profiles; both import their neighbors by name."""
    monkeypatch.syspath_prepend(str(RECIPES / "benchmarks"))
    import step_profile
    import training

    return step_profile, training


OWN_KERNELS = {
    "attention forward": [hopper_forward.forward_kernel, portable_forward._forward],
    "attention backward": [
        hopper_backward.backward_kernel,
        hopper_backward.scale_dq_kernel,
        portable_backward._backward_keys,
        portable_backward._backward_queries,
        row_statistics._row_delta,
        row_statistics._row_statistics,
        row_statistics._backward_lse,
    ],
    "plan and mask": [
        plan_kernels._column_plan,
        plan_kernels._row_plan,
        plan_kernels._join_rows,
        plan_kernels._join_lists,
        padding._pad_indices,
        dq_order._order_key_tiles,
        dq_order._rank_key_tiles,
    ],
}

NAMES = {
    "matrix products": [
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_64x3_tn_align8>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
    ],
    "loss": ["_forward_kernel", "_backward_kernel", "void at::native::(anonymous namespace)::nll_loss_forward_reduce"],
    "optimizer": ["void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"],
    "copies and casts": [
        "Memcpy DtoD (Device -> Device)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "triton_poi_fused__to_copy_3",
        "triton_poi_fused_clone_transpose_view_12",
    ],
    "norms": ["triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3"],
    "activation": ["triton_poi_fused_mul_silu_silu_backward_7"],
    "rotary": ["triton_poi_fused_add_cat_mul_neg_slice_unsqueeze_2"],
    "unclassified": ["triton_poi_fused_add_1", "void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>"],
}


def test_names_of_kernels_tell_their_kind(benchmark):
    kind_of = benchmark[0].kind_of
    for kind, kernels in OWN_KERNELS.items():
        for kernel in kernels:
            assert kind_of(kernel.__name__) == kind, kernel.__name__
    for kind, names in NAMES.items():
        for name in names:
            assert kind_of(name) == kind, name
    generic = NAMES["unclassified"][1]
    assert kind_of(generic, "norms") == "norms"
    assert kind_of(NAMES["loss"][0], "norms") == "loss"


@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapters"])
def test_modules_tell_the_kind_of_the_other_kernels(benchmark, lora):
    """On the operations of a CPU, of a step with gradient checkpointing: forward, recomputation and backward."""
    step_profile, training = benchmark
    model = training.build_model("tiny", "cpu", lora=lora, fused=True)
    step_profile.annotate(model)
    row = training.make_rows(256, 1, 1024, "cpu")[0]
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-3)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        training.step(model, optimizer, "flashmask", row, True)
    events = list(profiler.events() or ())
    usage, names = step_profile.usage_by_kind(events)
    expected = {"norms", "rotary", "activation", "matrix products", "loss", "optimizer", "copies and casts", "residual"}
    assert expected | ({"rest of linear layers"} if lora else set()) <= set(usage)
    norms = 2 * model.config.num_hidden_layers  # each runs once in the forward and once in the recomputation
    calls = [event for event in events if event.name in ("aten::rsqrt", "aten::silu", "aten::silu_backward")]
    kinds = {(event.name, step_profile._scope(event, {})) for event in calls if event.name != "aten::silu_backward"}
    assert kinds == {("aten::rsqrt", "norms"), ("aten::silu", "activation")}
    assert sum(event.name == "aten::rsqrt" for event in calls) == 2 * norms + 1  # and the last one of the model
    assert "aten::silu_backward" in names["activation"]  # by the scope of its forward
    total = sum(used.milliseconds for used in usage.values())
    assert usage.get("unclassified", step_profile.Usage(0.0, 0)).milliseconds < 0.25 * total


def event(name, start, end, *, gpu=False, number=0, kernels=(), parent=None, annotation=False, sequence=-1):
    """An event of a profile as torch 2.11 makes them: on the host, or what the GPU ran."""
    made = FunctionEvent(
        id=number,
        name=name,
        thread=1,
        fwd_thread=1,
        start_us=start,
        end_us=end,
        device_type=DeviceType.CUDA if gpu else DeviceType.CPU,
        is_user_annotation=annotation,
        sequence_nr=sequence,
    )
    for kernel in kernels:
        made.append_kernel(kernel.name, 0, kernel.time_range.elapsed_us())
    if parent is not None:
        made.set_cpu_parent(parent)
    return made


def test_only_what_the_gpu_runs_counts_and_once(benchmark):
    """Annotations show on the GPU, too, from their first kernel to their last, and as `kernels` of the host's."""
    generic, adam = "vectorized_elementwise_kernel<MulFunctor>", NAMES["optimizer"][0]
    ran = [
        event(generic, 0, 10, gpu=True),
        event(adam, 20, 30, gpu=True),
        event(generic, 40, 47, gpu=True),
        event("Memcpy HtoD (Pageable -> Device)", 50, 51, gpu=True),
        event("nvjet_tst_128x256", 60, 80, gpu=True),
    ]
    shown = event("Optimizer.step#AdamW.step", 20, 51, gpu=True, annotation=True)
    norms = event("kind: norms", 0, 5, annotation=True)
    update = event("Optimizer.step#AdamW.step", 20, 29, annotation=True, kernels=[shown])
    host = [
        norms,
        event("aten::mul", 1, 2, kernels=ran[:1], parent=norms),
        update,
        # A call of CUDA whose number is by chance that of the multiplication above, and which comes before its own.
        event("cudaStreamIsCapturing", 21, 22, kernels=ran[:1], parent=update),
        event("aten::_fused_adamw_", 22, 23, kernels=ran[1:2], parent=update),
        event("aten::mul", 24, 25, kernels=ran[2:3], parent=update),
        event("aten::copy_", 26, 27, kernels=ran[3:4], parent=update),
        event("aten::mm", 30, 31, kernels=ran[4:]),
    ]
    usage, names = benchmark[0].usage_by_kind([host[3], *host, shown, *ran])  # the call comes first
    assert {kind: (round(1000 * used.milliseconds, 9), used.launches) for kind, used in usage.items()} == {
        "norms": (10, 1),
        "optimizer": (17, 2),
        "copies and casts": (1, 1),
        "matrix products": (20, 1),
    }
    assert names["optimizer"] == {adam: 10, generic: 7}


def test_streams_that_overlap_share_the_time(benchmark):
    spans = [(0, 10), (4, 6), (5, 12), (12, 13), (5, 5)]  # two, then three at a time; one of no length
    kernels = [event("nvjet", *span, gpu=True) for span in spans]
    parts = benchmark[0]._parts(kernels)
    assert parts == pytest.approx([4 + 1 / 2 + 1 / 3 + 4 / 2, 1 / 2 + 1 / 3, 1 / 3 + 4 / 2 + 2, 1, 0])
    assert sum(parts) == pytest.approx(13)  # the time in which any runs
    usage, _ = benchmark[0].usage_by_kind(kernels)
    assert usage == {"matrix products": benchmark[0].Usage(pytest.approx(0.013), 5)}


def test_shares_of_a_step_sum_to_one_with_what_it_idles(benchmark):
    step_profile, _ = benchmark
    usage = {"norms": step_profile.Usage(1.0, 10), "matrix products": step_profile.Usage(5.0, 2)}
    rows = step_profile.rows_of(usage, 8.0)
    assert [row["kind"] for row in rows] == ["matrix products", "norms", "idle"]
    assert [row["share"] for row in rows] == [0.625, 0.125, 0.25]
    assert [row["launches"] for row in rows] == [2, 10, 0]
    assert step_profile.rows_of(usage, 5.0)[-1]["share"] == 0  # the profiler's step was longer
