"""The report on an attempt that ran out of memory: `attempts/N/out-of-memory.txt`.

It shows the parts that were predicted to be largest, the memory that each rank held when an allocation failed, the
allocator's summary, the processes on the card, and the next attempt or configurations that would fit. Writing it never
raises: it describes a failure and must not become one.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardwise.trainer.planning.page.content import Page, Quote, Section, Sentence, Table, page_text
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.search.fallbacks import fallbacks
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import ShardwiseError
from shardwise.trainer.spec.hardware import DeviceKind, Gpu
from shardwise.trainer.spec.messages.rank_files import MemoryState
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.report import Report
from shardwise.trainer.spec.secrets import redact
from shardwise.trainer.spec.units import format_bytes

FILE = "out-of-memory.txt"
_WIDTH = 100
_MOST_PARTS, _MOST_OFFERS = 8, 4
_SMI_TIMEOUT_S = 5.0


class MemoryEnd(NamedTuple):
    """The facts on an attempt that ran out of memory."""

    number: int
    plan: Plan  # of the run
    report: Report
    states: tuple[MemoryState, ...] = ()  # of the ranks that wrote one
    next_candidate: Candidate | None = None  # None: the run ends
    decision: str = ""
    cards: tuple[Gpu, ...] = ()  # with the processes on them, if the driver lists them
    smaller: tuple[Candidate, ...] = ()  # configurations that are predicted to need less, if the run ends


def write_oom_report(
    attempt_dir: Path, plan: Plan, report: Report, *, next_candidate: Candidate | None, decision: str
) -> Path | None:
    """Writes the report and returns its path; None if it could not be written."""
    try:
        end = MemoryEnd(
            number=int(attempt_dir.name),
            plan=plan,
            report=report,
            states=_states(attempt_dir),
            next_candidate=next_candidate,
            decision=decision,
            cards=_cards(plan),
            smaller=() if next_candidate is not None else _smaller(plan, report.plan),
        )
        path = attempt_dir / FILE
        path.write_text(redact(page_text(oom_page(end), width=_WIDTH)) + "\n", encoding="utf-8")
    except Exception:  # noqa: BLE001  # the run has failed already, which is what matters
        return None
    return path


def oom_page(end: MemoryEnd) -> Page:
    """The report. Pure."""
    candidate = end.report.plan
    sections = [
        Section(title="What happened", blocks=(*_happened(end),)),
        Section(title="Predicted", blocks=(*_predicted(candidate),)),
    ]
    sections += [_state_section(state, candidate) for state in end.states]
    if any(card.processes for card in end.cards):
        sections.append(Section(title="Who holds the card now", blocks=(_processes(end.cards),)))
    sections.append(Section(title="Next", blocks=(*_next(end),)))
    summaries = [state for state in end.states if state.summary]
    if summaries:
        quotes = tuple(Quote(label=f"rank {state.rank}", text=f"\n{state.summary}") for state in summaries)
        sections.append(Section(title="The allocator's tables", blocks=quotes))
    return Page(title=f"{end.plan.name}: attempt {end.number} ran out of memory", sections=tuple(sections))


def _states(attempt_dir: Path) -> tuple[MemoryState, ...]:
    found = []
    for path in sorted(attempt_dir.glob("out-of-memory-rank-*.json")):
        try:
            found.append(codec.read(path, MemoryState))
        except ShardwiseError:
            continue  # it was cut short
    return tuple(found)


def _cards(plan: Plan) -> tuple[Gpu, ...]:
    """The cards as the driver reports them after the ranks have ended."""
    if plan.device_kind is not DeviceKind.CUDA:
        return ()
    from shardwise.launch.probe.gpus import read_gpus

    return read_gpus(timeout_s=_SMI_TIMEOUT_S).gpus


def _smaller(plan: Plan, candidate: Candidate) -> tuple[Candidate, ...]:
    """The planner's fallbacks after this candidate, even if the run did not have them."""
    try:
        others = tuple(other for other in plan.candidates if other.strategy != candidate.strategy)
        return fallbacks(context_of(replace(plan, candidates=(candidate, *others))), (candidate, *others))
    except ShardwiseError:
        return ()  # the plan is not one that could be made here


def _happened(end: MemoryEnd) -> Iterator[Sentence]:
    report = end.report
    for state in end.states:
        moment = f"in {state.phase} of step {state.step}" if state.phase else f"in step {state.step}"
        if " " in state.phase:  # of the start
            moment = f"while {state.phase}, before step {state.step}"
        yield Sentence(text=f"Rank {state.rank} could not allocate {moment}.")
    if not end.states:
        yield Sentence(text=f"A rank ended after step {report.step} before it could report what it held.")
    if report.error:
        yield Sentence(text=f"Error: {report.error.splitlines()[0]}")
    yield Sentence(text=f"It ran {describe_candidate(report.plan)}.")


