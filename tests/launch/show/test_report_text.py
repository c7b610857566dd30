"""The report shows the end of a run, and every prediction with its measurement."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace
from report_factory import make_report
from run_factory import attempt_record

from shardwise.launch.show.report import render_report
from shardwise.trainer.spec.report import AttemptRecord, Ending, Fault
from shardwise.trainer.spec.units import GIB


def test_predicted_and_measured_stand_side_by_side_with_the_difference():
    text = render_report(make_report(), run_dir=Path("runs/bot"))
    assert "runs/bot: finished" in text and "10 of 10" in text
    (peak,) = [line for line in text.splitlines() if line.startswith("peak allocated")]
    assert peak.split() == ["peak", "allocated", "30", "MiB", "25", "MiB", "+20.0%"]
    (gradients,) = [line for line in text.splitlines() if "gradients" in line]
    assert gradients.split() == ["gradients", "0", "B", "3", "MiB", "-100.0%"]
    assert "activations" not in text, "nothing predicted, nothing measured: no line"
    report = make_report()
    unpredicted = replace(report.predicted, memory=replace(report.predicted.memory, device_bytes=0))
    measured = replace(report.measured, memory=replace(report.measured.memory, device_bytes=GIB))
    lines = render_report(replace(report, predicted=unpredicted, measured=measured), run_dir=Path("r")).splitlines()
    (device,) = [line.split() for line in lines if line.startswith("device")]
    assert device == ["device", "-", "1", "GiB"], "a prediction of 0 is none"
    assert "tokens/s per device" in text and "-20.0%" in text
    (line,) = [line for line in text.splitlines() if "unigram" in line]
    assert all(figure in line for figure in ("4.0000", "6.0000", "0.67"))
    (seen,) = [line for line in text.splitlines() if "LlamaForCausalLM" in line]
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


def test_the_share_of_tokens_that_are_right_and_the_score_of_pairs_are_shown():
    report = make_report()
    (last,) = report.evaluations
    text = render_report(replace(report, evaluations=(replace(last, accuracy=0.253),)), run_dir=Path("r"))
    assert "25.3%" in text
    pairs = replace(last, loss=0.61, perplexity=9.25, reward_accuracy=0.7, reward_margin=0.305)
    text = render_report(replace(report, evaluations=(pairs,)), run_dir=Path("r"))
    assert any(all(figure in line for figure in ("0.6100", "70.0%", "0.305")) for line in text.splitlines())
    assert "unigram" not in text, "a loss of pairs is no entropy"
