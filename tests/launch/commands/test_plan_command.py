"""`shardwise plan` as it is typed: one machine or several, questions on limits, text, JSON and a page, exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest
from typed_command import Run, in_empty_home, typed, write_rows

from shardwise.trainer.spec.errors import ExitCode

JOB = """\
model: {{name: llama-3.2-1b}}
data: {{train: {data}, eval: none}}
train: {{seq_len: 1024, tokens_per_step: 16384, tokens: 2M}}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`shardwise COMMAND job.yaml WORDS` in an empty home."""
    in_empty_home(tmp_path, monkeypatch)
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(data=write_rows(tmp_path)))
    return lambda command, *words: typed(capsys, command, str(job), *words)


def test_a_machine_that_is_not_here_is_planned_for(run: Run) -> None:
    code, out, err = run("plan", "--hardware", "1xRTX-4090")
    assert (code, err) == (ExitCode.DONE, "")
    first, _, then = out.partition("\n\n")
    assert first.endswith("1.24B parameters, on 1 x RTX-4090") and then.startswith("chosen: ")


def test_cards_are_chosen_on_a_machine_that_is_not_here(run: Run) -> None:
    code, out, _ = run("plan", "--hardware", "2xRTX-4090", "--gpus", "1")
    assert code == ExitCode.DONE
    assert out.splitlines()[0].endswith(" on 1 x RTX-4090")
    code, _, err = run("plan", "--hardware", "2xRTX-4090", "--gpus", "2")
    assert code == ExitCode.INPUT and "GPU 2" in err and "GPUs 0 and 1" in err


# --- looking ahead ----------------------------------------------------------------------------------------------


def test_where_nothing_fits_the_error_stands(run: Run) -> None:
    code, out, err = run("plan", "model.name=llama-3.1-70b", "--hardware", "1xRTX-4060-8GB")
    assert (code, out) == (ExitCode.NOTHING_FITS, "")
    assert err.startswith("shardwise: ") and "70.6B parameters" in err


def test_what_cannot_be_trained_is_wrong_input(run: Run) -> None:
    code, _, err = run("plan", "train.method=qlora", "pin.sharding=none", "--hardware", "2xRTX-4090")
    assert code == ExitCode.INPUT and "2 ranks" in err


# --- several machines -------------------------------------------------------------------------------------------


def test_several_machines_are_explained_and_compared(run: Run) -> None:
    code, out, _ = run("plan", "price_per_gpu_hour=2", "--hardware", "1xRTX-4090", "--hardware", "2xH100-SXM5-80GB")
    assert code == ExitCode.DONE
    assert out.count("\nchosen: ") == 2
    compared = out.rpartition("\n\n")[2]
    assert "fastest: 2xH100-SXM5-80GB" in compared and "cheapest: " in compared
    assert max(map(len, out.splitlines())) <= 100


def test_one_machine_that_fits_is_enough(run: Run) -> None:
    words = ("model.name=llama-3.1-70b", "--hardware", "1xRTX-4060-8GB", "--hardware", "8xH100-SXM5-80GB")
    code, out, _ = run("plan", *words)
    assert code == ExitCode.DONE and "nothing fits" in out
    assert run("plan", *words[:3])[0] == ExitCode.NOTHING_FITS


# --- questions --------------------------------------------------------------------------------------------------


def test_questions_are_answered_in_text_on_a_page_and_in_json(run: Run, tmp_path: Path) -> None:
    sizes = {"longest_seq": "seq_len", "largest_batch": "micro_batch", "largest_model": "num_parameters"}
    options = [f"--{question.replace('_', '-')}" for question in sizes]
    page = tmp_path / "limits.html"
    code, out, _ = run("plan", "--hardware", "1xRTX-4090", *options, "--html", str(page))
    assert code == ExitCode.DONE and "chosen: " not in out and page.read_text().count("<h1>") == 1
    assert all(f"the {question.split('_')[0]}" in out for question in sizes)
    code, out, _ = run("plan", "--hardware", "1xRTX-4090", "--hardware", "1xL4", *options, "--json")
    answers: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    assert [(each["machine"], each["question"]) for each in answers] == [
        (machine, question) for machine in ("1 x RTX-4090", "1 x L4") for question in sizes
    ]
    for answer in answers:
        assert {row["method"] for row in answer["answers"]} >= {"lora", "qlora"}
        assert all(row[sizes[answer["question"]]] > 0 for row in answer["answers"])


def test_a_machine_that_holds_nothing_answers_so(run: Run) -> None:
    words = ("model.name=llama-3.1-70b", "--hardware", "1xRTX-4060-8GB", "--longest-seq")
    code, out, _ = run("plan", *words)
    assert code == ExitCode.NOTHING_FITS and "nothing fits" in out


# --- the page ---------------------------------------------------------------------------------------------------


def test_the_page_holds_every_machine_and_the_comparison(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    code, out, _ = run("plan", "--hardware", "1xRTX-4090", "--hardware", "1xL4", "--html", str(page))
    assert code == ExitCode.DONE and "chosen: " in out
    assert page.read_text().count("<h1>") == 3


def test_a_page_in_a_folder_that_is_not_there_is_wrong_input(run: Run, tmp_path: Path) -> None:
    page = str(tmp_path / "none" / "plan.html")
    code, _, err = run("plan", "--hardware", "1xRTX-4090", "--html", page)
    assert code == ExitCode.INPUT and page in err
