"""Steps of the GPU benchmark are done once, within the minutes, and gone on with by the next call."""

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from on_gpu.case import Case, CaseResult, Outcome
from on_gpu.models import model_config, model_folder
from on_gpu.pieces import Piece, Progress, Step, StepLog, go_through

from launch.console import Console
from launch.supervisor import StopKind, StopRequest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WORK = Path("/work/of/me")
FOREVER = time.monotonic() + 3600


def bench():
    """What going through steps needs of a bench."""
    return SimpleNamespace(work=WORK, stop=StopRequest(), console=Console(io.StringIO()))


def piece(*names: str, version: int = 1, calls: list[str] | None = None, **steps) -> Piece:
    def run(name: str):
        def step():
            if calls is not None:
                calls.append(name)
            return steps[name]() if name in steps else {"outcome": "ran"}

        return step

    return Piece(
        name="piece",
        about="",
        steps=lambda _bench, _done: [Step(name, run(name), expected_s=1.0) for name in names],
        tables=lambda _rows: {},
        version=version,
    )


def test_a_step_that_is_done_is_not_done_again(tmp_path: Path):
    calls: list[str] = []
    path = tmp_path / "steps.jsonl"
    assert go_through(piece("a", calls=calls), bench(), StepLog(path), until_s=FOREVER) == Progress(1, 0, 1)
    assert go_through(piece("a", "b", calls=calls), bench(), StepLog(path), until_s=FOREVER) == Progress(2, 0, 1)
    assert calls == ["a", "b"]
    go_through(piece("a", "b", calls=calls), bench(), StepLog(path), until_s=FOREVER, is_again=True)
    assert calls == ["a", "b", "a", "b"]


def test_a_step_is_done_again_where_what_it_measures_has_changed(tmp_path: Path):
    calls: list[str] = []
    log = StepLog(tmp_path / "steps.jsonl")
    go_through(piece("a", calls=calls), bench(), log, until_s=FOREVER)
    go_through(piece("a", calls=calls, version=2), bench(), log, until_s=FOREVER)
    assert calls == ["a", "a"]


def test_no_step_begins_that_would_end_after_the_minutes(tmp_path: Path):
    calls: list[str] = []
    log = StepLog(tmp_path / "steps.jsonl")
    progress = go_through(piece("a", "b", calls=calls), bench(), log, until_s=time.monotonic() + 0.5)
    assert (progress, calls) == (Progress(0, 2), [])


def test_a_step_that_raises_is_a_row_with_its_error_and_the_others_go_on(tmp_path: Path):
    def fail():
        raise ValueError("no such thing")

    log = StepLog(tmp_path / "steps.jsonl")
    assert go_through(piece("a", "b", a=fail), bench(), log, until_s=FOREVER) == Progress(2, 0, 2)
    rows = log.rows(piece())
    assert rows == {"a": {"error": "ValueError: no such thing"}, "b": {"outcome": "ran"}}


def test_rows_name_no_folder_of_the_machine(tmp_path: Path):
    def fail():
        raise OSError(f"{WORK}/rows is gone")

    log = StepLog(tmp_path / "steps.jsonl")
    go_through(piece("a", "b", a=lambda: {"weights": [f"{WORK}/models"]}, b=fail), bench(), log, until_s=FOREVER)
    assert log.rows(piece()) == {"a": {"weights": [".../models"]}, "b": {"error": "OSError: .../rows is gone"}}


def test_a_step_in_which_a_stop_was_asked_for_is_left(tmp_path: Path):
    around = bench()

    def stop():
        around.stop.kind = StopKind.INTERRUPT
        return {}

    log = StepLog(tmp_path / "steps.jsonl")
    assert go_through(piece("a", "b", a=stop), around, log, until_s=FOREVER) == Progress(0, 2)
    assert log.rows(piece()) == {}


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path):
    path = tmp_path / "steps.jsonl"
    go_through(piece("a"), bench(), StepLog(path), until_s=FOREVER)
    path.write_text(path.read_text() + '{"piece": "piece", "vers')
    assert set(StepLog(path).rows(piece())) == {"a"}


def test_a_call_in_which_nothing_can_be_done_says_so_and_ends_the_loop(tmp_path: Path):
    command = [sys.executable, BENCHMARKS / "gpu.py", "path", "--tiny", "--minutes", "0", "--out", tmp_path / "work"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 1, told.stderr
    assert "path: 0 steps done" in told.stdout and "fits into 0 minutes" in told.stdout
    (kept,) = (tmp_path / "work").glob("cpu-rehearsal-*.json")
    assert json.loads(kept.read_text())["pieces"]["path"] == {}


def test_what_a_plan_said_of_the_fit_is_kept():
    case = Case(name="a", model="llama-3.2-1b", micro_batch=2, accumulation=3)
    assert case.sequences_per_step == 6
    assert CaseResult(case=case, outcome=Outcome.REFUSED).said_fits is None
    assert CaseResult(case=case, outcome=Outcome.RAN, need_bytes=2, usable_bytes=1).said_fits is False


def test_a_tiny_model_keeps_what_makes_its_architecture(tmp_path: Path):
    whole, tiny = (model_config("qwen2.5-0.5b", is_tiny=is_tiny) for is_tiny in (False, True))
    assert (whole["hidden_size"], whole["vocab_size"]) == (896, 151936)
    assert tiny["model_type"] == "qwen2" and tiny["tie_word_embeddings"] and tiny["vocab_size"] == 512


def test_drawn_weights_load_as_any_model_does(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    folder = model_folder("llama-3.2-1b", tmp_path, is_tiny=True)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert 0.018 < model.model.embed_tokens.weight.float().std().item() < 0.022
    assert model_folder("llama-3.2-1b", tmp_path, is_tiny=True) == folder
