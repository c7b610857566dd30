"""An estimate from file sizes says that it is one, and loses no byte."""

from functools import partial

import pytest

from shardwise.trainer.planning.schedule import bytes_per_token, estimate_data, longest_width, mean_width


def test_tokens_follow_from_bytes_and_the_assumption_is_said() -> None:
    data = estimate_data(num_bytes=3_900_000, seq_len=1000, vocab_size=128256, eval_share=0.01)
    assert (data.num_tokens, data.num_eval_tokens) == (990_000, 10_000)
    assert (data.num_rows, data.num_eval_rows) == (990, 10)
    assert data.source == "estimated"
    (note,) = data.notes
    assert all(figure in note for figure in ("3,900,000 bytes", "1,000,000 tokens", "3.9 bytes"))


def test_rows_that_will_be_padded_are_taken_to_be_full() -> None:
    data = estimate_data(num_bytes=3_900_000, seq_len=1000, vocab_size=128256, eval_share=None, is_packed=False)
    assert (data.is_packed, data.num_rows, data.longest_row) == (False, 1000, 1000)
    assert longest_width(data, seq_len=1000) == mean_width(data, 8, seq_len=1000) == 1000


def test_a_small_file_is_still_a_row() -> None:
    data = estimate_data(num_bytes=10, seq_len=1000, vocab_size=128256, eval_share=None)
    assert (data.num_rows, data.num_eval_rows) == (1, 0)


@pytest.mark.parametrize(("smaller", "larger"), [(512, 4096), (4096, 32000), (32000, 128256)])
def test_larger_vocabularies_have_longer_tokens(smaller: int, larger: int) -> None:
    assert bytes_per_token(smaller) < bytes_per_token(larger)


def test_a_stream_is_estimated_by_its_first_window_and_its_weaker_promises_are_said() -> None:
    estimate = partial(estimate_data, window_bytes=3_900_000, seq_len=1000, vocab_size=128256)
    data = estimate(num_bytes=10**12, eval_share=0.01)
    assert (data.is_stream, data.num_rows, data.num_eval_rows) == (True, 990, 10)
    assert all(fact in data.notes[1] for fact in ("3.72 MiB", "held-out", "--resume"))
    small = estimate(num_bytes=1_000_000, eval_share=None)
    assert small.num_tokens == 256_410 and "held-out" not in small.notes[1]
