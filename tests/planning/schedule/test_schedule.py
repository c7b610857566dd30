"""The schedule is a function of job, data and number of ranks, always with a source for rate, batch and length."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from planning_factory import data_of, job_of, shape_of

from shardwise.trainer.planning.schedule import LEAST_STEPS, idle_run_warnings, make_schedule
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.kinds import Every, Warmup
from shardwise.trainer.spec.job.sections import CheckpointJob, DataFormat, EvalJob
from shardwise.trainer.spec.plan import Schedule
from shardwise.trainer.spec.strategy import Method


def schedule(num_rows: int = 10_000, *, model: str = "8b", num_eval_rows: int = 100, **facts: Any) -> Schedule:
    return make_schedule(job_of(**facts), data_of(num_rows=num_rows, num_eval_rows=num_eval_rows), shape_of(model))


@pytest.mark.parametrize(
    ("train", "num_steps", "source"),
    [
        ({"epochs": 1.0}, 313, "1 epoch"),  # 10,000 rows at 32 a step: 312.5, and the last rows count too
        ({}, 313, "1 epoch, as by default: arXiv:2305.16264"),
        ({"epochs": 2.5}, 782, "2.5 epochs"), ({"epochs": 0.0001}, 1, "0.0001 epochs"),
        ({"steps": 17}, 17, "train.steps of the job file"), ({"tokens": 1}, 1, "train.tokens of the job file"),
        ({"tokens_per_step": 65536, "tokens": 10_000_000}, 153, "train.tokens of the job file"),
    ],
)  # fmt: skip
def test_the_length_of_a_run_follows_from_epochs_steps_or_tokens(train, num_steps, source) -> None:
    made = schedule(**train)
    assert (made.num_steps, made.length_source) == (num_steps, source)


def test_whole_epochs_are_not_lost_to_rounding_and_padding_is_not_counted_as_tokens_trained_on() -> None:
    made = schedule(num_rows=320, tokens_per_step=65536, epochs=0.1 + 0.2)  # 0.30000000000000004 x 320 / 32
    assert made.num_steps == 3
    data = data_of(num_rows=1000, is_packed=False, num_tokens=512_000)  # a quarter of each row of 2,048
    made = make_schedule(job_of(tokens=10_000_000), data, shape_of("8b"))
    assert (made.num_steps, made.tokens_per_step) == (611, 65536)  # 10,000,000 / (32 x 512)


@pytest.mark.parametrize(("tokens_per_step", "sequences"), [(65536, 32), (2048, 1), (65000, 32), (5000, 2), (5200, 3)])
def test_the_global_batch_is_the_nearest_whole_number_of_sequences(tokens_per_step: int, sequences: int) -> None:
    made = schedule(tokens_per_step=tokens_per_step)
    assert made.sequences_per_step == sequences
    assert made.tokens_per_step == 2048 * sequences


def test_a_step_that_holds_no_sequence_is_refused_with_both_numbers_and_so_is_empty_data() -> None:
    with pytest.raises(InputError, match=r"1024, .* 2048"):
        schedule(tokens_per_step=1024)
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


def test_a_pair_is_two_sequences_of_the_global_batch() -> None:
    preferences = replace(data_of(num_rows=10_000), format=DataFormat.PREFERENCE)
    made = make_schedule(job_of(), preferences, shape_of("8b"))
    assert (made.sequences_per_step, made.tokens_per_step, made.num_steps) == (16, 65536, 625)
    with pytest.raises(InputError, match=r"2048, .* 4096"):
        make_schedule(job_of(tokens_per_step=2048), preferences, shape_of("8b"))


CHATS: dict[str, Any] = {"format": DataFormat.CHAT, "is_packed": False}


def default_schedule(data: DataProfile, *, num_ranks: int = 1, from_scratch: bool = False, **facts: Any) -> Schedule:
    return make_schedule(job_of(from_scratch=from_scratch, **facts), data, shape_of("8b"), num_ranks=num_ranks)


def test_few_chats_get_some_hundred_steps_over_a_few_epochs_and_many_are_read_once() -> None:
    few = default_schedule(data_of(num_rows=396, num_tokens=11_700, longest_row=40, **CHATS))
    assert (few.sequences_per_step, few.num_steps) == (2, 594)
    assert few.length_source.startswith("3 epochs, the default of fine-tuning on few data")
    many = default_schedule(data_of(num_rows=200_000, format=DataFormat.CHAT))
    assert many.length_source.startswith("1 epoch,")
    assert (many.tokens_per_step, many.num_steps) == (65536, 6250)


@pytest.mark.parametrize(("seq_len", "sequences"), [(500, 128), (1536, 32), (2048, 32), (32768, 2), (131072, 1)])
def test_the_default_batch_needs_no_arithmetic(seq_len: int, sequences: int) -> None:
    made = default_schedule(data_of(num_rows=10**6, seq_len=seq_len), seq_len=seq_len)
    assert (made.sequences_per_step, made.tokens_per_step) == (sequences, sequences * seq_len)


@given(
    num_rows=st.integers(1, 10**7),
    num_ranks=st.integers(1, 600),
    seq_len=st.sampled_from([8, 500, 1536, 2048, 32768]),
    shape=st.sampled_from([DataFormat.TEXT, DataFormat.CHAT, DataFormat.PREFERENCE]),
    from_scratch=st.booleans(),
)
def test_no_rank_idles_where_steps_remain_and_few_data_keep_their_steps(
    num_rows: int, num_ranks: int, seq_len: int, shape: DataFormat, *, from_scratch: bool
) -> None:
    data = data_of(num_rows=num_rows, seq_len=seq_len, format=shape)
    one, all_ranks = (
        default_schedule(data, num_ranks=ranks, from_scratch=from_scratch, seq_len=seq_len) for ranks in (1, num_ranks)
    )
    idles = all_ranks.sequences_per_step % num_ranks > 0
    num_sequences = all_ranks.num_steps * all_ranks.sequences_per_step
    assert not idles or num_sequences < LEAST_STEPS * (all_ranks.sequences_per_step + num_ranks)
    assert all_ranks.sequences_per_step <= one.sequences_per_step or all_ranks.num_steps >= LEAST_STEPS
    assert all_ranks.length_source == one.length_source
    assert one.num_steps >= min(LEAST_STEPS, num_rows)


def test_a_stated_batch_or_length_is_never_moved_and_a_pinned_micro_batch_has_room_in_the_default_batch() -> None:
    few = data_of(num_rows=10, **CHATS)
    assert default_schedule(few, num_ranks=64, tokens_per_step=4096).sequences_per_step == 2
    assert default_schedule(few, epochs=1.0).num_steps == 10
    assert default_schedule(few, steps=7).num_steps == 7
    for pin, sequences in (({"micro_batch": 3}, 30), ({"micro_batch": 3, "optimizer_in_backward": True}, 6)):
        assert default_schedule(data_of(), num_ranks=2, pin=pin).sequences_per_step == sequences


@pytest.mark.parametrize(
    ("shape", "from_scratch", "tokens", "name"),
    [
        (DataFormat.TEXT, True, 2**20, "training from scratch: Step Law"),
        (DataFormat.TEXT, False, 65536, "continued pre-training"),
        (DataFormat.CHAT, False, 65536, "fine-tuning"),
        (DataFormat.PREFERENCE, False, 65536, "preference training"),
    ],
)
def test_each_kind_of_run_has_its_own_default_batch(shape, tokens, name, from_scratch):
    made = default_schedule(data_of(num_rows=5 * 10**7, format=shape), from_scratch=from_scratch)  # 100G tokens
    assert made.tokens_per_step == tokens
    assert name in made.batch_source


@pytest.mark.parametrize(
    ("model", "method", "from_scratch", "lr"),
    [
        ("tiny", Method.FULL, True, 2e-3), ("1b", Method.FULL, True, 4e-4), ("8b", Method.FULL, True, 3e-4),
        ("70b", Method.FULL, True, 1.5e-4), ("8b", Method.FULL, False, 2e-5), ("70b", Method.FULL, False, 1e-5),
        ("8b", Method.QLORA, False, 2e-4), ("70b", Method.QLORA, False, 1e-4), ("8b", Method.GALORE, True, 5e-3),
        ("8b", Method.GALORE, False, 2e-5),
    ],
)  # fmt: skip
def test_rates_are_those_of_published_runs(model: str, method: Method, lr: float, *, from_scratch: bool) -> None:
    made = make_schedule(job_of(from_scratch=from_scratch, seq_len=512), data_of(), shape_of(model), method=method)
    assert made.lr == lr


def test_a_run_is_scored_ten_times_where_rows_are_held_out_and_saved_as_often_or_as_the_job_file_says() -> None:
    made, unscored = schedule(), schedule(num_eval_rows=0)
    assert made.eval_every_steps == made.checkpoint_every_steps == unscored.checkpoint_every_steps == 31
    assert made.checkpoint_every_s == 1200
    assert unscored.eval_every_steps is unscored.eval_every_s is None
    job = replace(job_of(), eval=EvalJob(every=Every(seconds=60.0)), checkpoint=CheckpointJob(every=Every(steps=500)))
    made = make_schedule(job, data_of(), shape_of("8b"))
    assert (made.eval_every_steps, made.eval_every_s) == (None, 60.0)
    assert (made.checkpoint_every_steps, made.checkpoint_every_s) == (500, None)


@pytest.mark.parametrize(
    ("facts", "num_rows", "remedy"),
    [
        ({"steps": 1}, 1000, "train.steps: 300"),
        ({"steps": 49}, 1000, "will change little; remedy: train.steps: 300"),
        ({"epochs": 2000}, 100, "2,000 epochs: the model will learn its data by heart; remedy: train.epochs: auto"),
        ({"tokens_per_step": 65536}, 50, "train.tokens_per_step: auto"),
        ({"epochs": 0.01}, 100, "train.epochs: auto"),
        ({}, 1, "train.seq_len: 64, or more data"),
        ({"warmup": Warmup(steps=80), "steps": 100}, 1000, "train.warmup: auto"),
    ],
)
def test_a_run_that_changes_next_to_nothing_is_a_warning_with_what_mends_it(facts, num_rows, remedy):
    job, data = job_of(**facts), data_of(num_rows=num_rows)
    (warning,) = idle_run_warnings(job, data, make_schedule(job, data, shape_of("8b")))
    assert remedy in warning


def test_few_learned_tokens_are_a_warning_and_a_usual_run_has_none() -> None:
    job, data = job_of(), data_of(format=DataFormat.CHAT)
    usual = make_schedule(job, data, shape_of("8b"))
    assert idle_run_warnings(job, data, usual) == ()
    (warning,) = idle_run_warnings(job, replace(data, num_targets=1000), usual)
    assert "1,000 of 20,480,000" in warning and "data.loss_on: all" in warning
