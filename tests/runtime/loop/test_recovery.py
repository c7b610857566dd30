"""Runs in which steps cannot be taken: what is skipped, when a run goes back, what it then learns from, how it ends."""

import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from attempt_runs import metrics_of, run_attempt
from engine_plan_factory import TINY_LLAMA
from msgspec.structs import replace
from plain_training import PlainCourse, train_plainly
from rank_factory import rank_plan, write_rows
from safetensors.torch import load_file
from spoilt_rows import HUGE, NAN, rows_of, spoil, tokens_of

from shardwise.trainer.runtime.checkpoint import CheckpointFacts, LossScaler
from shardwise.trainer.runtime.checkpoint.folders import open_checkpoint, steps_in
from shardwise.trainer.runtime.precision.mixed_precision import INIT_SCALE
from shardwise.trainer.runtime.run.state import (
    LEAST_STEPS,
    MAX_ROLL_BACKS,
    STEPS_UNTIL_ROLL_BACK,
    PassedOver,
    RunState,
    SpikeRecord,
)
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending, RollBack
from shardwise.trainer.spec.strategy import LossHead, Precision

NUM_STEPS = 16


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows", shortest=16, is_grouped=False)


plan_of = partial(
    rank_plan, loss=LossHead.EAGER, num_steps=NUM_STEPS, checkpoint_every_steps=4, micro_batch=4, accumulation=2
)


class Run(NamedTuple):
    run_dir: Path
    state: RunState
    ending: Ending | None
    error: EnvironmentFaultError | None

    @property
    def lines(self) -> dict[int, dict]:
        return {line["step"]: line for line in metrics_of(self.run_dir)}

    @property
    def saved(self) -> CheckpointFacts:
        return open_checkpoint(self.run_dir / self.state.checkpoint).facts

    @property
    def losses(self) -> dict[int, float]:
        return {step: line["loss"] for step, line in self.lines.items()}


def run(run_dir: Path, plan: Plan, *, number: int = 1, last: float = math.inf, state: RunState | None = None) -> Run:
    state, ending, error = state or RunState(), None, None
    try:
        ending, _ = run_attempt(run_dir, plan, number=number, state=state, wants_stop=lambda at: at.step >= last)
    except EnvironmentFaultError as raised:
        error = raised
    return Run(run_dir, state, ending, error)


def assert_equal(run: Run, expected: PlainCourse) -> None:
    assert run.ending is Ending.FINISHED
    assert {step: run.losses[step] for step in expected.losses} == pytest.approx(expected.losses, abs=1e-5)
    found = load_file(run.run_dir / "export" / "model.safetensors")
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-4, msg=f"{name}: {{}}".format)


def test_a_step_that_is_not_finite_is_skipped_and_its_rows_are_named(tmp_path, cache_dir):
    """Steps 5 and 9 have a row whose loss is not finite; the rest is as without them."""
    plan = plan_of(cache_dir)
    skipped = run(tmp_path / "run", spoil(plan, tmp_path, [5, 9]))
    assert_equal(skipped, train_plainly(plan, {step: step for step in range(1, NUM_STEPS + 1) if step not in (5, 9)}))
    rows = sorted(rows_of(plan, 5))
    assert len(rows) == 8
    named = ", ".join(map(str, rows))
    assert skipped.state.incidents[0] == f"step 5 was not taken: the loss is not finite (rows {named})"
    assert skipped.lines[5]["skipped"] is True and skipped.lines[5]["skipped_rows"] == rows
    assert skipped.lines[5]["loss"] is None, "NaN is no JSON"
    assert [step for step, line in skipped.lines.items() if "skipped" in line] == [5, 9]
    assert skipped.state.final_loss == skipped.losses[NUM_STEPS]


