"""The report on an attempt that ran out of memory names what dominated, what was held, and what comes next."""

import re

import pytest
from msgspec.structs import replace
from planning_factory import plan_of
from report_factory import MIB, make_candidate, make_report

from shardwise.launch.attempt.oom_report import FILE, MemoryEnd, oom_page, write_oom_report
from shardwise.trainer.planning.page.content import page_text
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.hardware import DeviceKind, Gpu, GpuProcess
from shardwise.trainer.spec.messages.rank_files import MemoryState, memory_state_path
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.report import Ending, Report

GIB = 1024 * MIB


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of("tiny", "1xRTX-4090")


def failed(**changes: object) -> Report:
    candidate = make_candidate()
    memory = replace(
        candidate.memory, parts={"logits": 600 * MIB, "saved_activations": 300 * MIB, "weights": 100 * MIB},
        peak_allocated_bytes=1000 * MIB, peak_event="loss_backward", need_bytes=1200 * MIB, usable_bytes=2 * GIB,
    )  # fmt: skip
    report = make_report(ending=Ending.OUT_OF_MEMORY, error="OutOfMemoryError: CUDA out of memory.", step=6)
    return replace(report, plan=replace(candidate, memory=memory), **changes)


STATE = MemoryState(
    rank=1, phase="backward", step=7, tensors={"weights": 100 * MIB, "gradients": 60 * MIB, "other tensors": 40 * MIB},
    allocated_bytes=1500 * MIB, reserved_bytes=2000 * MIB, free_device_bytes=10 * MIB, total_device_bytes=24 * GIB,
    largest_blocks=(512 * MIB, 128 * MIB), largest_free_bytes=30 * MIB, host_bytes=3 * GIB,
    summary="| Allocated memory | 1500 MiB |",
)  # fmt: skip


def assert_shown(end: MemoryEnd, *patterns: str, absent: str = "no such text") -> None:
    """The page of this end holds the patterns, and what is to be absent nowhere."""
    text = " ".join(page_text(oom_page(end), width=100).split())
    assert [pattern for pattern in patterns if not re.search(pattern, text)] == []
    assert re.search(absent, text) is None


def test_it_names_the_phase_and_the_largest_part_and_the_fallback_that_follows(plan):
    following = replace(failed().plan, micro_batch=1)
    end = MemoryEnd(2, plan, failed(), (STATE,), next_candidate=following, decision="the next fallback is tried")
    assert_shown(
        end, "attempt 2 ", "Rank 1 .*backward of step 7", "OutOfMemoryError: CUDA out of memory",
        "1.17 GiB .*2 GiB .*1000 MiB .*loss backward", "logits, 60%", "saved activations 300 MiB 30%",
        r"The next fallback is tried\.", "micro batch 1 .*predicted to need 1.17 GiB",
    )  # fmt: skip


def test_it_shows_the_memory_of_the_rank_fragmentation_and_the_processes_that_hold_the_card(plan):
    assert_shown(
        MemoryEnd(1, plan, failed(), (STATE,)), "gradients 60 MiB 30%", "Fragmentation: 500 MiB .*25%",
        "512 MiB, 128 MiB", "free on the device 10 MiB", r"\| Allocated memory \| 1500 MiB \|", absent="data limit",
    )  # fmt: skip
    capped = replace(STATE, tensors={}, largest_blocks=(), reserved_bytes=None, data_limit_bytes=2 * GIB)
    end = MemoryEnd(1, plan, failed(), (capped,))
    assert_shown(end, "its data limit 2 GiB", absent="Fragmentation|Largest blocks")
    card = Gpu(
        index=3, name="RTX 4090", spec_name=None, memory_bytes=24 * GIB,
        processes=(GpuProcess(pid=4711, name="python", memory_bytes=9 * GIB),),
    )  # fmt: skip
    assert_shown(MemoryEnd(1, plan, failed(), cards=(card,)), "3 4711 python 9 GiB")
    assert_shown(MemoryEnd(1, plan, failed(), cards=(replace(card, processes=()),)), absent="4711")


def test_without_a_fallback_it_offers_configurations_that_need_less(plan):
    def needing(size: int, micro_batch: int) -> Candidate:
        memory = replace(failed().plan.memory, need_bytes=size * MIB)
        return replace(failed().plan, memory=memory, micro_batch=micro_batch)

    high = needing(1200, failed().plan.micro_batch)
    offering = replace(plan, candidates=(high, needing(9, 1)), methods=())
    end = MemoryEnd(1, offering, failed(), decision="none is left")
    assert_shown(end, "None is left", "9 MiB: none/fp32/adamw, method full, micro batch 1 x 2", absent="1.17 GiB: ")
    alone = MemoryEnd(1, replace(plan, candidates=(high,), methods=()), failed())
    smaller = tuple(needing(size, size) for size in (1, 2, 4, 8, 16))
    nearest = [f"{size} MiB: none/fp32/adamw, method full, micro batch {size} x 2" for size in (16, 8, 4, 1)]
    assert_shown(alone._replace(smaller=smaller), ".*".join(nearest), absent="2 MiB: none")
    assert_shown(alone, "train.method: lora", absent="MiB: none/")


def test_it_reads_the_ranks_files_and_never_raises(plan, tmp_path):
    attempt_dir = tmp_path / "1"
    attempt_dir.mkdir()
    cpu = replace(plan, device_kind=DeviceKind.CPU)
    codec.write(memory_state_path(attempt_dir, 1), STATE)
    memory_state_path(attempt_dir, 0).write_bytes(b'{"rank": 0')  # it was cut short
    path = write_oom_report(attempt_dir, cpu, failed(), next_candidate=None, decision="")
    assert path == attempt_dir / FILE
    assert "Rank 1 " in path.read_text()
    assert write_oom_report(tmp_path / "2", cpu, failed(), next_candidate=None, decision="") is None
    assert write_oom_report(tmp_path / "no number", cpu, failed(), next_candidate=None, decision="") is None
