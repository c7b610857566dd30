"""When the gain of FP8 is timed, and how the cache keeps it."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_plan_factory import TINY_LLAMA
from msgspec.structs import replace
from planning_factory import fp8_gain_of, job_of, machine, plan_of, shape_of
from typed_command import in_empty_home, typed, write_rows

from shardwise.launch.plan import fp8
from shardwise.launch.terminal import Console
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.hardware import Gpu, Hardware
from shardwise.trainer.spec.job.sections import Allowance, Job
from shardwise.trainer.spec.messages.worker_requests import Fp8GainKey, Fp8GainRequest
from shardwise.trainer.spec.plan import Fp8Gain, Plan
from shardwise.trainer.spec.strategy import Fp8Recipe, Method, Precision
from shardwise.trainer.spec.units import GIB

HOPPER = machine("1xH100-SXM5-80GB", libraries=("torchao", "transformer-engine"))
VERSIONS = {"torch": "2.13.0", "transformer-engine": "2.10.0", "shardwise": "0.3"}
GAIN = fp8_gain_of(1.31)
JOB = """\
model: {{name: llama-3.2-1b}}
data: {{train: {data}, eval: none}}
train: {{seq_len: 1024, tokens_per_step: 16384, tokens: 2M}}
allow: [fp8]
"""


def key(*, job: Job | None = None, **changes: Any) -> Fp8GainKey:
    of: dict[str, Any] = {"shape": shape_of("8b"), "hardware": HOPPER, "versions": VERSIONS}
    return fp8.fp8_key(job or job_of(), **{**of, **changes})


def test_what_was_timed_is_found_again_and_a_broken_file_is_a_line(tmp_path: Path) -> None:
    assert fp8.read_fp8_gain(tmp_path, key()) == (None, None)
    assert fp8.store_fp8_gain(tmp_path, key(), GAIN) is None
    assert fp8.read_fp8_gain(tmp_path, key()) == (GAIN, None)
    better = fp8_gain_of(1.4)
    fp8.store_fp8_gain(tmp_path, key(), better)
    assert fp8.read_fp8_gain(tmp_path, key()) == (better, None)
    (file,) = (tmp_path / fp8.FOLDER).iterdir()
    fp8.store_fp8_gain(tmp_path / "other", key(shape=shape_of("1b")), GAIN)
    (other,) = (tmp_path / "other" / fp8.FOLDER).iterdir()
    for content in (b"", b'{"key": 1}', b"\xff\xfe", other.read_bytes()):
        file.write_bytes(content)
        gain, line = fp8.read_fp8_gain(tmp_path, key())
        assert gain is None and line is not None and str(file) in line and "is ignored" in line


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": shape_of("1b")},
        {"shape": replace(shape_of("8b"), model_type="gpt2")},  # the same sizes in layers of another class
        {"shape": replace(shape_of("8b"), num_layers=31)},
        {"hardware": machine("1xL40S", libraries=("torchao", "transformer-engine"))},
        {"hardware": machine("1xH100-SXM5-80GB", libraries=("torchao",))},
        {"job": job_of(pin={"compile": False})},
        {"job": job_of(seq_len=1024)},
        {"versions": {**VERSIONS, "torch": "2.14.0"}},
        {"versions": {**VERSIONS, "transformer-engine": "2.11.0"}},
        {"versions": {**VERSIONS, "torchao": "0.18.0"}},
        {"job": job_of(pin={"precision": Precision.FP8, "fp8_recipe": Fp8Recipe.BLOCK})},
        {"job": job_of(pin={"micro_batch": 4})},
    ],
)
def test_it_counts_for_nothing_else(tmp_path: Path, changes: dict[str, Any]) -> None:
    fp8.store_fp8_gain(tmp_path, key(), GAIN)
    assert fp8.read_fp8_gain(tmp_path, key(**changes)) == (None, None)


@pytest.mark.parametrize(
    ("num_ranks", "facts", "tokens"),
    [
        (1, {"seq_len": 2048, "tokens_per_step": 65536}, 4096),
        (1, {"seq_len": 512, "tokens_per_step": 65536}, 4096),
        (1, {"seq_len": 768, "tokens_per_step": 65536}, 2048),  # five rows of 768 are 3840
        (64, {"seq_len": 512, "tokens_per_step": 65536}, 1024),  # a rank has two rows of a step
        (256, {"seq_len": 512, "tokens_per_step": 65536}, 512),  # half of the ranks idle
        (1, {"seq_len": 8192, "tokens_per_step": 65536}, 8192),
        (1, {"seq_len": 131072, "tokens_per_step": 131072}, 8192),
        (1, {"seq_len": 512, "tokens_per_step": 65536, "pin": {"micro_batch": 2}}, 1024),
    ],
)
def test_the_micro_batch_that_is_timed(num_ranks: int, facts: dict[str, Any], tokens: int) -> None:
    assert fp8.timed_tokens(job_of(**facts), num_ranks) == tokens


def rows_in_fp8(plan: Plan) -> int:
    return sum(candidate.strategy.precision is Precision.FP8 for candidate in plan.candidates)


def test_plan_reads_what_was_kept(tmp_path: Path, monkeypatch, capsys) -> None:
    in_empty_home(tmp_path, monkeypatch)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    job, hardware = tmp_path / "job.yaml", tmp_path / "hardware.json"
    job.write_text(JOB.format(data=write_rows(tmp_path)))
    codec.write(hardware, HOPPER)

    def planned(*words: str) -> Plan:
        answer = typed(capsys, "plan", str(job), "--hardware", str(hardware), "--json", *words)
        assert answer.code == ExitCode.DONE
        return codec.decode(answer.out.encode(), Plan, origin="stdout")

    before = planned()
    assert before.fp8_gain is None and rows_in_fp8(before)
    slow = fp8_gain_of(0.93)
    fp8.store_fp8_gain(tmp_path / "cache", fp8.key_of(before), slow)
    after, pinned = planned(), planned("pin.precision=fp8")
    assert after.fp8_gain == pinned.fp8_gain == slow
    assert rows_in_fp8(pinned) and not rows_in_fp8(after)
    for words in ("allow=[]", "pin.precision=bf16-mixed"):
        assert planned(words).fp8_gain is None


REQUEST = Fp8GainRequest(model_config=TINY_LLAMA, tokens=4096, seq_len=2048, recipes=(Fp8Recipe.TORCHAO_TENSORWISE,))
ALLOWED: dict[str, Any] = {"allow": (Allowance.FP8,)}
PINNED: dict[str, Any] = {"pin": {"precision": Precision.FP8}}


def card(spec: str = "1xH100-SXM5-80GB", libraries: tuple[str, ...] = ("torchao",)) -> Hardware:
    """A machine whose cards no process of this one can see."""
    hardware = machine(spec, libraries=libraries)
    return replace(hardware, gpus=tuple(replace(gpu, uuid="GPU-of-no-machine") for gpu in hardware.gpus))


@pytest.mark.parametrize(
    ("hardware", "facts", "gain", "asks"),
    [
        (card(), ALLOWED, None, True),
        (card("1xL40S"), {**ALLOWED, "method": Method.LORA}, None, True),
        (card(), ALLOWED, GAIN, False),
        (card(), ALLOWED, fp8_gain_of(0.9), False),
        (card(), PINNED, None, False),
        (card(), {**ALLOWED, "pin": {"precision": Precision.BF16_MIXED}}, None, False),
        (card(), {}, None, False),
        (card(libraries=("transformer-engine",)), ALLOWED, None, True),
        (card(libraries=("transformer-engine", "torchao")), PINNED, None, True),
        (card(libraries=()), ALLOWED, None, False),
        (card("1xA100-SXM4-80GB"), ALLOWED, None, False),
        (machine("1xCPU", libraries=("torchao",)), ALLOWED, None, False),
    ],
)
def test_it_is_timed_where_that_decides(hardware: Hardware, facts, gain: Fp8Gain | None, asks: bool) -> None:
    assert fp8.needs_timing(plan_of("1b", hardware, fp8_gain=gain, **facts)) is asks


def test_where_no_device_answers_it_is_a_line_and_fp8_is_not_taken(tmp_path: Path) -> None:
    plan, stream = plan_of("1b", card(), **ALLOWED), io.StringIO()
    gain = fp8.fp8_gain_for(plan, cache=tmp_path, console=Console(stream))
    begins, ends = stream.getvalue().splitlines()
    assert gain is not None and gain.problem is not None and "CUDA" in gain.problem
    assert "FP8" in begins and gain.problem in ends
    assert fp8.read_fp8_gain(tmp_path, fp8.key_of(plan)) == (None, None), "the next run asks again"
    taken = plan_of("1b", card(), fp8_gain=gain, **ALLOWED)
    assert not rows_in_fp8(taken) and not fp8.needs_timing(taken)


@pytest.fixture
def module_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    def write(body: str) -> str:
        (tmp_path / "stand_in_fp8.py").write_text("import os, pathlib, sys, time\n" + body)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "stand_in_fp8"

    return write


WRITES = f"pathlib.Path(sys.argv[2]).write_bytes({codec.encode(GAIN)!r})\n"


def test_it_reads_the_request_and_sees_one_card(module_of: Callable[[str], str]) -> None:
    gpus = [Gpu(index=index, name="x", spec_name=None, memory_bytes=GIB, uuid=f"GPU-{index}") for index in (2, 3)]
    body = (
        "assert os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-2'\n"
        f"assert pathlib.Path(sys.argv[1]).read_bytes() == {codec.encode(REQUEST)!r}\n"
    )
    assert fp8.time_fp8(REQUEST, gpus, module=module_of(body + WRITES)) == GAIN


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("import no_such_library\n", "no_such_library"),
        ("os.kill(os.getpid(), 11)\n", "SIGSEGV"),
        ("", "result.json"),
        ("pathlib.Path(sys.argv[2]).write_text('{')\n", "result.json"),
        ("time.sleep(600)\n", "0.6 s"),
        (WRITES + "time.sleep(600)\n", "0.6 s"),
    ],
)
def test_what_goes_wrong_is_the_problem(module_of: Callable[[str], str], body: str, problem: str) -> None:
    timeout_s = 0.6 if "600" in body else 100
    gain = fp8.time_fp8(REQUEST, [], module=module_of(body), timeout_s=timeout_s)
    assert problem in (gain.problem or "") and (gain.speedup, gain.pays) == (None, False)
    assert (gain.recipe, gain.tokens) == (REQUEST.recipes[0], REQUEST.tokens)
