"""Idle time of a device and its time by kind of kernel, from recorded intervals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.trainer.runtime.run.device_time import (
    LEAST_STEPS,
    OTHER,
    Interval,
    Kernel,
    busy_ns,
    device_time,
    idle_share,
    kind_of,
    sampled_steps,
)


@pytest.mark.parametrize(
    ("intervals", "windows", "share"),
    [
        ([], [(0, 10)], 1.0),
        ([(0, 6), (2, 4), (5, 8)], [(0, 10)], 0.2),  # of two streams
        ([(0, 5), (20, 30)], [(0, 10), (20, 30)], 0.25),
        ([(0, 5), (12, 18)], [(0, 10), (20, 30)], 0.75),  # between two steps nothing counts
        ([(0, 5)], [], None),
        ([(0, 5)], [(3, 3)], None),
    ],
)
def test_idle_is_what_no_stream_covers(intervals, windows, share):
    assert idle_share(intervals, windows) == (None if share is None else pytest.approx(share))


MOMENTS = st.integers(-5, 25)


@given(st.lists(st.tuples(MOMENTS, MOMENTS)), MOMENTS, MOMENTS)
def test_busy_is_a_count_of_covered_moments(intervals: list[Interval], begin: int, end: int) -> None:
    moments = (moment for moment in range(begin, end) if any(first <= moment < last for first, last in intervals))
    assert busy_ns(intervals, (begin, end)) == sum(1 for _ in moments)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16>", "matrix products"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>, true>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3i", "attention"),
        ("fmha_cutlassB_bf16_aligned_128x64_k128_sm80", "attention"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("Memset (Device)", "copies"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void kOptimizerStatic8bit2StateBlockwise<__nv_bfloat16, 0, 256, 1>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<c10::BFloat16>>", "elementwise"),
        ("triton_poi_fused_mul_silu_3", "elementwise"),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>", OTHER),
    ],
)  # fmt: skip
def test_the_name_of_a_kernel_has_its_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_kinds_have_the_time_in_which_one_of_their_kernels_runs_the_largest_first_and_a_short_run_no_sample() -> None:
    kernels = [
        Kernel("ncclDevKernel_ReduceScatter", 0, 40),
        Kernel("sm90_xmma_gemm", 10, 60),
        Kernel("nvjet_tst", 20, 70),  # on another stream
        Kernel("sm90_xmma_gemm", 150, 160),
    ]
    found = device_time(kernels, [(0, 100), (200, 300)])
    assert found is not None and found.num_steps == 2 and found.idle_share == pytest.approx(0.65)
    assert list(found.kinds) == ["matrix products", "communication"]
    assert list(found.kinds.values()) == pytest.approx([0.3, 0.2])
    for outside in ([], kernels[-1:]):
        assert device_time(outside, [(0, 100)]) is None
    assert list(sampled_steps(after=3, num_steps=3 + LEAST_STEPS)) == [4, 5, 6]
    assert not sampled_steps(after=3, num_steps=2 + LEAST_STEPS)
