"""What piece `peers` found, as Markdown: a table for each contest, and the sentences that its figures make."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from written_page import markdown_table

from on_gpu.goals import Goal
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
    text = "\n".join(_contest(name, rows) for name in contests_of(rows))
    return {"peers": f"\n{text}\n"} if text else {}


def contests_of(rows: Mapping[str, Row]) -> list[str]:
    """The contests that there are rows of, in their order."""
    return list(dict.fromkeys(row["contest"] for row in rows.values() if "contest" in row))


def goals(rows: Mapping[str, Row]) -> list[Goal]:
    """At least level with the fastest of the others on tokens/s, and at no more memory; one for each contest."""
    return [_goal(name, rows) for name in contests_of(rows)]


def _goal(contest: str, rows: Mapping[str, Row]) -> Goal:
    wanted = f"at least {LEVEL} times its tokens/s at no more memory"
    name = f"{contest}: beside the fastest of the others"
    pair = fastest_pair(contest, rows)
    if pair is None:
        return Goal(name, wanted, reason="not both ran", next_step="the column tokens/s says why not")
    ours, peer = pair
    speed = ratio_of(ours, peer, ratios_in_turns(contest, rows))
    memory = ours.peak_bytes / peer.peak_bytes if ours.peak_bytes and peer.peak_bytes else None
    is_level, is_lean = speed >= LEVEL, memory is None or memory <= 1.0
    what = [*([] if is_level else ["slower"]), *([] if is_lean else ["more memory"])]
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
    ours = next((each.tokens_per_s for each in found if each.trainer == PINNED), None)
    table = markdown_table(_HEADER, [_cells(each, ours, turns) for each in found])
    return "\n".join([f"### {name}\n", *_words(row), table, *_verdict(found, turns), *_notes(row, rows, name)])


def _cells(each: Figures, ours: float | None, turns: Mapping[str, float]) -> list[str]:
    if each.tokens_per_s is None:
        return [each.trainer, _escaped(each.outcome), *["-"] * 6, _text(each.lines), each.version or "-"]
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
    peers, ours = _fastest(found, is_ours=False), _fastest(found, is_ours=True)
    if peers is None or ours is None or peers.tokens_per_s is None or ours.tokens_per_s is None:
        return
    memory = ""
    if peers.peak_bytes and ours.peak_bytes:
        memory = f", with {ours.peak_bytes / peers.peak_bytes:.2f} times its memory"
    yield (
        f"The fastest of the others is {peers.trainer}; {ours.trainer} runs at "
        f"{ours.tokens_per_s / peers.tokens_per_s:.3f} times its speed{memory}.\n"
    )
    if len(turns) > 1:
        yield "In turns, step by step, all were on the device at once.\n"


def _notes(row: Row, rows: Mapping[str, Row], contest: str) -> Iterator[str]:
    """How it was counted, with which versions and commands."""
    count = f"MFU by one count for all, {row['flops_per_token'] / 1e9:.3g} GFLOPs a token"
    share = "4" if row["method"] != "full" else "6"
    peak = row["peak_flops_per_s"]
    of_peak = "no peak is stated for a CPU" if peak is None else f"of {peak / 1e12:.4g} TFLOP/s"
    is_cuda = peak is not None
    counter = "torch's counters in each process" if is_cuda else "what was resident (VmHWM), libraries included"
    yield f"{count} ({share} N + 12 L h s, not causal, recomputation not counted), {of_peak}. Memory: {counter}.\n"
    commands = {}
    for each in rows.values():
        if each.get("contest") == contest and each.get("outcome") == "ran" and "trainer" in each:
            commands[each["trainer"]] = each["command"]
    if commands:
        yield "Commands: " + "; ".join(f"{name}: `{command}`" for name, command in commands.items()) + ".\n"
    versions: dict[str, Any] = {}
    for each in rows.values():
        if each.get("contest") == contest:
            versions |= each.get("versions", {})
    if versions:
        yield "Versions: " + ", ".join(f"{name} {number}" for name, number in sorted(versions.items())) + ".\n"


def fastest_pair(contest: str, rows: Mapping[str, Row]) -> tuple[Figures, Figures] | None:
    """(the fastest of ours, the fastest of the others); None where either did not run."""
    found = figures_of(contest, rows)
    ours, peer = _fastest(found, is_ours=True), _fastest(found, is_ours=False)
    return None if ours is None or peer is None else (ours, peer)


def _fastest(found: Sequence[Figures], *, is_ours: bool) -> Figures | None:
    ran = [each for each in found if each.tokens_per_s is not None and (each.trainer in (PINNED, PLANNED)) is is_ours]
    return max(ran, key=lambda each: each.tokens_per_s or 0.0, default=None)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _bytes(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)


def _text(value: object | None) -> str:
    return "-" if value is None else str(value)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
