"""What timing FP8 found is kept for what it was measured on; `plan` reads it, and a broken file is a line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from planning_factory import fp8_gain_of, job_of, machine, shape_of
from typed_command import in_empty_home, typed, write_rows

from shardwise.launch.plan.fp8 import FOLDER, fp8_key, keep_fp8_gain, key_of, read_fp8_gain, timed_tokens
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.messages.worker_requests import Fp8GainKey
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Fp8Recipe, Precision

HOPPER = machine("1xH100-SXM5-80GB", libraries=("transformer-engine",))
VERSIONS = {"torch": "2.13.0", "transformer-engine": "2.10.0", "shardwise": "0.3"}
GAIN = fp8_gain_of(1.31)
COUNTS_FOR_NOTHING = "counts for nothing"
JOB = """\
model: {{name: llama-3.2-1b}}
data: {{train: {data}, eval: none}}
train: {{seq_len: 1024, tokens_per_step: 16384, tokens: 2M}}
allow: [fp8]
"""


def key(**changes: Any) -> Fp8GainKey:
    of: dict[str, Any] = {"shape": shape_of("8b"), "hardware": HOPPER, "versions": VERSIONS, **changes}
    return fp8_key(of.pop("job", job_of()), **of)


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_what_was_timed_is_found_again(tmp_path: Path) -> None:
    assert read_fp8_gain(tmp_path, key()) == (None, None)
    assert keep_fp8_gain(tmp_path, key(), GAIN) is None
    assert read_fp8_gain(tmp_path, key()) == (GAIN, None)
    better = fp8_gain_of(1.4)
    keep_fp8_gain(tmp_path, key(), better)
    assert read_fp8_gain(tmp_path, key()) == (better, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": shape_of("1b")},
        {"shape": replace(shape_of("8b"), model_type="gpt2")},  # the same sizes in layers of another class
        {"shape": replace(shape_of("8b"), num_layers=31)},
        {"hardware": machine("1xL40S", libraries=("transformer-engine",))},
        {"versions": {**VERSIONS, "torch": "2.14.0"}},
        {"versions": {**VERSIONS, "transformer-engine": "2.11.0"}},
        {"versions": {**VERSIONS, "torchao": "0.18.0"}},
        {"job": job_of(pin={"precision": Precision.FP8, "fp8_recipe": Fp8Recipe.BLOCK})},
        {"job": job_of(pin={"micro_batch": 4})},
    ],
    ids=["model", "layers", "depth", "device", "torch", "library", "other library", "recipe", "tokens"],
)
def test_it_counts_for_nothing_else(tmp_path: Path, changes: dict[str, Any]) -> None:
    keep_fp8_gain(tmp_path, key(), GAIN)
    assert read_fp8_gain(tmp_path, key(**changes)) == (None, None)


@pytest.mark.parametrize("content", [b"", b'{"key": 1}', b"\xff\xfe"])
def test_a_broken_file_is_a_line(tmp_path: Path, content: bytes) -> None:
    keep_fp8_gain(tmp_path, key(), GAIN)
    (file,) = (tmp_path / FOLDER).iterdir()
    file.write_bytes(content)
    gain, line = read_fp8_gain(tmp_path, key())
    assert gain is None and str(file) in (line or "") and COUNTS_FOR_NOTHING in (line or "")


def test_a_file_of_another_model_is_a_line(tmp_path: Path) -> None:
    keep_fp8_gain(tmp_path, key(), GAIN)
    (mine,) = (tmp_path / FOLDER).iterdir()
    keep_fp8_gain(tmp_path, key(shape=shape_of("1b")), GAIN)
    (other,) = set((tmp_path / FOLDER).iterdir()) - {mine}
    other.rename(mine)
    gain, line = read_fp8_gain(tmp_path, key())
    assert gain is None and str(mine) in (line or "") and COUNTS_FOR_NOTHING in (line or "")


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
    assert timed_tokens(job_of(**facts), num_ranks) == tokens


# --- `shardwise plan` -----------------------------------------------------------------------------------------------


class Planning:
    """`shardwise plan` of a job that allows FP8, for a Hopper card with Transformer Engine."""

    def __init__(self, folder: Path) -> None:
        self.job = folder / "job.yaml"
        self.job.write_text(JOB.format(data=write_rows(folder)))
        self.hardware = folder / "hardware.json"
        codec.write(self.hardware, HOPPER)
        self.cache = folder / "cache"

    @property
    def words(self) -> list[str]:
        return ["plan", str(self.job), "--hardware", str(self.hardware)]


@pytest.fixture
def planning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planning:
    in_empty_home(tmp_path, monkeypatch)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    return Planning(tmp_path)


@pytest.fixture
def planned(planning: Planning, capsys: pytest.CaptureFixture[str]) -> Callable[..., Plan]:
    def run(*words: str) -> Plan:
        answer = typed(capsys, *planning.words, "--json", *words)
        assert answer.code == ExitCode.DONE
        return codec.decode(answer.out.encode(), Plan, origin="stdout")

    return run


def rows_in_fp8(plan: Plan) -> int:
    return sum(candidate.strategy.precision is Precision.FP8 for candidate in plan.candidates)


def test_plan_reads_what_was_kept(planning: Planning, planned: Callable[..., Plan]) -> None:
    before = planned()
    assert before.fp8_gain is None and rows_in_fp8(before)
    slow = fp8_gain_of(0.93)
    keep_fp8_gain(planning.cache, key_of(before), slow)
    after = planned()
    assert after.fp8_gain == slow and not rows_in_fp8(after)
    pinned = planned("pin.precision=fp8")
    assert pinned.fp8_gain == slow and rows_in_fp8(pinned)
    for words in ("allow=[]", "pin.precision=bf16-mixed"):
        assert planned(words).fp8_gain is None


def test_plan_goes_on_without_a_file_that_is_broken(planning: Planning, planned: Callable[..., Plan]) -> None:
    keep_fp8_gain(planning.cache, key_of(planned()), GAIN)
    (file,) = (planning.cache / FOLDER).iterdir()
    file.write_text("{")
    plan = planned()
    assert plan.fp8_gain is None
    assert [COUNTS_FOR_NOTHING in note for note in plan.notes if str(file) in note] == [True]
