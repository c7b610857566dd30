"""Rungs are written as in a job file, figures are compared with the rung below, and limits hold what does not fit."""

import csv
import io

import pytest
from msgspec.structs import replace
from planning_factory import machine, plan_of
from report_factory import MIB, make_candidate, make_report

from shardwise.launch.run import ladder
from shardwise.trainer.planning.device import device_of
from shardwise.trainer.planning.page.content import page_text
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.report import Ending, Figures, MemoryFigures, SpeedFigures
from shardwise.trainer.spec.units import GIB


@pytest.mark.parametrize(
    ("word", "settings"),
    [
        ("bf16-mixed", {"pin.precision": "bf16-mixed"}),
        ("qlora", {"train.method": "qlora"}),
        ("compile", {"pin.compile": "true"}),
        ("loss=eager", {"pin.loss": "eager"}),
        ("micro_batch=2", {"pin.micro_batch": "2"}),
        ("lora+train.lora.rank=4", {"train.method": "lora", "train.lora.rank": "4"}),
    ],
)
def test_a_rung_is_what_it_would_be_in_a_job_file(word, settings):
    (step,) = ladder.parse_steps(word)
    assert (step.name, step.settings) == (word, settings)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("fp32,eager", "attention=eager or loss=eager"),
        ("chunkd", r"did you mean chunked\?"),
        ("data.train=other", r"data\.train"),
        ("", "technique"),
    ],
)
def test_what_is_no_rung_is_answered_with_what_would_be(text, fact):
    with pytest.raises(InputError, match=fact):
        ladder.parse_steps(text)


def test_the_default_rungs_compute_in_what_the_card_has_which_limits_itself_and_a_cpu_is_capped():
    newest, old = ladder.default_steps(machine("1xRTX-4090")), ladder.default_steps(machine("1xT4"))
    names = "fp32 bf16-mixed full sdpa flash chunked adamw_8bit lora qlora"
    assert [step.name for step in newest] == names.split() and old[1].name == "fp16-mixed"
    unknown = machine("1xT4")
    unknown = replace(unknown, gpus=tuple(replace(gpu, compute_capability=None) for gpu in unknown.gpus))
    assert ladder.default_steps(unknown)[1].name == "bf16-mixed"
    plan, here = plan_of("tiny", "1xCPU"), machine("1xCPU")
    held = ladder.held_to(plan, here)
    assert held.hardware.vram_cap_bytes == held.chosen.memory.usable_bytes == device_of(here).usable_bytes
    here = machine("1xRTX-4090")
    held = ladder.held_to(plan_of("tiny", "8xH100-SXM5-80GB"), here)
    assert held.hardware == here
    assert held.chosen.memory.usable_bytes == device_of(here).usable_bytes < 24 * GIB
    assert len(held.candidates) == 1


def ran(name: str, *, peak: int, predicted: int, step_s: float | None = 1.0) -> ladder.StepResult:
    memory = MemoryFigures(peak_allocated_bytes=peak * MIB, peaks={"forward": peak * MIB, "optimizer": MIB})
    report = replace(make_report(), measured=Figures(memory=memory, speed=SpeedFigures(step_s=step_s)), exit_code=0)
    return result(name, ladder.Outcome.RAN, predicted=predicted, report=report)


def result(name: str, outcome: ladder.Outcome, *, predicted: int = 10, report=None, reason=None) -> ladder.StepResult:
    candidate = make_candidate()
    candidate = replace(candidate, memory=replace(candidate.memory, peak_allocated_bytes=predicted * MIB))
    (step,) = ladder.parse_steps(name)
    return ladder.StepResult(step=step, outcome=outcome, candidate=candidate, report=report, reason=reason)


FULL = replace(make_report(), ending=Ending.OUT_OF_MEMORY, exit_code=5)
RESULTS = (
    result("fp32", ladder.Outcome.OUT_OF_MEMORY, predicted=500, report=FULL),
    ran("bf16-mixed", peak=400, predicted=420, step_s=2.0),
    result("flash", ladder.Outcome.SKIPPED, reason="flash-attn needs a GPU"),
    ran("full", peak=100, predicted=95, step_s=3.0),
    result("lora", ladder.Outcome.FAILED, reason="peft is not there"),
)


def test_a_change_is_against_the_last_rung_that_ran_and_one_out_of_memory_has_its_need_also_as_csv():
    rows = {row["rung"]: row for row in ladder.ladder_rows(RESULTS)}
    first, second, full = rows["fp32"], rows["bf16-mixed"], rows["full"]
    assert second["peak_change"] is None  # what is below ran out of memory
    assert (full["peak_change"], full["step_change"]) == (pytest.approx(-0.75), pytest.approx(0.5))
    assert (second["peak_difference"], full["peak_difference"]) == (pytest.approx(-1 / 21), pytest.approx(1 / 19))
    assert (full["forward_peak_bytes"], full["backward_peak_bytes"]) == (100 * MIB, None)
    assert (first["outcome"], first["exit_code"], first["peak_bytes"]) == ("out of memory", 5, None)
    assert (first["need_bytes"], first["limit_bytes"]) == (33 * MIB, 1000 * MIB)
    assert first["predicted_peak_bytes"] == 500 * MIB
    read = list(csv.DictReader(io.StringIO(ladder.ladder_csv(list(rows.values())))))
    assert [row["rung"] for row in read] == ["fp32", "bf16-mixed", "flash", "full", "lora"]
    assert [read[place]["peak_bytes"] for place in (0, 3)] == ["", str(100 * MIB)]
    assert read[3]["settings"] == "pin.checkpointing=full"


def test_the_table_as_text():
    text = page_text(ladder.ladder_page("a job", RESULTS, common="The same on all."), width=100)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "bf16-mixed 400 MiB 420 MiB -4.8% 2 s 1 s" in lines
    assert "full 100 MiB 95 MiB +5.3% -75.0% 3 s 1 s +50.0%" in lines
    assert "fp32 out of memory 500 MiB - 1 s" in lines
    notes = {line.partition(":")[0]: line for line in lines if ": " in line}
    assert "flash-attn needs a GPU" in notes["flash"] and "peft is not there" in notes["lora"]
    assert [fact for fact in ("exit code 5", "33 MiB", "1000 MiB") if fact not in notes["fp32"]] == []
