"""`shardwise train` has FP8 timed once, where that decides, in a process with an end; untimed it is not taken."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_plan_factory import TINY_LLAMA
from msgspec.structs import replace
from planning_factory import fp8_gain_of, machine, plan_of

from shardwise.launch.plan.fp8 import asks_for_timing, fp8_gain_for, key_of, read_fp8_gain, time_fp8
from shardwise.launch.terminal import Console
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.hardware import Gpu, Hardware
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.messages.worker_requests import Fp8GainRequest
from shardwise.trainer.spec.plan import Fp8Gain, Plan
from shardwise.trainer.spec.strategy import Precision
from shardwise.trainer.spec.units import GIB

REQUEST = Fp8GainRequest(model_config=TINY_LLAMA, tokens=4096)
GAIN = fp8_gain_of(1.31)
ALLOWED: dict[str, Any] = {"allow": (Allowance.FP8,)}
PINNED: dict[str, Any] = {"pin": {"precision": Precision.FP8}}


def card(spec: str = "1xH100-SXM5-80GB", libraries: tuple[str, ...] = ("transformer-engine",)) -> Hardware:
    """A machine whose cards no process of this one can see."""
    hardware = machine(spec, libraries=libraries)
    return replace(hardware, gpus=tuple(replace(gpu, uuid="GPU-of-no-machine") for gpu in hardware.gpus))


@pytest.mark.parametrize(
    ("hardware", "facts", "gain", "asks"),
    [
        (card(), ALLOWED, None, True),
        (card("1xL40S"), ALLOWED, None, True),
        (card(), ALLOWED, GAIN, False),
        (card(), ALLOWED, fp8_gain_of(0.9), False),
        (card(), PINNED, None, False),
        (card(), {**ALLOWED, "pin": {"precision": Precision.BF16_MIXED}}, None, False),
        (card(), {}, None, False),
        (card(libraries=("torchao",)), ALLOWED, None, False),
        (card("1xA100-SXM4-80GB"), ALLOWED, None, False),
        (machine("1xCPU", libraries=("transformer-engine",)), ALLOWED, None, False),
    ],
    ids=["hopper", "ada", "known", "known slow", "pinned", "pinned away", "not allowed", "no library", "ampere", "cpu"],
)
def test_it_is_timed_where_that_decides(
    hardware: Hardware, facts: dict[str, Any], gain: Fp8Gain | None, asks: bool
) -> None:
    assert asks_for_timing(plan_of("tiny", hardware, fp8_gain=gain, **facts)) is asks


def told_by(plan: Plan, cache: Path) -> tuple[Fp8Gain | None, list[str]]:
    stream = io.StringIO()
    gain = fp8_gain_for(plan, cache=cache, console=Console(stream))
    return gain, stream.getvalue().splitlines()


def test_nothing_is_started_where_nothing_is_asked(tmp_path: Path) -> None:
    assert told_by(plan_of("tiny", card(), fp8_gain=GAIN, **ALLOWED), tmp_path) == (None, [])


def test_where_no_device_answers_it_is_a_line_and_fp8_is_not_taken(tmp_path: Path) -> None:
    """The real process, which finds no CUDA device."""
    plan = plan_of("tiny", card(), **ALLOWED)
    gain, (begins, ends) = told_by(plan, tmp_path)
    assert gain is not None and "CUDA" in (gain.problem or "")
    assert "FP8" in begins and (gain.problem or "-") in ends
    assert read_fp8_gain(tmp_path, key_of(plan)) == (None, None), "the next run asks again"
    taken = plan_of("tiny", card(), fp8_gain=gain, **ALLOWED)
    assert all(candidate.strategy.precision is not Precision.FP8 for candidate in taken.candidates)
    assert asks_for_timing(taken) is False


# --- the process, with a stand-in for the module that needs torch and a GPU -----------------------------------------


@pytest.fixture
def module_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    def write(body: str) -> str:
        (tmp_path / "stand_in_fp8.py").write_text("import os, pathlib, sys, time\n" + body)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "stand_in_fp8"

    return write


def writes(gain: Fp8Gain) -> str:
    return f"pathlib.Path(sys.argv[2]).write_bytes({codec.encode(gain)!r})\n"


def test_it_reads_the_request_and_sees_one_card(module_of: Callable[[str], str]) -> None:
    gpus = [Gpu(index=index, name="x", spec_name=None, memory_bytes=GIB, uuid=f"GPU-{index}") for index in (2, 3)]
    body = (
        "assert os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-2'\n"
        f"assert pathlib.Path(sys.argv[1]).read_bytes() == {codec.encode(REQUEST)!r}\n" + writes(GAIN)
    )
    assert time_fp8(REQUEST, gpus, module=module_of(body)) == GAIN


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("import no_such_library\n", "no_such_library"),
        ("os.kill(os.getpid(), 11)\n", "SIGSEGV"),
        ("", "answer.json"),
        ("pathlib.Path(sys.argv[2]).write_text('{')\n", "answer.json"),
        ("time.sleep(600)\n", "0.6 s"),
        (writes(GAIN) + "time.sleep(600)\n", "0.6 s"),
    ],
)
def test_what_goes_wrong_is_the_problem(module_of: Callable[[str], str], body: str, problem: str) -> None:
    timeout_s = 0.6 if "600" in body else 100
    gain = time_fp8(REQUEST, [], module=module_of(body), timeout_s=timeout_s)
    assert problem in (gain.problem or "") and (gain.speedup, gain.pays) == (None, False)
    assert (gain.recipe, gain.tokens) == (REQUEST.recipe, REQUEST.tokens)
