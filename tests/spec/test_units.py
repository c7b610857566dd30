"""Sizes, counts, shares and times read as people write them, and read back what was written."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.trainer.spec.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    format_bytes,
    format_count,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_seconds,
    parse_share,
)


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("8GiB", 8 * GIB),
        ("80 GB", 80 * 10**9),
        ("1.5 GiB", 3 * GIB // 2),
        (" 512mib ", 512 * MIB),
        ("2TiB", 2 * TIB),
        ("3kb", 3000),
        ("100 B", 100),
        ("4096", 4096),
        (4096, 4096),
        ("1_000_000", 10**6),
    ],
)
def test_bytes_are_read_as_written(written, num_bytes):
    assert parse_bytes(written) == num_bytes


@pytest.mark.parametrize("written", ["8G", "", "GiB", "eight", "-1GiB", "8 GiB!", "1e", True])
def test_bytes_of_doubtful_size_are_refused(written):
    with pytest.raises(ValueError, match="a size such as"):
        parse_bytes(written)


@pytest.mark.parametrize(
    ("written", "count"),
    [
        ("65536", 65536),
        (65536, 65536),
        ("64k", 64_000),
        ("2G", 2 * 10**9),
        ("2B", 2 * 10**9),
        ("1e6", 10**6),
        (1e6, 10**6),
        ("1.5M", 1_500_000),
        ("0.002k", 2),
        ("1T", 10**12),
        ("3_000", 3000),
    ],
)
def test_counts_are_decimal(written, count):
    assert parse_count(written) == count


@pytest.mark.parametrize("written", ["1.5", 2.5, "64Ki", "", "many", True, False, "-3", -3, "nan"])
def test_what_is_no_whole_count_is_refused(written):
    with pytest.raises(ValueError, match="a count such as"):
        parse_count(written)


@pytest.mark.parametrize(("written", "share"), [("3%", 0.03), ("0%", 0.0), ("100 %", 1.0), ("0.1%", 0.001)])
def test_shares_are_read_in_percent(written, share):
    assert parse_share(written) == share


@pytest.mark.parametrize("written", ["3", "101%", "-1%", "%", "three%"])
def test_what_is_no_share_is_refused(written):
    with pytest.raises(ValueError, match="a share such as"):
        parse_share(written)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("20 min", 1200.0), ("24h", 86400.0), ("1.5 hours", 5400.0), ("2 days", 172800.0), (7, 7.0), ("0.5", 0.5)],
)
def test_times_are_read_with_their_unit(written, seconds):
    assert parse_seconds(written) == seconds


@pytest.mark.parametrize("written", ["20 moons", "soon", True, "-5 min"])
def test_what_is_no_time_is_refused(written):
    with pytest.raises(ValueError, match="a time such as"):
        parse_seconds(written)


@pytest.mark.parametrize(
    ("num_bytes", "written"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1 KiB"),
        (int(23.5 * GIB), "23.5 GiB"),
        (1000 * MIB, "1000 MiB"),
        (1023 * GIB, "1023 GiB"),
        (TIB, "1 TiB"),
        (-2 * GIB, "-2 GiB"),
    ],
)
def test_bytes_are_written_with_three_digits(num_bytes, written):
    assert format_bytes(num_bytes) == written


@pytest.mark.parametrize(
    ("count", "written"),
    [
        (8.03e9, "8.03B"),
        (65536, "65.5k"),
        (512, "512"),
        (2_361_024, "2.36M"),
        (3e12, "3T"),
        (0.5, "0.5"),
        (999_499, "999k"),
        (999_500, "1M"),
        (999_600_000_000_000, "1000T"),
        (0, "0"),
    ],
)
def test_counts_are_written_with_three_digits(count, written):
    assert format_count(count) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.045, "45 ms"),
        (3.2, "3.2 s"),
        (125, "2 min 05 s"),
        (4320, "1 h 12 min"),
        (47.9 * 3600, "47 h 54 min"),
        (3.5 * 86400, "3.5 days"),
    ],
)
def test_times_are_written_as_people_say_them(seconds, written):
    assert format_seconds(seconds) == written


@settings(deadline=None)  # a busy machine is no fault
@given(st.integers(min_value=0, max_value=2**60))
def test_written_bytes_read_back_within_their_three_digits(num_bytes):
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.006, abs=1)


@settings(deadline=None)  # a busy machine is no fault
@given(st.integers(min_value=0, max_value=10**15))
def test_written_counts_read_back_within_their_three_digits(count):
    assert parse_count(format_count(count)) == pytest.approx(count, rel=0.006)


@settings(deadline=None)  # a busy machine is no fault
@given(st.integers(min_value=0, max_value=10**6), st.sampled_from(["KiB", "MiB", "GiB", "kB", "MB", "GB"]))
def test_a_larger_number_of_one_unit_is_a_larger_size(number, unit):
    assert parse_bytes(f"{number} {unit}") < parse_bytes(f"{number + 1} {unit}")
