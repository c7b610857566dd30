"""What piece `path` found, as Markdown: where a step's time goes beside its floors, and what would gain most."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from written_page import markdown_table

from on_gpu.goals import Goal, at_least
from on_gpu.path_trace import Group
from on_gpu.pieces import Row
from trainer.spec.units import format_bytes, format_count

WANTED_MFU = {"8B, all parameters, checkpointing": 0.58}  # by case, in bf16 on a card of the H200's class
NUM_IMPROVEMENTS = 3
_HEADER = ("group", "time", "share", "floor", "gap", "what takes it")
_REMEDIES = {
    Group.PRODUCTS: "products of other shapes (a larger micro batch), or FP8",
    Group.ATTENTION: "another attention kernel (`pin.attention`)",
    Group.NORM: "one kernel for each norm instead of a chain (`pin.compile`, or Liger's)",
    Group.ELEMENTWISE: "kernels that join what stands side by side (`pin.compile`)",
    Group.LOSS: "a loss head that makes its gradient in the forward (`pin.loss=fused_linear`)",
    Group.EMBEDDING: "a gradient of the embedding that is added where it lies",
    Group.OPTIMIZER: "a step that clips and updates in one pass",
    Group.COPIES: "no copy that only changes the layout, and inputs in pinned memory",
    Group.COMMUNICATION: "collectives behind the computation",
    Group.IDLE: "fewer waits and fewer kernels to start (`pin.compile`, a larger micro batch)",
}


class Line(NamedTuple):
    """A group of a step beside its floor."""

    group: Group
    seconds: float
    floor_s: float | None
    top: Mapping[str, float] = {}

    @property
    def gap_s(self) -> float | None:
        return None if self.floor_s is None else self.seconds - self.floor_s


def tables(rows: Mapping[str, Row]) -> dict[str, str]:
    """The text of the place `path`; nothing where nothing was run."""
    errors = [f"{name}: {_one_line(row['error'])}.\n" for name, row in rows.items() if "error" in row]
    text = "\n".join([*(_case(row, rows) for row in _profiles(rows)), *errors])
    return {"path": f"\n{text}\n"} if text else {}


def goals(rows: Mapping[str, Row]) -> list[Goal]:
    """The share of the stated peak that each whole model is asked for."""
    profiles = {row["case"]: row for row in _profiles(rows)}
    found = []
    for case, wanted in WANTED_MFU.items():
        goal = Goal(f"{case}: MFU", f"at least {wanted:.0%}")
        if case in profiles:
            found.append(_judged(goal, wanted, profiles[case], rows))
        else:
            error = rows.get(f"{case}: profile", {}).get("error")
            reason = "not profiled yet" if error is None else _one_line(error)
            found.append(goal._replace(reason=reason, next_step="`make bench-gpu`"))
    return found


def _judged(goal: Goal, wanted: float, row: Row, rows: Mapping[str, Row]) -> Goal:
    mfu, best = row.get("mfu"), improvements(lines_of(row, rows))[:1]
    return goal._replace(
        figure=None if mfu is None else f"{mfu:.1%}",
        is_met=at_least(mfu, wanted),
        reason="".join(f"{line.group} is {_ms(line.gap_s)} above its floor" for line in best),
        next_step="".join(_REMEDIES[line.group] for line in best),
    )


def lines_of(row: Row, rows: Mapping[str, Row]) -> list[Line]:
    """The groups of a profiled step, those that take longest first."""
    floors = rows.get(row["ceilings"], {}).get("floors", {})
    seconds = row["seconds"]
    found = [
        Line(Group(name), took, floors.get(name), row["top"].get(name, {}))
        for name, took in seconds.items()
        if took > 0.0
    ]
    return sorted(found, key=lambda line: -line.seconds)


def improvements(lines: Sequence[Line]) -> list[Line]:
    """Those that would gain most, by the seconds above their floor."""
    above = [line for line in lines if line.gap_s is not None and line.gap_s > 0.0]
    return sorted(above, key=lambda line: -(line.gap_s or 0.0))[:NUM_IMPROVEMENTS]


def _profiles(rows: Mapping[str, Row]) -> list[Row]:
    return [row for row in rows.values() if "seconds" in row and "case" in row]


def _case(row: Row, rows: Mapping[str, Row]) -> str:
    lines = lines_of(row, rows)
    table = markdown_table(_HEADER, [_cells(line, row["whole_s"]) for line in lines])
    ceilings = rows.get(row["ceilings"], {})
    parts = [f"### {row['case']}\n", *_words(row), table, *_next(lines, row), *_starts(row, ceilings)]
    return "\n".join([*parts, *_ceilings(ceilings)])


def _cells(line: Line, step_s: float) -> list[str]:
    top = ", ".join(f"{_short(name)} {_ms(took)}" for name, took in line.top.items())
    return [
        line.group,
        _ms(line.seconds),
        f"{line.seconds / step_s:.1%}",
        _ms(line.floor_s),
        _ms(line.gap_s),
        top.replace("|", "\\|") or "-",
    ]


def _words(row: Row) -> Iterator[str]:
    settings = ", ".join(f"{name} {value}" for name, value in row["settings"].items())
    mfu = "" if row.get("mfu") is None else f", MFU {row['mfu']:.1%} of {row['peak_flops_per_s'] / 1e12:.4g} TFLOP/s"
    rows = f"{row['micro_batch']} x {row['accumulation']} rows of {row['seq_len']} tokens"
    sentences = [
        f"{row['model']} on {row['device']}: {rows}, {settings}.",
        f"From `{row['command']}`: a step takes {_ms(row['step_s'])}, {format_count(row['tokens_per_s'])} tokens/s"
        f"{mfu}; peak {format_bytes(row['peak_bytes'])}.",
    ]
    if row["is_rehearsal"]:
        sentences.append("A rehearsal with a tiny model, at whose size floors mean little.")
    if row["is_device"]:
        sentences.append(
            f"Times are those of kernels in one profiled step; idle is what of a step without the profiler they leave. "
            f"The host waited for the device {row['num_waits']} times."
        )
    else:
        sentences.append(
            f"On a CPU times are those of operators in one profiled step of {_ms(row['whole_s'])}, and idle is Python "
            f"between them. A host would have waited for a GPU {row['num_waits']} times in it."
        )
    yield " ".join(sentences) + "\n"


def _next(lines: Sequence[Line], row: Row) -> Iterator[str]:
    """The improvements, in the order of what they would gain."""
    best = improvements(lines)
    if not best:
        return
    yield "What would gain most, by the seconds above the floor:\n"
    yield "".join(
        f"{number}. {line.group}: {_ms(line.gap_s)} of a step, {(line.gap_s or 0.0) / row['whole_s']:.1%}; "
        f"{_REMEDIES[line.group]}.\n"
        for number, line in enumerate(best, start=1)
    )


def _starts(row: Row, ceilings: Row) -> Iterator[str]:
    """What starting its kernels takes of the host, at the measured rate."""
    start_s = ceilings.get("rates", {}).get("start_s")
    if start_s is None:
        return
    count, host_s = row["num_started"], row["num_started"] * start_s
    what = "kernels and copies" if row["is_device"] else "operators"
    yield (
        f"The step starts {count:,} {what}; at {start_s * 1e6:.3g} µs for a small one, measured in a row of them, that "
        f"is {_ms(host_s)}, {host_s / row['whole_s']:.1%} of a step.\n"
    )


def _ceilings(row: Row) -> Iterator[str]:
    rates = row.get("rates")
    if not rates:
        yield "Its ceilings are not measured.\n"
        return
    sentences = ["Ceilings measured on this device, TFLOP/s of a forward / of its gradients."]
    if rates.get("products"):
        products = ", ".join(f"{name} {_tera(each)}" for name, each in rates["products"].items())
        sentences.append(f"Products, tokens x inputs x outputs: {products}.")
    if rates.get("attention"):
        sentences.append(f"Causal attention: {_tera(rates['attention'])}.")
    copies = [
        (name, rates.get(key))
        for name, key in (
            ("within the device", "copy_bytes_per_s"),
            ("host to device", "host_to_device_bytes_per_s"),
            ("device to host", "device_to_host_bytes_per_s"),
        )
    ]
    told = ", ".join(f"{name} {rate / 1e9:.4g}" for name, rate in copies if rate)
    if told:
        sentences.append(f"Copies, GB/s: {told}.")
    sentences += [f"Not measured: {note}." for note in rates.get("notes", ())]
    yield " ".join(sentences) + "\n"


def _tera(rates: Mapping[str, float]) -> str:
    return f"{rates['forward'] / 1e12:.4g} / {rates['backward'] / 1e12:.4g}"


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _short(name: str) -> str:
    """A kernel's name without its template."""
    named = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    bare = named.partition("<")[0].partition("(")[0].strip()
    return f"`{bare[:48]}`"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.3g} ms"
