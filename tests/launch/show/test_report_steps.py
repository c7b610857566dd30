"""Figures of metrics.jsonl: every complete line counts as time, the last line of a step as its figure."""

import json
import subprocess
from pathlib import Path

import pytest
from reported_run import step_rows, write_run
from warm_python import REAL_PYTHON

from shardwise.launch.rundir.metrics import Step, read_steps
from shardwise.launch.show.recorded_run import figures_of, last_of_each, observed, steady_steps
from shardwise.launch.show.report import comparison_rows
from shardwise.trainer.planning.explain.recommend import Observed
from shardwise.trainer.spec.report import Figures


def steps_of(rows: list[dict[str, object]]) -> tuple[Step, ...]:
    names = set(Step.__struct_fields__)
    return tuple(Step(**{name: value for name, value in row.items() if name in names}) for row in rows)  # type: ignore[arg-type]


def test_a_step_that_was_done_again_replaces_what_followed_it() -> None:
    losses = {1: (1, 3.0), 2: (2, 2.0), 3: (3, 1.0), 4: (2, 2.5)}
    steps = [Step(step=step, attempt=1 + (line > 3), loss=loss) for line, (step, loss) in losses.items()]
    assert [(step.step, step.loss) for step in last_of_each(steps)] == [(1, 3.0), (2, 2.5)]


WITH_PEAK = """
import sys
from shardwise.launch.cli import main
code = main()
print(*(line for line in open("/proc/self/status") if line.startswith("VmHWM")), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("num_lines", [300_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_views_of_a_long_run_need_less_than_100_mib(tmp_path: Path, num_lines: int) -> None:
    """A process of its own for each: before lines were thinned, a million of them took more than a gigabyte."""
    run_dir = write_run(tmp_path / "run")
    row = json.dumps({key: value for key, value in step_rows([1])[0].items() if key != "step"})[1:]
    with (run_dir / "metrics.jsonl").open("w") as stream:
        stream.writelines(f'{{"step": {step}, {row}\n' for step in range(1, num_lines + 1))
    for words in (["watch", run_dir, "--once"], ["report", run_dir, "--html", tmp_path / "page.html"]):
        command = [REAL_PYTHON, "-c", WITH_PEAK, *map(str, words)]
        answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stderr
        assert int(answer.stderr.split()[-2]) < 100 * 1024, words


def test_the_first_steps_of_each_attempt_warm_up() -> None:
    steps = steps_of([*step_rows(range(1, 5)), *step_rows(range(3, 7), attempt=2)])
    assert [(step.attempt, step.step) for step in steady_steps(steps)] == [(1, 3), (1, 4), (2, 5), (2, 6)]
    assert len(steady_steps(steps[:2])) == 2, "where there are no others, these count"


def test_shares_of_the_time_and_the_numbers_of_saves_and_skipped_steps() -> None:
    slow = [{**row, "step_s": 100.0} for row in step_rows(range(1, 3))]
    usual = step_rows(range(3, 11), data_s=0.1, wait_s=0.5, padding_share=0.25, gpu_utilization=0.75)
    seen = observed(steps_of([*slow, *usual]))
    assert seen.data_share == pytest.approx(0.05) and seen.wait_share == pytest.approx(0.25)
    assert seen.padding_share == 0.25 and seen.idle_share == 0.25 and seen.num_steps == 10
    assert seen.throttle is None and seen.saving_share == 0.0 and seen.num_saves == 0
    assert observed(()) == Observed()
    (step,) = steps_of(step_rows((1,)))
    assert step.other_s == pytest.approx(0.18) and Step(step=1).other_s is None
    rows = step_rows(range(1, 11), checkpoint_s=1e-5)
    rows[4]["checkpoint_s"] = rows[9]["checkpoint_s"] = 5.0
    seen = observed(steps_of(rows))
    assert seen.num_saves == 2 and seen.saving_share == pytest.approx(1 / 3, abs=1e-4)
    rows = step_rows(range(1, 6))
    rows[1] |= {"skipped": True}  # the loss scale of fp16 finding its place
    rows[2] |= {"skipped": True, "skipped_rows": [7]}
    assert observed(steps_of(rows)).num_skipped == 1


@pytest.mark.parametrize(("num_throttled", "slowdown"), [(4, None), (5, 1.5), (16, None)])
def test_a_slowdown_needs_enough_steps_on_either_side(num_throttled: int, slowdown: float | None) -> None:
    rows = step_rows(range(1, 23))
    for row in rows[-num_throttled:]:
        row |= {"gpu_throttle": "temperature", "step_s": 3.0}
    seen = observed(steps_of(rows))
    assert seen.throttle == "temperature" and seen.throttled_slowdown == slowdown


def test_a_speed_in_learned_tokens_of_an_earlier_version_is_marked(tmp_path: Path) -> None:
    """Lines without `targets_per_s` count learned tokens; those with it give both rates."""
    now = {"step_s": 2.0, "tokens_per_s": 60.0, "tokens_per_s_per_gpu": 30.0, "targets_per_s": 20.0}
    then = {name: value for name, value in now.items() if name != "targets_per_s"}
    labels = {}
    for name, row in (("now", now), ("then", then)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"step": step, "attempt": 1, **row}) + "\n" for step in range(1, 9)))
        figures = figures_of(read_steps(path).steps)
        assert figures.speed.tokens_per_s_per_gpu == 30
        labels[name] = {label: found for label, _, found, _ in comparison_rows(Figures(), figures)}
    assert labels["now"]["tokens/s per device"] == "30" and labels["now"]["learned tokens/s per device"] == "10"
    assert labels["then"]["tokens/s per device (measured: learned ones)"] == "30"
