"""What piece `peers` found, as Markdown: a table for each contest, and the sentences that its figures make."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from written_page import markdown_table

from on_gpu.goals import Goal
from on_gpu.peers_contests import CONTESTS
from on_gpu.peers_trainers import PINNED, PLANNED
from on_gpu.pieces import Row
from trainer.spec.units import format_bytes, format_count

SKIPPED = 3  # steps after the first that still allocate, compile and fill caches
LEVEL = 0.99  # of the fastest: two medians of one run differ by so much by themselves
_HEADER = (
    "trainer", "tokens/s", "of shardwise, alone", "of shardwise, in turns", "MFU", "peak allocated", "peak reserved",
    "loss at the end", "lines to write", "version",
)  # fmt: skip


class Figures(NamedTuple):
    """One trainer in one contest, over all rounds."""

    trainer: str
    version: str | None
    command: str
    outcome: str  # ran, or why not
    tokens_per_s: float | None = None
    mfu: float | None = None
    memory: Mapping[str, int] = {}
    loss: float | None = None
    lines: int | None = None

    @property
    def peak_bytes(self) -> int | None:
        """Allocated on a GPU; on a CPU what was resident."""
        return self.memory.get("peak_allocated_bytes", self.memory.get("peak_resident_bytes"))


def tables(rows: Mapping[str, Row]) -> dict[str, str]:
    """The text of the place `peers`; nothing where nothing was run."""
    parts = [_contest(name, rows) for name in contests_of(rows)]
    errors = [f"- {name}: {_line(str(row['error']))}\n" for name, row in rows.items() if "error" in row]
    if errors:
        parts.append("".join(["Steps that came to no answer:\n\n", *errors]))
    text = "\n".join(parts)
    return {"peers": f"\n{text}\n"} if text else {}


def contests_of(rows: Mapping[str, Row]) -> list[str]:
    """The contests that a trainer has a row of, in their order."""
    return list(dict.fromkeys(row["contest"] for row in rows.values() if "trainer" in row))


def goals(rows: Mapping[str, Row]) -> list[Goal]:
    """At least level with the fastest of the others on tokens/s, and at no more memory; one for each contest.

    Held to it is shardwise with the settings that the others have: what it would choose itself is no equal comparison.
    """
    return [_goal(contest.name, rows) for contest in CONTESTS]


def _goal(contest: str, rows: Mapping[str, Row]) -> Goal:
    wanted = f"at least {LEVEL} times its tokens/s at no more memory"
    name = f"{contest}: beside the fastest of the others"
    found, turns = figures_of(contest, rows), ratios_in_turns(contest, rows)
    ours, peer = _pinned(found), fastest_peer(found, turns)
    if ours is None or peer is None:
        return Goal(name, wanted, reason="nothing to compare was measured yet", next_step="`make bench-gpu`")
    if ours.tokens_per_s is None:
        return Goal(name, wanted, ours.outcome, is_met=False, reason="it did not run", next_step="make it run")
    speed = ratio_of(ours, peer, turns)
    memory = memory_ratio(ours, peer)
    is_level, is_lean = speed >= LEVEL, memory is not None and memory <= 1.0
    more = "memory that was not counted" if memory is None else "more memory"
    what = [*([] if is_level else ["slower"]), *([] if is_lean else [more])]
    return Goal(
        name,
        wanted,
        figure=f"{speed:.3f} times its tokens/s, {'-' if memory is None else f'{memory:.2f}'} times its memory",
        is_met=is_level and is_lean,
        reason=f"{' and '.join(what)} than {peer.trainer}" if what else "",
        next_step="the improvements of *Where a step's time goes*" if not is_level else "a loss head that keeps less",
    )


def ratio_of(ours: Figures, peer: Figures, turns: Mapping[str, float]) -> float:
    """Speed of ours by that of a peer: in turns where both took them, else by their medians alone."""
    if ours.trainer in turns and peer.trainer in turns:
        return turns[ours.trainer] / turns[peer.trainer]
    assert ours.tokens_per_s is not None and peer.tokens_per_s is not None
    return ours.tokens_per_s / peer.tokens_per_s


def memory_ratio(ours: Figures, peer: Figures) -> float | None:
    """Peak memory of ours by that of a peer; None where either was not counted."""
    return ours.peak_bytes / peer.peak_bytes if ours.peak_bytes and peer.peak_bytes else None


def fastest_peer(found: Sequence[Figures], turns: Mapping[str, float]) -> Figures | None:
    """The one of the others that shardwise is slowest beside; None where none ran. Without shardwise, the fastest."""
    ours = _pinned(found)
    ran = [each for each in found if each.tokens_per_s is not None and each.trainer not in (PINNED, PLANNED)]
    if ours is None or ours.tokens_per_s is None:
        return next(iter(ran), None)
    return min(ran, key=lambda each: ratio_of(ours, each, turns), default=None)


def figures_of(contest: str, rows: Mapping[str, Row]) -> list[Figures]:
    """Every trainer of a contest, those that ran first, the fastest first among them."""
    by_trainer: dict[str, list[Row]] = {}
    for row in rows.values():
        if row.get("contest") == contest and "trainer" in row:
            by_trainer.setdefault(row["trainer"], []).append(row)
    found = [_figures(trainer, of_trainer) for trainer, of_trainer in by_trainer.items()]
    return sorted(found, key=lambda each: -(each.tokens_per_s or 0.0))


def ratios_in_turns(contest: str, rows: Mapping[str, Row]) -> dict[str, float]:
    """Speed by that of shardwise with the same settings, the median over the turns that both took."""
    row = next((row for row in rows.values() if row.get("contest") == contest and "trainers" in row), None)
    if row is None or PINNED not in row["trainers"]:
        return {}
    seconds = {name: told["seconds"][SKIPPED:] for name, told in row["trainers"].items()}
    return {
        name: statistics.median(ours / own for ours, own in zip(seconds[PINNED], found, strict=True))
        for name, found in seconds.items()
    }


def _figures(trainer: str, rounds: Sequence[Row]) -> Figures:
    ran = [row for row in rounds if row.get("outcome") == "ran"]
    first = (ran or list(rounds))[0]
    outcome = "ran" if ran else first.get("reason") or first["outcome"]
    known = Figures(trainer, first.get("version"), first["command"], outcome, lines=first.get("lines"))
    if not ran:
        return known
    rate = statistics.median(row["tokens_per_step"] / statistics.median(row["seconds"][SKIPPED:]) for row in ran)
    peak = first["peak_flops_per_s"]
    last = str(first["num_steps"])
    return known._replace(
        tokens_per_s=rate,
        mfu=None if peak is None else rate * first["flops_per_token"] / peak,
        memory={name: max(row["memory"].get(name, 0) for row in ran) for name in first["memory"]},
        loss=first["losses"].get(last),
    )


def _contest(name: str, rows: Mapping[str, Row]) -> str:
    found, turns = figures_of(name, rows), ratios_in_turns(name, rows)
    row = next(row for row in rows.values() if row.get("contest") == name and "trainer" in row)
    pinned = _pinned(found)
    ours = None if pinned is None else pinned.tokens_per_s
    table = markdown_table(_HEADER, [_cells(each, ours, turns) for each in found])
    of_contest = [each for each in rows.values() if each.get("contest") == name]
    return "\n".join([f"### {name}\n", *_words(row), table, *_verdict(found, turns), *_notes(row, of_contest)])


def _cells(each: Figures, ours: float | None, turns: Mapping[str, float]) -> list[str]:
    if each.tokens_per_s is None:
        return [each.trainer, _line(each.outcome), *["-"] * 6, _text(each.lines), each.version or "-"]
    share = None if ours is None else each.tokens_per_s / ours
    return [
        each.trainer,
        format_count(each.tokens_per_s),
        _ratio(share),
        _ratio(turns.get(each.trainer)),
        "-" if each.mfu is None else f"{each.mfu:.1%}",
        _bytes(each.peak_bytes),
        _bytes(each.memory.get("peak_reserved_bytes")),
        "-" if each.loss is None else f"{each.loss:.4f}",
        _text(each.lines),
        each.version or "-",
    ]


def _words(row: Row) -> Iterator[str]:
    """What was compared."""
    size = f"{row['micro_batch']} x {row['accumulation']} rows of {row['seq_len']} tokens a step"
    steps = f"{row['num_steps']} steps, {row['num_steps'] * row['tokens_per_step']:,} tokens"
    sentences = [
        f"{row['model']}, {row['method']}, {row['precision']}, checkpointing {row['checkpointing']}; {size}; {steps}; "
        f"AdamW fused, constant rate, gradients clipped at 1; on {row['device']}."
    ]
    if row["is_rehearsal"]:
        sentences.append("A rehearsal with a tiny model, which proves the script and says nothing of a GPU.")
    yield " ".join(sentences) + "\n"


def _verdict(found: Sequence[Figures], turns: Mapping[str, float]) -> Iterator[str]:
    """How shardwise stands, in a sentence made of the figures."""
    ours, peer = _pinned(found), fastest_peer(found, turns)
    if ours is None or peer is None or ours.tokens_per_s is None:
        return
    share = memory_ratio(ours, peer)
    memory = "" if share is None else f", with {share:.2f} times its memory"
    how = "in turns, step by step, both on the device" if peer.trainer in turns else "alone"
    yield (
        f"Of the others {peer.trainer} is the fastest beside shardwise; {ours.trainer} runs at "
        f"{ratio_of(ours, peer, turns):.3f} times its speed ({how}){memory}.\n"
    )


def _notes(row: Row, of_contest: Sequence[Row]) -> Iterator[str]:
    """How it was counted, with which versions and commands, and what came to nothing."""
    ran = [each for each in of_contest if each.get("outcome") == "ran" and "trainer" in each]
    count = f"MFU by one count for all, {row['flops_per_token'] / 1e9:.3g} GFLOPs a token"
    share = "4" if row["method"] != "full" else "6"
    peak = row["peak_flops_per_s"]
    of_peak = "no peak is stated for this device" if peak is None else f"of {peak / 1e12:.4g} TFLOP/s"
    is_cuda = any("peak_allocated_bytes" in each["memory"] for each in ran)
    counter = "torch's counters in each process" if is_cuda else "what was resident (VmHWM), libraries included"
    yield f"{count} ({share} N + 12 L h s, not causal, recomputation not counted), {of_peak}. Memory: {counter}.\n"
    yield (
        f"tokens/s: of the median step, without the first {SKIPPED + 1}; a step counts from where a process is let go "
        "to where the device is idle after it. Lines: of the file that is run, neither empty nor a comment.\n"
    )
    for each in (each for each in of_contest if "trainer" not in each and each["outcome"] != "ran"):
        yield f"In turns: {each['outcome']}: {_line(each['reason'])}.\n"
    chosen = next((each["chosen"] for each in ran if each["trainer"] == PLANNED), {})
    if chosen:
        yield "What shardwise chose itself: " + ", ".join(f"{name} {value}" for name, value in chosen.items()) + ".\n"
    commands = {each["trainer"]: each["command"] for each in ran}
    if commands:
        yield "Commands: " + "; ".join(f"{name}: `{command}`" for name, command in commands.items()) + ".\n"
    yield from _versions(ran)


def _versions(ran: Sequence[Row]) -> Iterator[str]:
    """The versions of all; who ran in a Python of their own, a line each."""
    names: dict[str, list[str]] = {}
    for row in ran:
        numbers = ", ".join(f"{name} {number}" for name, number in sorted(row["versions"].items()))
        with_these = names.setdefault(numbers, [])
        if row["trainer"] not in with_these:
            with_these.append(row["trainer"])
    for numbers, trainers in names.items():
        whose = f" of {', '.join(trainers)}" if len(names) > 1 else ""
        yield f"Versions{whose}: {numbers}.\n"


def _pinned(found: Sequence[Figures]) -> Figures | None:
    return next((each for each in found if each.trainer == PINNED), None)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _bytes(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)


def _text(value: object | None) -> str:
    return "-" if value is None else str(value)


def _line(text: str) -> str:
    """In one line, as a table takes it."""
    return " ".join(text.split()).replace("|", "\\|")
