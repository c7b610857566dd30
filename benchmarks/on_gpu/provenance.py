"""Where the figures of docs/benchmarks.md are from: the device, its driver, the versions, the commands."""

from collections.abc import Mapping
from datetime import UTC, datetime

from written_page import markdown_table

from on_gpu.bench import Bench
from on_gpu.pieces import Row
from trainer.spec.units import format_bytes


def provenance_table(bench: Bench, rows: Mapping[str, Mapping[str, Row]]) -> str:
    """Markdown for the place `provenance`; `rows` by piece and step."""
    kind = "a rehearsal with tiny models" if bench.is_tiny else "measured"
    lines = [
        ("kind", kind + (", on a CPU: no figure here is of a GPU" if not bench.hardware.gpus else "")),
        ("date", f"{datetime.now(UTC):%Y-%m-%d}"),
        *_machine_lines(bench),
        ("versions", ", ".join(f"{name} {version}" for name, version in bench.versions.items())),
        ("commands", f"`make bench-gpu`, which calls `{_command(bench)}` until nothing is left"),
        *((f"steps of `{name}`", _counts(of_piece)) for name, of_piece in rows.items()),
    ]
    return markdown_table(("", "of these figures"), lines)


def _machine_lines(bench: Bench) -> list[tuple[str, str]]:
    gpus, host = bench.hardware.gpus, bench.hardware.host
    ram = "RAM unknown" if host.ram_bytes is None else f"{format_bytes(host.ram_bytes)} of RAM"
    words = [host.cpu_name or "CPU", *host.cpu_flags[-1:], f"{host.num_cores or '?'} cores", ram]
    lines = [("host", ", ".join(words))]
    if gpus:
        memory = format_bytes(gpus[0].memory_bytes)
        lines.insert(0, ("device", f"{gpus[0].name}, {memory}, driver {gpus[0].driver or 'unknown'}"))
    return lines


def _command(bench: Bench) -> str:
    return "python benchmarks/gpu.py" + (" --tiny" if bench.is_tiny and bench.hardware.gpus else "")


def _counts(rows: Mapping[str, Row]) -> str:
    raised = sum(1 for row in rows.values() if "error" in row)
    return f"{len(rows)} done" + (f", {raised} of them with an error" if raised else "")
