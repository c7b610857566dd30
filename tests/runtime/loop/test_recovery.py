"""Runs in which steps cannot be taken: what is skipped, when a run goes back, what it then learns from, when it ends.

Which rows are bad is a matter of the data: an extensions file gives a row of a list a loss that is no number, or one
that is far too large. What should come out is trained by a plain loop without Accelerate.
"""

import json
import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from engine_plan_factory import TINY_LLAMA
from msgspec.structs import replace
from rank_factory import rank_plan, write_attempt, write_rows
from safetensors.torch import load_file
from spoilt_rows import HUGE, NAN, rows_of, spoil, tokens_of, train_plainly

from shardwise.trainer.runtime.checkpoint import LossScaler
from shardwise.trainer.runtime.checkpoint.folders import open_checkpoint
from shardwise.trainer.runtime.loop.course import train
from shardwise.trainer.runtime.precision.mixed_precision import INIT_SCALE
from shardwise.trainer.runtime.run.report_writer import ReportWriter, run_paths
from shardwise.trainer.runtime.run.state import (
    LEAST_STEPS,
    MAX_ROLL_BACKS,
    STEPS_UNTIL_ROLL_BACK,
    PassedOver,
    RunState,
    SpikeRecord,
)
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, ShardwiseError
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending
from shardwise.trainer.spec.strategy import LossHead, Precision

NUM_STEPS = 16


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows", shortest=16, is_grouped=False)


