"""Markdown cells and tables for docs/benchmarks.md and the summary of a call."""

from written_page import markdown_table

from shardwise.trainer.spec.units import format_bytes

__all__ = ["bytes_cell", "markdown_table", "number", "percent", "ratio"]
NOTHING = "-"


def bytes_cell(num_bytes: int | None) -> str:
    return NOTHING if num_bytes is None else format_bytes(num_bytes)


def number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def percent(difference: float | None) -> str:
    return NOTHING if difference is None else f"{difference:+.1%}".replace("-0.0%", "+0.0%")


def ratio(value: float | None, base: float | None) -> str:
    return NOTHING if value is None or not base else f"{value / base:.2f}x"