BAD_STEPS = range(7, 7 + STEPS_UNTIL_ROLL_BACK)  # after the checkpoint of step 4; the run goes back from the last
PASSED_OVER = PassedOver(after_step=4, num_steps=BAD_STEPS[-1] - 4)
TAKEN = {step: step if step <= 4 else step + PASSED_OVER.num_steps for step in range(1, NUM_STEPS + 1)}


@pytest.fixture(scope="module")
def went_back(tmp_path_factory, cache_dir) -> Run:
    folder = tmp_path_factory.mktemp("back")
    return run(folder / "run", spoil(plan_of(cache_dir), folder, BAD_STEPS))


def test_after_several_in_a_row_the_run_goes_back_and_learns_from_later_rows(went_back, cache_dir):
    plan = plan_of(cache_dir)
    assert_equal(went_back, train_plainly(plan, TAKEN))
    incident = went_back.state.incidents[STEPS_UNTIL_ROLL_BACK]
    assert incident.startswith("went back from step 11 to step 4, ") and "5 steps in a row" in incident
    counted = {step: tokens_of(plan, [place for at, place in TAKEN.items() if at <= step]) for step in TAKEN}
    assert {step: line["targets"] for step, line in went_back.lines.items()} == counted, "of the steps that remain"
    assert went_back.state.targets_seen == went_back.saved.targets_seen == counted[NUM_STEPS]
    assert went_back.state.tokens_seen == went_back.saved.tokens_seen == went_back.lines[NUM_STEPS]["tokens"]
    taken = [line["tokens"] - line["targets"] for _, line in sorted(went_back.lines.items())]
    assert taken == [step * taken[0] for step in TAKEN], "a first token of each row is read and not learned"
    assert went_back.saved.spikes.passed_over == (PASSED_OVER,)
    epochs = {step: line["epoch"] for step, line in went_back.lines.items()}
    assert epochs[5] - epochs[4] == pytest.approx((1 + PASSED_OVER.num_steps) * 8 / 376)


@pytest.mark.parametrize("stop_after", [9, 13])  # among the bad rows, after going back
def test_a_resumed_run_repeats_it_bit_by_bit(stop_after, tmp_path, cache_dir, went_back):
    plan = spoil(plan_of(cache_dir), tmp_path, BAD_STEPS)
    first = run(tmp_path / "run", plan, last=stop_after)
    assert first.ending is Ending.STOPPED and first.state.step == stop_after
    second = run(tmp_path / "run", replace(plan, resume=True), number=2)
    assert second.ending is Ending.FINISHED
    if stop_after != 9:  # else it goes back to the checkpoint of the stop, which the other run has not
        assert second.losses == went_back.losses
    else:
        assert second.state.spikes.passed_over == (PassedOver(after_step=9, num_steps=2),)
        assert "5 steps in a row" in second.state.incidents[-1], "three of them before the stop"


def test_where_it_does_not_help_or_there_is_no_checkpoint_the_run_ends_and_keeps_what_there_is(tmp_path, cache_dir):
    found = run(tmp_path / "run", spoil(plan_of(cache_dir, num_steps=40), tmp_path, range(7, 40)))
    assert found.error.exit_code == ExitCode.ENVIRONMENT
    assert "going back to step 4 and past other rows did not help" in str(found.error)
    assert steps_in(found.run_dir / "checkpoints") == [4] and found.saved.step == 4
    found = run(tmp_path / "without", spoil(plan_of(cache_dir), tmp_path, range(1, 12)))
    assert "there is no checkpoint to go back to" in str(found.error)
    assert found.state.step == STEPS_UNTIL_ROLL_BACK


def test_a_run_that_got_on_may_go_back_again(tmp_path, cache_dir):
    """The second time from a later checkpoint, which knows what was passed over the first time."""
    bad = (*BAD_STEPS, *range(19, 24))  # 19 is what step 12 learns from after the first time
    found = run(tmp_path / "run", spoil(plan_of(cache_dir), tmp_path, bad))
    assert found.state.spikes.passed_over == (PASSED_OVER, PassedOver(after_step=8, num_steps=8))
    taken = {step: step + 7 * (step > 4) + 8 * (step > 8) for step in range(1, NUM_STEPS + 1)}
    assert_equal(found, train_plainly(plan_of(cache_dir), taken))