def _predicted(candidate: Candidate) -> Iterator[Sentence | Table]:
    memory = candidate.memory
    verdict = "which fits" if memory.fits else "which does not fit"
    yield Sentence(
        text=f"A need of {format_bytes(memory.need_bytes)} where {format_bytes(memory.usable_bytes)} are usable, "
        f"{verdict}; at most {format_bytes(memory.peak_allocated_bytes)} allocated, at "
        f"{memory.peak_event.replace('_', ' ')}."
    )
    parts = _largest(memory.parts)
    if parts:
        name, size = parts[0]
        yield Sentence(text=f"The largest part is {name}, {size / memory.peak_allocated_bytes:.0%} of that:")
        yield _shares(("part", "predicted", "share"), parts, memory.peak_allocated_bytes)


def _state_section(state: MemoryState, candidate: Candidate) -> Section:
    blocks: list[Sentence | Table] = []
    held = _largest(state.tensors)
    if held:
        blocks.append(_shares(("tensors", "held", "share"), held, sum(state.tensors.values())))
    rows = [(name, format_bytes(size)) for name, size in _counters(state) if size is not None]
    if rows:
        blocks.append(Table(rows=(("counter", ""), *rows), right=(1,)))
    if state.allocated_bytes is not None and state.reserved_bytes:
        blocks.append(Sentence(text=_fragmentation(state.allocated_bytes, state.reserved_bytes)))
    if state.largest_blocks:
        sizes = ", ".join(format_bytes(size) for size in state.largest_blocks)
        blocks.append(Sentence(text=f"Largest blocks in use: {sizes}."))
    peak = candidate.memory.peak_allocated_bytes
    return Section(title=f"Held by rank {state.rank}, of {format_bytes(peak)} predicted", blocks=tuple(blocks))


def _counters(state: MemoryState) -> Iterator[tuple[str, int | None]]:
    yield "allocated", state.allocated_bytes
    yield "reserved by the allocator", state.reserved_bytes
    yield "largest piece reserved and free", state.largest_free_bytes
    yield "free on the device", state.free_device_bytes
    yield "the whole device", state.total_device_bytes
    yield "resident memory of the process", state.host_bytes
    if state.data_limit_bytes is not None:
        yield "data of the process", state.data_bytes
        yield "its data limit", state.data_limit_bytes


def _fragmentation(allocated: int, reserved: int) -> str:
    unused = reserved - allocated
    return (
        f"Fragmentation: {format_bytes(unused)} of the reserved memory are not in use, {unused / reserved:.0%} of it."
    )


def _processes(cards: Iterable[Gpu]) -> Table:
    rows = [
        (
            str(card.index),
            str(process.pid),
            process.name or "-",
            "-" if process.memory_bytes is None else format_bytes(process.memory_bytes),
        )
        for card in cards
        for process in card.processes
    ]
    return Table(rows=(("card", "process", "name", "holds"), *rows), right=(3,))


def _next(end: MemoryEnd) -> Iterator[Sentence]:
    if end.decision:
        yield Sentence(text=f"{end.decision[:1].upper()}{end.decision[1:]}.")
    if end.next_candidate is not None:
        yield Sentence(
            text=f"The next attempt runs {describe_candidate(end.next_candidate)}; it is predicted to need "
            f"{format_bytes(end.next_candidate.memory.need_bytes)}."
        )
        return
    offers = list(_offers(end))
    if offers:
        yield Sentence(text="Predicted to need less:")
        yield from offers
    else:
        yield Sentence(
            text="Nothing in the plan needs less. A shorter train.seq_len, train.method: lora or allow: "
            "[optimizer_8bit] would; shardwise plan shows by how much."
        )


def _offers(end: MemoryEnd) -> Iterator[Sentence]:
    """Configurations that need less memory, the closest first and the smallest last, then other methods."""
    need = end.report.plan.memory.need_bytes
    lower = {describe_candidate(each): each for each in (*end.plan.candidates, *end.smaller) if _need(each) < need}
    ordered = sorted(lower.values(), key=_need, reverse=True)
    for candidate in ordered if len(ordered) <= _MOST_OFFERS else [*ordered[: _MOST_OFFERS - 1], ordered[-1]]:
        yield Sentence(text=f"{format_bytes(_need(candidate))}: {describe_candidate(candidate)}")
    for row in end.plan.methods:
        if row.memory_bytes is not None and row.memory_bytes < need and row.method is not end.report.plan.method:
            yield Sentence(text=f"{format_bytes(row.memory_bytes)}: train.method: {row.method}")


def _need(candidate: Candidate) -> int:
    return candidate.memory.need_bytes


def describe_candidate(candidate: Candidate) -> str:
    """`none/fp32/adamw, micro batch 4 x 2, checkpointing full, attention sdpa, loss chunked`."""
    ranks = f" x{candidate.num_ranks}" if candidate.num_ranks > 1 else ""
    return (
        f"{candidate.strategy.name}{ranks}, method {candidate.method}, micro batch {candidate.micro_batch} x "
        f"{candidate.accumulation}, checkpointing {candidate.checkpointing}, attention {candidate.attention}, "
        f"loss {candidate.loss}"
    )


def _largest(parts: dict[str, int]) -> list[tuple[str, int]]:
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return [(name.replace("_", " "), size) for name, size in ordered if size][:_MOST_PARTS]


def _shares(header: tuple[str, str, str], parts: Sequence[tuple[str, int]], total: int) -> Table:
    rows = [(name, format_bytes(size), f"{size / max(1, total):.0%}") for name, size in parts]
    return Table(rows=(header, *rows), right=(1, 2))
