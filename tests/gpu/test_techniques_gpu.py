"""Every technique on a real GPU, started as a run is: it engages, it learns, and its peak is what was predicted."""

import os
import re
from collections.abc import Callable

import pytest
from gpu_factory import (
    GPU_CASES,
    SAVINGS,
    GpuCase,
    GpuRun,
    case_named,
    finished_run,
    gpu_plan,
    held,
    missing_for,
    run_on_gpu,
    write_full_rows,
)
from msgspec.structs import replace

from shardwise.launch.probe.machine import read_hardware
from shardwise.trainer.runtime.attention.choice import attention_name
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.report import Ending
from shardwise.trainer.spec.strategy import Attention, LossHead, Precision

pytestmark = pytest.mark.gpu
ENGINES = {
    Sharding.NONE: "LlamaForCausalLM",
    **dict.fromkeys((Sharding.FSDP, Sharding.FSDP_GRAD_OP), "FSDPLlamaForCausalLM"),
}
EXACT = ("bf16-mixed", "checkpointing-full", "checkpointing-selective", "checkpointing-attention",
         "checkpointing-every_n", "activation_offload", "loss-eager", "loss-fused", "loss-fused_linear", "flash",
         "compile", "optimizer-paged_adamw")  # fmt: skip


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[GpuCase], GpuRun]:
    """Runs a case once, whoever asks for it: workers of one suite (`-n`) share what was run."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "techniques"
    folder.mkdir(exist_ok=True)
    with held(folder / "rows.lock"):
        for name, are_packed in (("rows", False), ("packed-rows", True)):
            if not (folder / name).exists():
                write_full_rows(folder / name, are_packed=are_packed)

    def run(case: GpuCase) -> GpuRun:
        missing = missing_for(case)
        if missing is not None:
            pytest.skip(missing)
        with held(folder / f"{case.name}.lock"):
            place = folder / case.name
            if not place.exists():
                hardware = read_hardware()
                rows = folder / ("packed-rows" if case.is_packed else "rows")
                plan = gpu_plan(case, rows, replace(hardware, gpus=hardware.gpus[:1]))
                try:
                    run_on_gpu(plan, place)
                except AssertionError as error:
                    (place / "problem.txt").write_text(str(error))
            if (place / "problem.txt").exists():
                pytest.fail((place / "problem.txt").read_text(), pytrace=False)
            return finished_run(place)

    return run


def each(cases: tuple[GpuCase, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


@each(GPU_CASES)
def test_a_run_matches_its_plan_and_learns(case: GpuCase, run_of: Callable[[GpuCase], GpuRun]) -> None:
    report = run_of(case).report
    assert report.ending is Ending.FINISHED
    verified = report.verified
    assert verified.world_size == 1
    assert verified.engine_class == ENGINES.get(case.sharding, "DeepSpeedEngine")
    assert verified.precision == case.precision
    assert verified.loss == case.settings.get("loss", LossHead.CHUNKED)
    assert verified.attention == attention_name(case.settings.get("attention", Attention.SDPA))
    for fact, pattern in case.seen:
        assert re.search(pattern, verified.facts[fact]), f"{fact}: {verified.facts[fact]}"
    losses = run_of(case).losses
    assert not case.learns or losses[-1] < losses[0] <= max(losses) < 15


@each(GPU_CASES)
def test_its_peak_is_what_was_predicted(case: GpuCase, run_of: Callable[[GpuCase], GpuRun]) -> None:
    """`torch.cuda.max_memory_allocated` of one steady step."""
    run = run_of(case)
    measured = run.report.measured.memory.peak_allocated_bytes
    assert run.plan.chosen.memory.peak_allocated_bytes == pytest.approx(measured, rel=case.tolerance)


@each(tuple(case_named(name) for name in EXACT))
def test_what_moves_or_recomputes_changes_no_loss(case: GpuCase, run_of: Callable[[GpuCase], GpuRun]) -> None:
    """Against plain bf16-mixed of the same data, weights and rate; kernels add up in another order."""
    assert run_of(case).losses == pytest.approx(run_of(case_named("bf16-mixed")).losses, abs=2e-2)


@pytest.mark.parametrize("name", ["bf16-mixed", "fp16-mixed", "bf16"])
def test_a_16_bit_run_follows_fp32(name: str, run_of: Callable[[GpuCase], GpuRun]) -> None:
    """Up to the first step whose gradients overflow fp16, which is skipped."""
    case = case_named(name)
    tolerance = 5e-2 if case.precision is not Precision.BF16 else 2e-1
    losses, skipped = run_of(case).losses, run_of(case).skipped
    same = min(skipped, default=len(losses)) + 1
    assert same > 1
    assert losses[:same] == pytest.approx(run_of(case_named("fp32")).losses[:same], abs=tolerance)


@pytest.mark.parametrize(("name", "base"), SAVINGS)
def test_it_saves_the_memory_that_was_predicted(name: str, base: str, run_of: Callable[[GpuCase], GpuRun]) -> None:
    with_it, without = run_of(case_named(name)), run_of(case_named(base))
    saved, predicted = (
        peaks[1] - peaks[0]
        for peaks in (
            [run.report.measured.memory.peak_allocated_bytes or 0 for run in (with_it, without)],
            [run.plan.chosen.memory.peak_allocated_bytes for run in (with_it, without)],
        )
    )
    assert saved > 0
    assert with_it.plan.chosen.memory.pinned_bytes > 0 or not with_it.plan.chosen.activation_offload
    assert saved == pytest.approx(predicted, rel=0.1, abs=0.02 * without.plan.chosen.memory.peak_allocated_bytes)