def test_a_run_does_not_go_back_for_ever(tmp_path, cache_dir):
    """One step is taken and saved, and five are not: a run of three good steps would take all the data there is."""
    bad = [step for step in range(2, 6 * MAX_ROLL_BACKS + 10) if step % 6 != 1]
    plan = plan_of(cache_dir, checkpoint_every_steps=1, num_steps=2 * MAX_ROLL_BACKS, micro_batch=2, accumulation=1)
    small = replace(plan, schedule=replace(plan.schedule, sequences_per_step=2, tokens_per_step=96))
    found = run(tmp_path / "run", spoil(small, tmp_path, bad))
    assert f"the run went back {MAX_ROLL_BACKS} times already" in str(found.error)
    assert len(found.state.spikes.passed_over) == MAX_ROLL_BACKS


@pytest.mark.parametrize("skips", [True, False])
def test_a_spike_is_skipped_on_request_once_there_are_steps_to_compare_with(skips, tmp_path, cache_dir):
    first, second = LEAST_STEPS + 2, LEAST_STEPS + 4
    settings: dict[str, Any] = {"sequences_per_step": 4, "micro_batch": 4, "accumulation": 1}  # all within one epoch
    train = {"skip_spikes": True} if skips else {}
    plan = plan_of(cache_dir, num_steps=LEAST_STEPS + 6, checkpoint_every_steps=None, train=train, **settings)
    found = run(tmp_path / "run", spoil(plan, tmp_path, [first, second], HUGE))
    assert min(found.lines[step]["loss"] for step in (first, second)) > 100
    assert [step for step, line in found.lines.items() if "skipped" in line] == ([first, second] if skips else [])
    for step, incident in zip((first, second) if skips else (), found.state.incidents, strict=True):
        assert incident.startswith(f"step {step} was not taken: the loss, ") and "sigma above the mean" in incident


def test_weights_that_have_taken_a_nan_are_those_of_the_last_checkpoint_again(tmp_path, cache_dir):
    """An update within the backward pass cannot be skipped."""
    plan = plan_of(cache_dir, num_steps=10, optimizer_in_backward=True, micro_batch=8, accumulation=1, clip=0.0)
    found = run(tmp_path / "run", spoil(plan, tmp_path, [6]))
    seen, back = found.state.incidents
    assert seen.startswith("step 6 should not have been taken: ") and back.startswith("went back from step 6 to step 4")
    assert found.state.roll_backs == [RollBack(from_step=6, to_step=4)]
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
    settings: dict[str, Any] = {"num_steps": 12, "precision": Precision.FP16_MIXED, "train": {"skip_spikes": True}}
    plan = plan_of(cache_dir, eval_every_steps=4, **settings)
    factors = {5: NAN} | dict.fromkeys(range(6, 6 + STEPS_UNTIL_ROLL_BACK), 2.0)
    earlier = SpikeRecord(losses=(math.log(TINY_LLAMA["vocab_size"]),) * LEAST_STEPS)
    found = run(tmp_path / "run", spoil(plan, tmp_path, factors), state=RunState(spikes=earlier))
    assert found.ending is Ending.FINISHED
    assert found.state.spikes.passed_over == (PassedOver(after_step=4, num_steps=6),)
    scales = [line["loss_scale"] for line in metrics_of(found.run_dir)]
    assert scales == [INIT_SCALE] * 5 + [INIT_SCALE / 2] * STEPS_UNTIL_ROLL_BACK + [INIT_SCALE] * 8
    saved = found.saved
    assert saved.loss_scaler == LossScaler(scale=INIT_SCALE, growth_tracker=12), "steps since the scale last changed"
    assert [evaluation.step for evaluation in saved.evaluations] == [4, 8, 12]
