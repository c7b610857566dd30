"""The forecast from a step to a whole job, and the text of a profile."""

import pytest
from msgspec.structs import replace
from planning_factory import data_of, plan_of
from report_factory import MIB, make_report

from shardwise.launch.show.report import forecast, profile_json, profile_page
from shardwise.trainer.planning.page.content import page_text
from shardwise.trainer.spec.plan import OperatorTime, ProfileFigures, RetainedBytes
from shardwise.trainer.spec.report import Figures, MemoryFigures, SpeedFigures

FIGURES = ProfileFigures(
    step=8,
    step_s=1.5,
    retained_bytes=40 * MIB,
    retained=(RetainedBytes(module="model.layers.3.mlp", place="transformer block 3, mlp", num_bytes=12 * MIB),),
    retained_in_all_blocks=(RetainedBytes(module="mlp", place="mlp", num_bytes=36 * MIB),),
    operators=(
        OperatorTime(name="aten::mm", num_calls=45, seconds=0.6),
        OperatorTime(name="aten::exp", num_calls=1, seconds=0.2),
    ),
    files={"trace.json.gz": "every operator with its time"},
)
MEASURED = Figures(
    memory=MemoryFigures(peak_allocated_bytes=25 * MIB, parts={"weights": 9 * MIB}, peaks={"forward": 25 * MIB}),
    speed=SpeedFigures(step_s=0.8, parts={"forward": 0.2, "backward": 0.6, "wait": 0.0}),
)


def plan():
    return plan_of("tiny", "1xRTX-4090", data=data_of(num_rows=160, seq_len=512), steps=30, epochs=None)


def test_a_forecast_is_steps_times_seconds():
    found = forecast(plan(), 0.5)
    assert found["job_s"] == pytest.approx(15.0)
    assert found["epoch_s"] == pytest.approx(160 / 16 * 0.5)  # rows of 512 tokens, 8192 tokens a step
    assert found["tokens_per_s"] == pytest.approx(8192 / 0.5)
    streamed = replace(plan(), data=replace(plan().data, is_stream=True))
    assert forecast(streamed, 0.5)["epoch_s"] is None


def lines_of(figures: ProfileFigures | None, steps_s: list[float]) -> list[str]:
    report = replace(make_report(), measured=MEASURED)
    text = page_text(profile_page(plan(), report, figures, steps_s), width=100)
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_profile_shows_time_and_memory_by_part():
    lines = lines_of(FIGURES, [0.8])
    assert "backward 600 ms 75.0%" in lines
    assert not any(line.startswith("wait") for line in lines)  # no rank waited
    assert "aten::mm 45 600 ms 75.0%" in lines
    assert "weights 9 MiB 10 MiB" in lines
    assert "forward 25 MiB" in lines
    assert any("40 MiB" in line and "12 MiB" in line for line in lines)
    assert "transformer block 3, mlp 12 MiB" in lines
    assert "mlp 36 MiB" in lines
    assert "profile/trace.json.gz: every operator with its time" in lines


def test_the_same_figures_as_json():
    shown = profile_json(plan(), replace(make_report(), measured=MEASURED), FIGURES, [0.8])
    assert shown["measured"]["job_s"] == pytest.approx(24.0) and shown["predicted"]["step_s"] == 1.0
    assert shown["profile"]["kept"][0]["num_bytes"] == 12 * MIB
    untimed = replace(make_report(), measured=Figures())
    assert profile_json(plan(), untimed, None, [])["measured"] is None