@pytest.fixture(autouse=True)
def no_accelerate_state() -> Iterator[None]:
    """Accelerate's state is global."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def plan_of(cache_dir: Path, **changes) -> Plan:
    settings = {"num_steps": NUM_STEPS, "checkpoint_every_steps": 4, "micro_batch": 4, "accumulation": 2}
    return rank_plan(cache_dir, loss=LossHead.EAGER, **(settings | changes))


class Run(NamedTuple):
    """What an attempt left behind."""

    run_dir: Path
    state: RunState
    ending: Ending | None
    error: Exception | None

    @property
    def lines(self) -> dict[int, dict]:
        """The last line of each step."""
        text = (self.run_dir / "metrics.jsonl").read_text()
        return {line["step"]: line for line in map(json.loads, text.splitlines())}

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "checkpoints").glob("step-*"))

    @property
    def losses(self) -> dict[int, float]:
        return {step: line["loss"] for step, line in self.lines.items()}


def run(
    run_dir: Path, plan: Plan, *, number: int = 1, stop_after: int | None = None, spikes: SpikeRecord | None = None
) -> Run:
    paths = run_paths(write_attempt(run_dir, plan, number=number), started_at=datetime.now(UTC))
    state, ending, error = RunState(spikes=spikes or SpikeRecord()), None, None
    wants_stop: Callable[[], bool] = lambda: stop_after is not None and state.step >= stop_after  # noqa: E731
    try:
        ending = train(plan, paths, ReportWriter(paths, rank=0), state, wants_stop)
    except EnvironmentFaultError as raised:
        error = raised
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Run(run_dir, state, ending, error)


def assert_equal(run: Run, expected: tuple[dict[int, float], dict[str, torch.Tensor]]) -> None:
    losses, weights = expected
    assert {step: run.losses[step] for step in losses} == pytest.approx(losses, abs=1e-5)
    found = load_file(run.run_dir / "export" / "model.safetensors")
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-4, msg=f"{name}: {{}}".format)


@pytest.fixture(scope="module")
def skipped(tmp_path_factory, cache_dir) -> Run:
    """Steps 5 and 9 have a row whose loss is no number."""
    folder = tmp_path_factory.mktemp("skipped")
    return run(folder / "run", spoil(plan_of(cache_dir), folder, [5, 9]))


def test_a_step_without_a_number_is_skipped_and_the_rest_is_as_without_it(skipped, cache_dir):
    assert skipped.ending is Ending.FINISHED and skipped.state.step == NUM_STEPS
    plan = plan_of(cache_dir)
    assert_equal(skipped, train_plainly(plan, {step: step for step in range(1, NUM_STEPS + 1) if step not in (5, 9)}))


def test_its_rows_are_named_in_an_incident_and_in_the_metrics(skipped, cache_dir):
    rows = sorted(rows_of(plan_of(cache_dir), 5))
    assert len(rows) == 8
    assert skipped.state.incidents[0] == (
        f"step 5 was not taken: the loss is not finite (rows {', '.join(map(str, rows))})"
    )
    assert skipped.lines[5]["skipped"] is True and skipped.lines[5]["skipped_rows"] == rows
    assert skipped.lines[5]["loss"] is None, "NaN is no JSON"
    assert [step for step, line in skipped.lines.items() if "skipped" in line] == [5, 9]
    assert skipped.state.final_loss == skipped.losses[NUM_STEPS]


def test_a_checkpoint_that_falls_due_meanwhile_waits_for_the_next_step(tmp_path, cache_dir):
    found = run(tmp_path / "run", spoil(plan_of(cache_dir, num_steps=6), tmp_path, [4]))
    assert found.checkpoints == ["step-00000005", "step-00000006"]
    facts = open_checkpoint(found.run_dir / "checkpoints" / "step-00000006").facts
    assert facts.spikes.skipped_steps == (4,) and len(facts.spikes.losses) == 5


BAD_STEPS = range(7, 7 + STEPS_UNTIL_ROLL_BACK)  # after the checkpoint of step 4; the run goes back from the last
PASSED_OVER = PassedOver(after_step=4, num_steps=BAD_STEPS[-1] - 4)
TAKEN = {step: step if step <= 4 else step + PASSED_OVER.num_steps for step in range(1, NUM_STEPS + 1)}


@pytest.fixture(scope="module")
def went_back(tmp_path_factory, cache_dir) -> Run:
    """The rows of as many steps in a row as a run stands."""
    folder = tmp_path_factory.mktemp("back")
    return run(folder / "run", spoil(plan_of(cache_dir), folder, BAD_STEPS))


def test_after_several_in_a_row_the_run_goes_back_and_on_with_later_rows(went_back, cache_dir):
    assert went_back.ending is Ending.FINISHED and went_back.state.step == NUM_STEPS
    assert_equal(went_back, train_plainly(plan_of(cache_dir), TAKEN))
    told = went_back.state.incidents[STEPS_UNTIL_ROLL_BACK]
    assert told == (
        "went back from step 11 to step 4, and on from there with the rows after those of step 11: "
        "5 steps in a row could not be taken, the last as the loss is not finite"
    )


def test_tokens_are_counted_of_the_steps_that_remain(went_back, cache_dir):
    plan = plan_of(cache_dir)
    counted = {step: tokens_of(plan, [place for at, place in TAKEN.items() if at <= step]) for step in TAKEN}
    assert {step: line["tokens"] for step, line in went_back.lines.items()} == counted
    assert went_back.state.tokens_seen == counted[NUM_STEPS]
    assert open_checkpoint(went_back.run_dir / went_back.state.checkpoint).facts.tokens_seen == counted[NUM_STEPS]


def test_what_was_passed_over_stands_in_the_checkpoints(went_back):
    assert open_checkpoint(went_back.run_dir / went_back.state.checkpoint).facts.spikes.passed_over == (PASSED_OVER,)
    epochs = {step: line["epoch"] for step, line in went_back.lines.items()}
    assert epochs[5] - epochs[4] == pytest.approx((1 + PASSED_OVER.num_steps) * 8 / 376)


@pytest.mark.parametrize("stop_after", [3, 9, 13])  # before the bad rows, among them, after going back
def test_a_resumed_run_repeats_it_bit_by_bit(stop_after, tmp_path, cache_dir, went_back):
    plan = spoil(plan_of(cache_dir), tmp_path, BAD_STEPS)
    first = run(tmp_path / "run", plan, stop_after=stop_after)
    assert first.ending is Ending.STOPPED and first.state.step == stop_after
    second = run(tmp_path / "run", replace(plan, resume=True), number=2)
    assert second.ending is Ending.FINISHED
    if stop_after != 9:  # else it goes back to the checkpoint of the stop, which the other run has not
        assert second.losses == went_back.losses
    else:
        assert second.state.spikes.passed_over == (PassedOver(after_step=9, num_steps=2),)
        assert "5 steps in a row" in second.state.incidents[-1], "three of them before the stop"


def test_where_it_does_not_help_the_run_ends_and_keeps_its_checkpoints(tmp_path, cache_dir):
    found = run(tmp_path / "run", spoil(plan_of(cache_dir, num_steps=40), tmp_path, range(7, 40)))
    assert isinstance(found.error, ShardwiseError) and found.error.exit_code == ExitCode.ENVIRONMENT
    assert str(found.error).splitlines() == [
        "step 9: 5 steps in a row could not be taken, the last as the loss is not finite;",
        "going back to step 4 and past other rows did not help; checkpoints/step-00000004 is kept;",
        "take a lower train.lr or a longer train.warmup, or look at the rows that metrics.jsonl names (skipped_rows)",
    ]
    assert found.checkpoints == ["step-00000004"]
    open_checkpoint(found.run_dir / "checkpoints" / "step-00000004")


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(tmp_path, cache_dir):
    found = run(tmp_path / "run", spoil(plan_of(cache_dir), tmp_path, range(1, 12)))
    assert found.error is not None and "there is no checkpoint to go back to" in str(found.error)
    assert found.state.step == STEPS_UNTIL_ROLL_BACK


def test_a_run_that_got_on_may_go_back_again(tmp_path, cache_dir):
    """The second time from a later checkpoint, which knows what was passed over the first time."""
    bad = (*BAD_STEPS, *range(19, 24))  # 19 is what step 12 learns from after the first time
    found = run(tmp_path / "run", spoil(plan_of(cache_dir), tmp_path, bad))
    assert found.ending is Ending.FINISHED
    assert found.state.spikes.passed_over == (PASSED_OVER, PassedOver(after_step=8, num_steps=8))
    taken = {step: step + 7 * (step > 4) + 8 * (step > 8) for step in range(1, NUM_STEPS + 1)}
    assert_equal(found, train_plainly(plan_of(cache_dir), taken))


def test_a_run_does_not_go_back_for_ever(tmp_path, cache_dir):
    """One step is taken and saved, and five are not: a run of three good steps would take all the data there is."""
    bad = [step for step in range(2, 6 * MAX_ROLL_BACKS + 10) if step % 6 != 1]
    plan = plan_of(cache_dir, checkpoint_every_steps=1, num_steps=2 * MAX_ROLL_BACKS, micro_batch=2, accumulation=1)
    small = replace(plan, schedule=replace(plan.schedule, sequences_per_step=2, tokens_per_step=96))
    found = run(tmp_path / "run", spoil(small, tmp_path, bad))
    assert found.error is not None and f"the run went back {MAX_ROLL_BACKS} times already" in str(found.error)
    assert len(found.state.spikes.passed_over) == MAX_ROLL_BACKS


def test_a_spike_is_skipped_once_there_are_steps_to_compare_with(tmp_path, cache_dir):
    first, second = LEAST_STEPS + 2, LEAST_STEPS + 4
    settings = {"sequences_per_step": 4, "micro_batch": 4, "accumulation": 1}  # all within one epoch
    plan = plan_of(cache_dir, num_steps=LEAST_STEPS + 6, checkpoint_every_steps=None, **settings)
    found = run(tmp_path / "run", spoil(plan, tmp_path, [first, second], HUGE))
    assert [step for step, line in found.lines.items() if "skipped" in line] == [first, second]
    for step, told in zip((first, second), found.state.incidents, strict=True):
        assert found.lines[step]["loss"] > 100, "what it was is told"
        assert told.startswith(f"step {step} was not taken: the loss, ") and "sigma above the mean of the last" in told


def test_weights_that_have_taken_a_nan_are_those_of_the_last_checkpoint_again(tmp_path, cache_dir):
    """An update within the backward pass cannot be skipped."""
    plan = plan_of(
        cache_dir, num_steps=10, optimizer_in_backward=True, micro_batch=8, accumulation=1, clip=0.0
    )  # fmt: skip
    found = run(tmp_path / "run", spoil(plan, tmp_path, [6]))
    assert found.ending is Ending.FINISHED
    rows = ", ".join(map(str, sorted(rows_of(plan, 6))))
    assert found.state.incidents == [
        f"step 6 should not have been taken: the loss is not finite (rows {rows})",
        "went back from step 6 to step 4, and on from there with the rows after those of step 6: "
        "the loss is not finite",
    ]
    taken = {step: step if step <= 4 else step + 2 for step in range(1, 11)}
    assert_equal(found, train_plainly(plan, taken))
    assert all(math.isfinite(line["loss"]) for line in found.lines.values())


def test_an_overflow_of_fp16_is_its_scalers_business(tmp_path, cache_dir):
    plan = plan_of(cache_dir, num_steps=8, precision=Precision.FP16_MIXED)
    found = run(tmp_path / "run", spoil(plan, tmp_path, range(2, 2 + STEPS_UNTIL_ROLL_BACK)))
    assert found.ending is Ending.FINISHED and found.state.incidents == []
    scales = [line["loss_scale"] / INIT_SCALE for line in found.lines.values()]
    assert scales == [1, 1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 32]
    skipped = {step: line.get("skipped_rows") for step, line in found.lines.items() if "skipped" in line}
    assert skipped == dict.fromkeys(range(2, 2 + STEPS_UNTIL_ROLL_BACK))
    assert (found.state.spikes.in_a_row, found.state.spikes.skipped_steps) == (0, ())


def test_the_loss_scale_and_the_scores_are_those_of_the_checkpoint_again(tmp_path, cache_dir):
    """An overflow after the checkpoint halves the scale; then losses far above those of earlier steps end in a return.

    The losses of earlier steps are given, so that the run need not be that long.
    """
    plan = plan_of(cache_dir, num_steps=12, precision=Precision.FP16_MIXED, eval_every_steps=4)
    factors = {5: NAN} | dict.fromkeys(range(6, 6 + STEPS_UNTIL_ROLL_BACK), 2.0)
    earlier = SpikeRecord(losses=(math.log(TINY_LLAMA["vocab_size"]),) * LEAST_STEPS)
    found = run(tmp_path / "run", spoil(plan, tmp_path, factors), spikes=earlier)
    assert found.ending is Ending.FINISHED
    assert found.state.spikes.passed_over == (PassedOver(after_step=4, num_steps=6),)
    scales = [json.loads(line)["loss_scale"] for line in (found.run_dir / "metrics.jsonl").read_text().splitlines()]
    before, after = [INIT_SCALE] * 5 + [INIT_SCALE / 2] * STEPS_UNTIL_ROLL_BACK, [INIT_SCALE] * 8
    assert scales == before + after
    saved = open_checkpoint(found.run_dir / found.state.checkpoint).facts
    assert saved.loss_scaler == LossScaler(scale=INIT_SCALE, growth_tracker=12), "steps since the scale last changed"
    assert [evaluation.step for evaluation in saved.evaluations] == [4, 8, 12]
