"""Rows of unequal length: the longest decides memory, the average time, and padding is no token learned from."""

import re
from functools import partial
from typing import Any

import pytest
from architecture_factory import VARIANTS
from msgspec.structs import replace
from planning_factory import context_for, data_of, job_of, plan_of

from shardwise.trainer.planning.candidates import candidate_of, configuration_of
from shardwise.trainer.planning.reasons import data_text
from shardwise.trainer.planning.schedule import bytes_per_token, estimate_data, longest_width, mean_width, widths_at
from shardwise.trainer.spec.data.profile import BatchWidth, DataProfile, LengthHistogram
from shardwise.trainer.spec.job.sections import DataFormat

H100 = "1xH100-SXM5-80GB"
WIDTHS = tuple(
    BatchWidth(micro_batch=size, mean_width=width, mean_width_sorted=ordered)
    for size, width, ordered in ((1, 200.0, 200.0), (2, 300.0, 202.0), (4, 500.0, 205.0), (8, 800.0, 210.0))
)


def padded(**facts: Any) -> DataProfile:
    return data_of(
        is_packed=False, longest_row=1500, num_documents=10_000, mean_document_tokens=196.0, mean_cut_tokens=196.0,
        documents=LengthHistogram(edges=(256, 1500), counts=(9_000, 1_000)), batch_widths=WIDTHS, **facts,
    )  # fmt: skip


@pytest.mark.parametrize(("longest", "width"), [(1500, 1504), (1504, 1504), (7, 8), (2047, 2048), (2048, 2048)])
def test_the_widest_batch_is_the_longest_row_rounded_up(longest: int, width: int) -> None:
    assert longest_width(replace(padded(), longest_row=longest), seq_len=2048) == width


@pytest.mark.parametrize("data", [None, data_of(), data_of(is_packed=False)])
def test_packed_rows_and_rows_that_nobody_counted_are_all_seq_len(data: DataProfile | None) -> None:
    assert (longest_width(data, seq_len=2048), mean_width(data, 8, seq_len=2048)) == (2048, 2048)


@pytest.mark.parametrize(("micro_batch", "width"), [(1, 200), (2, 300), (3, 400), (6, 650), (8, 800), (64, 800)])
def test_widths_between_those_that_were_counted_lie_on_a_line(micro_batch: int, width: float) -> None:
    assert widths_at(padded(), micro_batch).mean_width == width


def test_the_longest_row_sets_the_memory_and_the_mean_width_the_time() -> None:
    context = context_for("8b", H100, seq_len=2048)
    configuration = configuration_of(context, plan_of("8b", "8xH100-SXM5-80GB").chosen)
    configuration = replace(configuration, micro_batch=4, accumulation=8)

    def at(seq_len: int) -> Any:
        return candidate_of(context, replace(configuration, seq_len=seq_len))

    found = candidate_of(replace(context, data=padded()), configuration)
    assert found.memory.peak_allocated_bytes == at(1504).memory.peak_allocated_bytes
    assert found.speed.step_s == at(205).speed.step_s
    assert found.speed.tokens_per_s_per_gpu == pytest.approx(at(205).speed.tokens_per_s_per_gpu * 196 / 205)
    assert found.seq_len == 2048


def test_a_plan_for_short_rows_takes_larger_micro_batches_than_for_full_ones() -> None:
    full = plan_of("8b", "8xH100-SXM5-80GB", data=data_of(is_packed=False), tokens_per_step=2**21)
    short = plan_of("8b", "8xH100-SXM5-80GB", data=replace(padded(), longest_row=200), tokens_per_step=2**21)
    assert short.chosen.micro_batch > full.chosen.micro_batch
    assert set(data_text(short.data, short.chosen.micro_batch)) <= set(short.notes)


@pytest.mark.parametrize(
    ("facts", "micro_batch", "figures"),
    [
        ({}, 4, (r"10,000 .*196 .*1,500", r"^4% .* of 4 .*61%.*data\.packing=true", r"1,500 tokens")),
        ({"is_packed": True}, 8, (r"10,000 .*196 .*1,500", r"76% .* of 8 .*7%")),
        ({"is_packed": True, "mean_document_tokens": 245.0}, 1, (r"10,000 .*245 .*1,500", r"2% .*2% .*20%")),
        ({"batch_widths": ()}, 4, ()),
    ],
)
def test_a_plan_says_what_padding_costs_and_packing_saves(facts, micro_batch, figures):
    sentences = data_text(replace(padded(), **facts), micro_batch)
    for sentence, expected in zip(sentences, figures, strict=True):
        assert re.search(expected, sentence)


def test_a_model_that_does_not_pack_has_a_warning_and_padding_has_no_remedy() -> None:
    """Only where packing is the default, and the job has not chosen it."""
    falcon, note = VARIANTS["falcon rw"], "packing is off: its ALiBi rounds the places of a whole row to bf16"
    for facts, packing, is_noted in (
        ({}, None, True),
        ({}, False, False),
        ({"format": DataFormat.TOKENS}, None, False),
    ):
        job = job_of(seq_len=96, tokens_per_step=960)
        plan = plan_of(
            falcon,
            H100,
            job=replace(job, data=replace(job.data, packing=packing)),
            data=replace(padded(**facts), vocab_size=200),
        )
        assert (note in plan.warnings) == is_noted
        assert not any("data.packing=true" in text for text in plan.notes)


def test_tokens_follow_from_bytes_and_the_assumption_is_said() -> None:
    data = estimate_data(num_bytes=3_900_000, seq_len=1000, vocab_size=128256, eval_share=0.01)
    assert (data.num_tokens, data.num_eval_tokens) == (990_000, 10_000)
    assert (data.num_rows, data.num_eval_rows) == (990, 10)
    assert data.source == "estimated"
    (note,) = data.notes
    assert all(figure in note for figure in ("3,900,000 bytes", "1,000,000 tokens", "3.9 bytes"))


def test_rows_that_will_be_padded_are_taken_to_be_full_and_a_small_file_is_still_a_row() -> None:
    estimate = partial(estimate_data, seq_len=1000, vocab_size=128256, eval_share=None)
    data = estimate(num_bytes=3_900_000, is_packed=False)
    assert (data.is_packed, data.num_rows, data.longest_row) == (False, 1000, 1000)
    assert longest_width(data, seq_len=1000) == mean_width(data, 8, seq_len=1000) == 1000
    sampled = estimate(num_bytes=3_900_000, is_packed=False, row_sizes=(5000, None), shape=DataFormat.CHAT)
    assert (sampled.num_rows, sampled.longest_row, longest_width(sampled, seq_len=1000)) == (5000, 1000, 1000)
    assert mean_width(sampled, 8, seq_len=1000) == pytest.approx(200, abs=8)
    small = estimate(num_bytes=10)
    assert (small.num_rows, small.num_eval_rows) == (1, 0)
    assert bytes_per_token(512) < bytes_per_token(4096) < bytes_per_token(32000) < bytes_per_token(128256)


def test_a_stream_is_estimated_by_its_first_window_and_its_weaker_promises_are_said() -> None:
    estimate = partial(estimate_data, window_bytes=3_900_000, seq_len=1000, vocab_size=128256)
    data = estimate(num_bytes=10**12, eval_share=0.01)
    assert (data.is_stream, data.num_rows, data.num_eval_rows) == (True, 990, 10)
    assert all(fact in data.notes[1] for fact in ("3.72 MiB", "held-out", "--resume"))
    small = estimate(num_bytes=1_000_000, eval_share=None)
    assert small.num_tokens == 256_410 and "held-out" not in small.notes[1]
