"""The schedule is a function of job and data: never of the machine, always with a source for the rate."""

from typing import Any

import pytest
from msgspec.structs import replace
from planning_factory import data_of, job_of, shape_of

from shardwise.trainer.planning.schedule import make_schedule
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.kinds import Every, Warmup
from shardwise.trainer.spec.job.sections import CheckpointJob, DataFormat, EvalJob, LrSchedule, TrainJob
from shardwise.trainer.spec.plan import Schedule, learning_rate
from shardwise.trainer.spec.strategy import Method


def schedule(num_rows: int = 10_000, *, model: str = "8b", num_eval_rows: int = 100, **facts: Any) -> Schedule:
    return make_schedule(job_of(**facts), data_of(num_rows=num_rows, num_eval_rows=num_eval_rows), shape_of(model))


@pytest.mark.parametrize(
    ("train", "num_steps"),
    [
        ({"epochs": 1.0}, 313),  # 10,000 rows at 32 a step: 312.5, and the last rows count too
        ({"epochs": 2.5}, 782),
        ({"epochs": 0.0001}, 1),
        ({"epochs": None, "steps": 17}, 17),
        ({"epochs": None, "tokens": 10_000_000}, 153),
        ({"epochs": None, "tokens": 1}, 1),
    ],
)
def test_the_length_of_a_run_follows_from_epochs_steps_or_tokens(train: dict[str, Any], num_steps: int) -> None:
    assert schedule(**train).num_steps == num_steps


def test_padding_is_not_counted_as_tokens_trained_on() -> None:
    data = data_of(num_rows=1000, is_packed=False, num_tokens=512_000)  # a quarter of each row of 2,048
    made = make_schedule(job_of(epochs=None, tokens=10_000_000), data, shape_of("8b"))
    assert made.num_steps == 611  # 10,000,000 / (32 x 512)
    assert made.tokens_per_step == 65536


def test_whole_epochs_are_not_lost_to_rounding() -> None:
    assert schedule(num_rows=320, epochs=0.1 + 0.2).num_steps == 3  # 0.30000000000000004 x 320 / 32


@pytest.mark.parametrize(("tokens_per_step", "sequences"), [(65536, 32), (2048, 1), (65000, 32), (5000, 2), (5200, 3)])
def test_the_global_batch_is_the_nearest_whole_number_of_sequences(tokens_per_step: int, sequences: int) -> None:
    made = schedule(tokens_per_step=tokens_per_step)
    assert made.sequences_per_step == sequences
    assert made.tokens_per_step == 2048 * sequences


def test_a_step_that_holds_no_sequence_is_refused_with_both_numbers() -> None:
    with pytest.raises(InputError, match=r"1024 .* 2048"):
        schedule(tokens_per_step=1024)


def test_empty_data_is_refused() -> None:
    with pytest.raises(InputError, match="no rows"):
        schedule(num_rows=0)


@pytest.mark.parametrize(
    ("warmup", "steps"),
    [(Warmup(share=0.03), 9), (Warmup(steps=50), 50), (Warmup(steps=5000), 312), (Warmup(share=0.0), 0)],
)
def test_warmup_is_a_share_or_a_number_and_leaves_a_step(warmup: Warmup, steps: int) -> None:
    assert schedule(warmup=warmup).warmup_steps == steps


def test_an_open_warmup_says_whose_it_is_and_that_of_dpo_is_longer() -> None:
    preferences = replace(data_of(num_rows=10_000), format=DataFormat.PREFERENCE)
    plain, dpo = schedule(), make_schedule(job_of(), preferences, shape_of("8b"))
    assert (plain.warmup_steps, dpo.warmup_steps) == (9, 62)
    assert plain.warmup_source.startswith("3%: ") and dpo.warmup_source.startswith("10%: ")
    assert schedule(warmup=Warmup(steps=5)).warmup_source == "train.warmup of the job file"


def test_the_length_of_a_run_says_where_it_is_from() -> None:
    assert schedule(epochs=1.0).length_source == "1 epoch, as by default: arXiv:2305.16264"
    assert schedule(epochs=2.5).length_source == "2.5 epochs"
    assert schedule(epochs=None, steps=7).length_source == "train.steps of the job file"
    assert schedule(epochs=None, tokens=10_000).length_source == "train.tokens of the job file"


def test_a_pair_is_two_sequences_of_the_global_batch() -> None:
    preferences = replace(data_of(num_rows=10_000), format=DataFormat.PREFERENCE)
    made = make_schedule(job_of(), preferences, shape_of("8b"))
    assert (made.sequences_per_step, made.tokens_per_step, made.num_steps) == (16, 65536, 625)
    with pytest.raises(InputError, match=r"2048 and one pair of sequences of train\.seq_len 2048 has 4096"):
        make_schedule(job_of(tokens_per_step=2048), preferences, shape_of("8b"))


@pytest.mark.parametrize(
    ("model", "method", "from_scratch", "lr"),
    [
        ("tiny", Method.FULL, True, 2e-3),
        ("1b", Method.FULL, True, 4e-4),
        ("8b", Method.FULL, True, 3e-4),
        ("70b", Method.FULL, True, 1.5e-4),
        ("8b", Method.FULL, False, 2e-5),
        ("70b", Method.FULL, False, 1e-5),
        ("8b", Method.QLORA, False, 2e-4),
        ("70b", Method.QLORA, False, 1e-4),
        ("8b", Method.GALORE, True, 5e-3),
        ("8b", Method.GALORE, False, 2e-5),
    ],
)
def test_rates_are_those_of_published_runs(model: str, method: Method, lr: float, *, from_scratch: bool) -> None:
    made = make_schedule(job_of(from_scratch=from_scratch, seq_len=512), data_of(), shape_of(model), method=method)
    assert made.lr == lr


def test_a_run_is_scored_ten_times_and_saved_with_each_score() -> None:
    made = schedule()
    assert made.eval_every_steps == made.checkpoint_every_steps == 31
    assert made.checkpoint_every_s == 1200


def test_nothing_is_scored_where_nothing_is_held_out() -> None:
    made = schedule(num_eval_rows=0)
    assert made.eval_every_steps is None
    assert made.eval_every_s is None
    assert made.checkpoint_every_steps == 31


def test_intervals_of_the_job_file_are_kept() -> None:
    job = replace(job_of(), eval=EvalJob(every=Every(seconds=60.0)), checkpoint=CheckpointJob(every=Every(steps=500)))
    made = make_schedule(job, data_of(), shape_of("8b"))
    assert (made.eval_every_steps, made.eval_every_s) == (None, 60.0)
    assert (made.checkpoint_every_steps, made.checkpoint_every_s) == (500, None)


@pytest.mark.parametrize("course", LrSchedule)
def test_every_step_of_a_made_schedule_has_a_rate(course: LrSchedule) -> None:
    made = schedule(epochs=None, steps=3, warmup=Warmup(steps=10))
    assert all(learning_rate(made, TrainJob(schedule=course), step) > 0 for step in (1, 2, 3))
