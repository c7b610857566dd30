"""Texts of a report and of a profile: the end of a run, each prediction with its measurement, a forecast."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from planning_factory import data_of, plan_of
from report_factory import MIB, make_report
from run_factory import attempt_record

from shardwise.launch.show.report import (
    comparison_rows,
    forecast,
    profile_json,
    profile_page,
    render_report,
)
from shardwise.trainer.planning.page.content import page_text
from shardwise.trainer.spec.plan import OperatorTime, ProfileFigures
from shardwise.trainer.spec.report import AttemptRecord, DeviceTime, Ending, Fault, Figures, MemoryFigures, SpeedFigures
from shardwise.trainer.spec.units import GIB


def test_predicted_and_measured_stand_side_by_side_with_the_difference():
    text = render_report(make_report(), run_dir=Path("runs/bot"))
    assert "runs/bot: finished" in text and "10 of 10" in text
    (peak,) = [line for line in text.splitlines() if line.startswith("peak allocated")]
    assert peak.split() == ["peak", "allocated", "30", "MiB", "25", "MiB", "-16.7%"]
    (gradients,) = [line for line in text.splitlines() if "gradients" in line]
    assert gradients.split() == ["gradients", "0", "B", "3", "MiB"]
    assert "activations" not in text, "nothing predicted, nothing measured: no line"
    report = make_report()
    unpredicted = replace(report.predicted, memory=replace(report.predicted.memory, device_bytes=0))
    measured = replace(report.measured, memory=replace(report.measured.memory, device_bytes=GIB))
    lines = render_report(replace(report, predicted=unpredicted, measured=measured), run_dir=Path("r")).splitlines()
    (device,) = [line.split() for line in lines if line.startswith("device")]
    assert device == ["device", "-", "1", "GiB"], "a prediction of 0 is none"
    assert "tokens/s per device" in text and "+25.0%" in text and "MFU" not in text
    used = replace(report.measured, speed=replace(report.measured.speed, mfu=0.41))
    lines = render_report(replace(report, measured=used), run_dir=Path("r")).splitlines()
    assert ["MFU", "-", "41.0%"] in [line.split() for line in lines]
    wide = render_report(make_report(), run_dir=Path("r"), width=200)
    (line,) = [line for line in wide.splitlines() if "unigram" in line]
    assert all(figure in line for figure in ("4.0000", "6.0000", "0.67"))
    (seen,) = [line for line in wide.splitlines() if "LlamaForCausalLM" in line]
    assert all(fact in seen for fact in ("1 process", "AdamW", "fp32", "sdpa", "chunked"))
    assert "before: x x" in text and "after: main():\n              pass" in text
    assert "what would help:" not in text


def test_a_bad_ending_names_its_error_and_incidents():
    report = make_report(
        ending=Ending.FAILED, error="ValueError: no", incidents=("retried once",), attempts=2, resumed_from_step=4,
        verified=None, sample=None, evaluations=(), final_loss=None, export=None, checkpoint=None,
    )  # fmt: skip
    text = render_report(report, run_dir=Path("r"))
    assert "r: failed" in text and "2 attempts" in text and "step 4" in text
    assert "ValueError: no" in text and "retried once" in text and "verified" not in text


def attempt(number: int, **changes: Any) -> AttemptRecord:
    usual: dict[str, Any] = {"strategy": "ddp/fp32/adamw", "num_ranks": 2, "micro_batch": 2, "duration_s": 19.0}
    return attempt_record(number, **{**usual, "step": 14, "predicted_peak_bytes": int(8.1 * GIB), **changes})


def test_every_attempt_is_shown_as_in_the_documents():
    memory = attempt(
        1, micro_batch=4, accumulation=1, step=2, ending=Ending.OUT_OF_MEMORY, fault=Fault.OUT_OF_MEMORY,
        duration_s=21.0, measured_peak_bytes=int(7.9 * GIB),
    )  # fmt: skip
    killed = attempt(2, resumed_from_step=2, step=7, ending=Ending.FAILED, fault=Fault.KILLED, duration_s=24.0)
    history = (memory, killed, attempt(3, resumed_from_step=6))
    text = render_report(make_report(history=history, attempts=3), run_dir=Path("runs/bot"))
    document = (Path(__file__).parents[3] / "docs" / "surviving.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("  attempt ")]
    assert len(lines) == 3
    assert "attempt 1" not in render_report(make_report(history=history[:1]), run_dir=Path("runs/bot"))
    assert [line for line in lines if f"    {line}\n" not in document] == []


def test_the_share_of_tokens_that_are_right_the_score_of_pairs_and_the_time_of_the_device_are_shown():
    report = make_report()
    (last,) = report.evaluations
    text = render_report(replace(report, evaluations=(replace(last, accuracy=0.253),)), run_dir=Path("r"))
    assert "25.3%" in text
    pairs = replace(last, loss=0.61, perplexity=9.25, reward_accuracy=0.7, reward_margin=0.305)
    text = render_report(replace(report, evaluations=(pairs,)), run_dir=Path("r"), width=200)
    assert any(all(figure in line for figure in ("0.6100", "70.0%", "0.305")) for line in text.splitlines())
    assert "unigram" not in text, "a loss of pairs is no entropy"
    text = render_report(replace(report, evaluations=(replace(last, unigram_entropy_nats=None),)), run_dir=Path("r"))
    assert "held-out loss 4.0000" in text and "unigram" not in text
    kinds = {"matrix products": 0.42, "attention": 0.1, "copies": 0.004}
    sampled = DeviceTime(num_steps=2, idle_share=0.31, kinds=kinds)
    lines = render_report(make_report(device_time=sampled), run_dir=Path("r")).splitlines()
    (line,) = [line for line in lines if "idle" in line]
    assert line.endswith("2 sampled steps: idle 31%, matrix products 42%, attention 10%")


OPERATORS = (("aten::mm", 45, 0.6), ("aten::exp", 1, 0.2))
FIGURES = ProfileFigures(
    step=8, step_s=1.5, files={"trace.json.gz": "every operator with its time"},
    operators=tuple(OperatorTime(name=name, num_calls=count, seconds=each) for name, count, each in OPERATORS),
)  # fmt: skip
MEASURED = Figures(
    memory=MemoryFigures(peak_allocated_bytes=25 * MIB, parts={"weights": 9 * MIB}, peaks={"forward": 25 * MIB}),
    speed=SpeedFigures(step_s=0.8, parts={"forward": 0.2, "backward": 0.6, "wait": 0.0}),
)
PLAN = plan_of("tiny", "1xRTX-4090", data=data_of(num_rows=160, seq_len=512), steps=30, epochs=None)


def test_a_forecast_is_steps_times_seconds():
    found = forecast(PLAN, 0.5)
    assert found["job_s"] == pytest.approx(15.0) and found["tokens_per_s"] == pytest.approx(8192 / 0.5)
    assert found["epoch_s"] == pytest.approx(160 / 16 * 0.5)  # rows of 512 tokens, 8192 tokens a step
    half = replace(PLAN, data=replace(PLAN.data, num_tokens=PLAN.data.num_tokens // 2))
    assert forecast(half, 0.5)["tokens_per_s"] == pytest.approx(4096 / 0.5), "padding is no token"
    assert half.num_tokens == PLAN.num_tokens // 2 == 30 * 4096
    streamed = replace(PLAN, data=replace(PLAN.data, is_stream=True))
    assert forecast(streamed, 0.5)["epoch_s"] is None


def test_a_profile_shows_time_and_memory_by_part_and_the_same_as_json():
    report = replace(make_report(), measured=MEASURED)
    text = page_text(profile_page(PLAN, report, FIGURES, [0.8]), width=100)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert {"backward 600 ms 75.0%", "aten::mm 45 600 ms 75.0%", "weights 9 MiB 10 MiB", "forward 25 MiB"} <= {*lines}
    assert "profile/trace.json.gz: every operator with its time" in lines
    assert not any(line.startswith("wait") for line in lines)  # no rank waited
    shown = profile_json(PLAN, report, FIGURES, [0.8])
    assert shown["measured"]["job_s"] == pytest.approx(24.0) and shown["predicted"]["step_s"] == 1.0
    assert shown["profile"]["operators"][0]["num_calls"] == 45
    untimed = replace(make_report(), measured=Figures())
    assert profile_json(PLAN, untimed, None, [])["measured"] is None


def rows_of(**changes: Any) -> dict[str, list[str]]:
    report = make_report(**changes)
    rows = comparison_rows(report.predicted, report.measured, report=report)
    return {label.strip(): cells for label, *cells in rows}


def test_a_part_of_a_run_is_not_compared_with_the_whole_one_nor_the_longest_row_with_those_of_a_step():
    stopped = rows_of(duration_s=10.0, predicted_s=40.0, ending=Ending.STOPPED)
    assert stopped["time of the run"] == ["40 s", "10 s", ""]
    rows = rows_of(predicts_longest_row=True)
    assert rows["peak allocated"] == ["30 MiB", "25 MiB", ""]
    assert rows["tokens/s per device"][2], "speed is of all rows"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_sentences_of_a_report_have_the_width_of_the_terminal(width: int):
    report = make_report(predicts_longest_row=True)
    speed = replace(report.measured.speed, queued_share=0.76, parts={f"phase {number}": 1.0 for number in range(12)})
    report = replace(report, measured=replace(report.measured, speed=speed))
    text = render_report(report, run_dir=Path("r"), width=width)
    assert "other programs used the cores 76%" in " ".join(text.split()) and "longest row" in text
    assert max(map(len, text.splitlines())) <= width
