"""Sizes, counts, shares and times read as people write them, and read back what was written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.trainer.spec import units
from shardwise.trainer.spec.units import GIB, KIB, MIB, TIB, parse_bytes, parse_count, parse_seconds, parse_share


@pytest.mark.parametrize(
    ("parse", "written", "value"),
    [
        (parse_bytes, "8GiB", 8 * GIB), (parse_bytes, "80 GB", 80 * 10**9), (parse_bytes, "1.5 GiB", 3 * GIB // 2),
        (parse_bytes, " 512mib ", 512 * MIB), (parse_bytes, "2TiB", 2 * TIB), (parse_bytes, "100 B", 100),
        (parse_bytes, 4096, 4096), (parse_bytes, "1_000_000", 10**6), (parse_count, "65536", 65536),
        (parse_count, 65536, 65536), (parse_count, "64k", 64_000), (parse_count, "2B", 2 * 10**9),
        (parse_count, 1e6, 10**6), (parse_count, "1.5M", 1_500_000), (parse_count, "1T", 10**12),
        (parse_count, "3_000", 3000), (parse_share, "3%", 0.03), (parse_share, "0%", 0.0), (parse_share, "100 %", 1.0),
        (parse_seconds, "20 min", 1200.0), (parse_seconds, "1.5 hours", 5400.0), (parse_seconds, "2 days", 172800.0),
        (parse_seconds, 7, 7.0), (parse_seconds, "0.5", 0.5),
        (parse_bytes, "0.1GiB", 107374182),  # rounded down
    ],
)  # fmt: skip
def test_quantities_are_read_as_written(parse, written, value):
    assert parse(written) == value


@pytest.mark.parametrize(
    ("parse", "written"),
    [
        *((parse_bytes, text) for text in ("8G", "", "GiB", "-1GiB", "8 GiB!", "1e", "1e999999999", True)),
        *((parse_count, text) for text in ("1.5", 2.5, "64Ki", "", "many", True, "-3", -3, "nan", "1e999999999")),
        *((parse_share, text) for text in ("3", "101%", "-1%", "%")),
        *((parse_seconds, text) for text in ("20 moons", "soon", True, "-5 min", "1e308 h", "1e999999999 s")),
    ],
)
def test_what_is_no_quantity_is_refused(parse, written):
    with pytest.raises(ValueError, match="such as"):
        parse(written)


@pytest.mark.parametrize(
    ("write", "value", "written"),
    [
        (units.format_bytes, 0, "0 B"), (units.format_bytes, 1023, "1023 B"), (units.format_bytes, KIB, "1 KiB"),
        (units.format_bytes, int(23.5 * GIB), "23.5 GiB"), (units.format_bytes, 1000 * MIB, "1000 MiB"),
        (units.format_bytes, -2 * GIB, "-2 GiB"), (units.format_count, 8.03e9, "8.03B"),
        (units.format_count, 512, "512"), (units.format_count, 0.5, "0.5"), (units.format_count, 999_499, "999k"),
        (units.format_count, 999_500, "1M"), (units.format_count, 999_600_000_000_000, "1000T"),
        (units.format_seconds, 0.045, "45 ms"), (units.format_seconds, 3.2, "3.2 s"),
        (units.format_seconds, 125, "2 min 05 s"), (units.format_seconds, 4320, "1 h 12 min"),
        (units.format_seconds, 47.9 * 3600, "47 h 54 min"), (units.format_seconds, 3.5 * 86400, "3.5 days"),
    ],
)  # fmt: skip
def test_quantities_are_written_with_three_digits(write, value, written):
    assert write(value) == written


@given(st.integers(min_value=0, max_value=10**15))
def test_written_quantities_read_back_within_their_three_digits(number):
    assert parse_bytes(units.format_bytes(number)) == pytest.approx(number, rel=0.006, abs=1)
    assert parse_count(units.format_count(number)) == pytest.approx(number, rel=0.006)
