"""The screen of a plan that does not exist: what was tried, what is missing, and commands whose plans fit.

A way out is the command line with one change, or with few where no single one suffices. Each is planned before it is
shown, so that every line that is printed gives a plan; ways that do not fit are left out. Ways are searched only where
nothing fits: some ten plans of a few hundredths of a second each. Blocks that were traced are not traced again for
other rows or another card: amounts of a trace are known at any number of tokens.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path

from msgspec.structs import replace

from shardwise.launch.commands.plan import machines, plan_command
from shardwise.launch.options import PlanOptions, TrainOptions
from shardwise.launch.plan.gather import PlanInputs, plan_inputs, profile_data
from shardwise.launch.terminal import Console, show_lines, text_width, write_page
from shardwise.trainer.planning.candidates import run_seconds, run_totals
from shardwise.trainer.planning.explain.alternatives import Alternative
from shardwise.trainer.planning.explain.first_screen import Line, Tone, alternative_rows
from shardwise.trainer.planning.page.content import Page, Quote, Section, Sentence, Table, paragraph, table
from shardwise.trainer.planning.planner import Extent, context_of
from shardwise.trainer.planning.tables.gpu_specs import GPU_SPECS
from shardwise.trainer.spec.errors import Attempt, ExitCode, InputError, NothingFitsError
from shardwise.trainer.spec.job.sections import Allowance, Pin
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method
from shardwise.trainer.spec.units import GIB, format_bytes, format_seconds

SHORTEST_ROW = 128  # tokens
MOST_GPUS_OF_A_NODE, MOST_NODES = 8, 16
# Opt-ins in the order in which they are proposed: those that keep the mathematics first.
OPT_INS = (
    Allowance.OFFLOAD_CPU,
    Allowance.UNCLIPPED,
    Allowance.BF16_WEIGHTS,
    Allowance.OPTIMIZER_8BIT,
    Allowance.OPTIMIZER_APPROX,
)
RAM_SIZES = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # GiB
_NVME = ("limits.nvme.path=/scratch", "limits.nvme.size={}GiB")
_ANY_NVME_GIB = 100_000

Change = tuple[str, PlanOptions]  # what is different, and the command


def refused(error: NothingFitsError, options: TrainOptions, console: Console) -> ExitCode:
    """Prints the screen for a run that was not started; raises the error if nothing was searched."""
    if not error.tried:
        raise error
    given = {name: getattr(options, name) for name in ("job", "overrides", "vram_cap_bytes", "gpus")}
    plan_options = PlanOptions(**given, specs=[] if options.spec is None else [options.spec])
    ((_, inputs),) = machines(plan_options)
    show_ways_out(error, plan_options, inputs, console)
    return ExitCode.NOTHING_FITS


def show_ways_out(error: NothingFitsError, options: PlanOptions, inputs: PlanInputs, console: Console) -> None:
    """Prints the screen, or its JSON, and writes its page."""
    ways = tuple(way for way, _ in ways_out(options, inputs, error.tried))
    name = inputs.resolved.name
    if options.as_json:
        tried = [each._asdict() for each in error.tried]
        found = [
            {"name": way.name, "command": way.setting, "method": way.effect}
            | {"seconds": way.seconds, "need_bytes": way.need_bytes}
            for way in ways
        ]
        console.json({"name": name, "fits": False, "reason": str(error), "tried": tried, "ways_out": found})
    else:
        show_lines(screen(error, ways, name=name, width=text_width(console)), console)
    if options.html is not None:
        from shardwise.trainer.planning.page.html import pages_html

        write_page(options.html, pages_html([page(error, ways, name=name)], title=name))


def screen(error: NothingFitsError, ways: Sequence[Alternative], *, name: str, width: int) -> tuple[Line, ...]:
    """The lines of the screen, of at most `width` columns but for the commands."""
    first, lines = str(error).splitlines()[0], []
    lines += [Line(text=text, tone=Tone.TITLE) for text in paragraph(f"{name}: {first}", width=width, indent="")]
    lines += [Line(text=text) for text in table(_tried_rows(error.tried), right=(2, 3, 4), wide=0, width=width)]
    lines.append(Line(text=""))
    if not ways:
        text = f"no single change of this command fits; {' '.join(str(error).splitlines()[1:])}"
        return (*lines, *(Line(text=text) for text in paragraph(text, width=width)))
    header, *rows = table(alternative_rows(ways, _HEADS), right=(1, 2), width=width)
    lines.append(Line(text=header, tone=Tone.NOTE))
    for row, way in zip(rows, ways, strict=True):
        lines += [Line(text=row), Line(text=f"      {way.setting}", tone=Tone.COMMAND)]
    return tuple(lines)


def page(error: NothingFitsError, ways: Sequence[Alternative], *, name: str) -> Page:
    """The same as a page."""
    commands = tuple(Quote(label=way.name, text=way.setting) for way in ways)
    first, *rest = str(error).splitlines()
    missing = tuple(Sentence(text=text) for text in (first, *rest))
    tried = Table(rows=tuple(_tried_rows(error.tried)), right=(2, 3, 4), wide=0)
    table_of_ways = Table(rows=tuple(alternative_rows(ways, _HEADS)), right=(1, 2))
    return Page(
        title=f"{name}: nothing fits",
        sections=(
            Section(title="what was tried", blocks=(*missing, tried)),
            Section(title="ways out", blocks=(table_of_ways, *commands)),
        ),
    )


_HEADS = ("ways out", "time", "memory", "method")


def _tried_rows(tried: Sequence[Attempt]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("tried", "resource", "needs", "usable", "missing")]
    for each in tried:
        sizes = (each.need, each.usable, each.need - each.usable)
        rows.append((each.strategy, each.resource, *(_amount(each.resource, size) for size in sizes)))
    return rows


def _amount(resource: str, size: float) -> str:
    if resource == "time":
        return format_seconds(size)
    return f"{size:,.2f}" if resource == "cost" else format_bytes(round(size))


def ways_out(
    options: PlanOptions, inputs: PlanInputs, tried: Sequence[Attempt]
) -> Iterator[tuple[Alternative, PlanOptions]]:
    """The smallest change of each kind that fits; combined changes only where no single setting fits."""
    options = replace(options, take=1)
    inputs = _with_all_methods(options, inputs)
    if _may_fit(_loosest(options, inputs), inputs):
        yield from _ways_of_settings(options, inputs, tried)
    if inputs.resolved.job.train.method is not None:
        for method in Method:
            change = (f"another method: {method}", _setting(options, "method", str(method)))
            yield from _fitting([change], inputs)
    if any(each.resource == "cost" for each in tried):
        return  # the price is the job's, whatever the machine
    for changes in _machines(options, inputs):
        yield from islice(_fitting(changes, inputs), 1)


def _with_all_methods(options: PlanOptions, inputs: PlanInputs) -> PlanInputs:
    """The inputs, their model's blocks traced under every method."""
    if inputs.shape.traced is None or inputs.resolved.job.train.method is None:
        return inputs
    ((_, of_all),) = machines(_with(_setting(options, "method", None), "train.method=null"))
    return inputs._replace(shape=of_all.shape)


def _loosest(options: PlanOptions, inputs: PlanInputs) -> PlanOptions:
    """All changes of the job at once: where this does not fit, none of them does."""
    loosened = replace(_setting(_allowing(options, OPT_INS), "seq_len", SHORTEST_ROW), vram_cap_bytes=None)
    limits = ["limits.hours=null", "limits.cost=null", "limits.vram=null"]
    pins = [
        f"pin.{field}=null" for field in Pin.__struct_fields__ if getattr(inputs.resolved.job.pin, field) is not None
    ]
    nvme = [each.format(_ANY_NVME_GIB) for each in _NVME]
    tokens = SHORTEST_ROW * inputs.hardware.num_devices
    loosened = _allowing(loosened, [Allowance.OFFLOAD_NVME])
    return _with(loosened, *limits, *pins, *nvme, f"train.tokens_per_step={tokens}")


def _ways_of_settings(
    options: PlanOptions, inputs: PlanInputs, tried: Sequence[Attempt]
) -> Iterator[tuple[Alternative, PlanOptions]]:
    found = False
    for changes in _settings(options, inputs, tried):
        for way in islice(_fitting(changes, inputs), 1):
            found = True
            yield way
    if not found:
        yield from _together(options, inputs)


def _fitting(changes: Iterable[Change], inputs: PlanInputs) -> Iterator[tuple[Alternative, PlanOptions]]:
    for name, changed in changes:
        plan = _plan(changed, inputs)
        if plan is not None:
            yield _way(name, changed, plan), changed


def _plan(options: PlanOptions, inputs: PlanInputs) -> Plan | None:
    """The choice for options that change those of `inputs`; None if nothing fits or the program refuses them."""
    try:
        return _choice(options, inputs)
    except (NothingFitsError, InputError):
        return None


def _may_fit(options: PlanOptions, inputs: PlanInputs) -> bool:
    try:
        _choice(options, inputs)
    except NothingFitsError:
        return False
    except InputError:
        return True  # together they are refused; each alone may not be
    return True


def _choice(options: PlanOptions, inputs: PlanInputs) -> Plan:
    ((_, changed),) = machines(options, traced=inputs.shape)
    return plan_inputs(changed, profile_data(changed), extent=Extent.CHOICE)


def _from_the_least(ladder: Sequence[Change], inputs: PlanInputs) -> Iterator[Change]:
    """The first change that fits of a ladder whose every step fits where an earlier one does."""
    if ladder and _plan(ladder[-1][1], inputs) is not None:
        steps = range(len(ladder) - 1)
        yield ladder[bisect_left(steps, 1, key=lambda step: _plan(ladder[step][1], inputs) is not None)]


def _way(name: str, options: PlanOptions, plan: Plan) -> Alternative:
    """A way out: its effect is the method, its setting the whole command."""
    context, chosen = context_of(plan), plan.chosen
    return Alternative(
        name=name,
        effect=str(chosen.method),
        setting=plan_command(options),
        seconds=run_seconds(context, chosen),
        need_bytes=chosen.memory.need_bytes,
        candidate=chosen,
    )


def _settings(options: PlanOptions, inputs: PlanInputs, tried: Sequence[Attempt]) -> Iterator[Iterable[Change]]:
    """Changes of the job, of each kind those that change least first."""
    job = inputs.resolved.job
    exceeded = {each.resource for each in tried}
    yield from (_longer(options, inputs, resource) for resource in ("time", "cost") if resource in exceeded)
    if options.vram_cap_bytes is not None or job.limits.vram is not None:
        uncapped = replace(options, vram_cap_bytes=None)
        yield [("the whole card", _with(uncapped, "limits.vram=null"))]
    for field in Pin.__struct_fields__:
        if getattr(job.pin, field) is not None:
            yield [(f"without pin.{field}", _with(options, f"pin.{field}=null"))]
    missing = [each for each in OPT_INS if each not in job.allow]
    yield ((f"opt in to {each}", _allowing(options, [each])) for each in missing)
    if inputs.hardware.host.ram_bytes is None and job.limits.host_ram is None:
        ladder = [
            (f"{ram} GiB of host RAM, if a node has it", _with(options, f"limits.host_ram={ram}GiB"))
            for ram in RAM_SIZES
        ]
        yield _from_the_least(ladder, inputs)
    yield _onto_nvme(options, inputs)
    yield _smaller_batch(options, inputs)
    yield _from_the_least(tuple(_shorter_rows(options, inputs)), inputs)


def _longer(options: PlanOptions, inputs: PlanInputs, resource: str) -> Iterator[Change]:
    """The limit on time or cost that the fastest plan without it needs."""
    field = "hours" if resource == "time" else resource
    plan = _plan(_with(options, f"limits.{field}=null"), inputs)
    if plan is not None:
        totals = run_totals(context_of(plan), plan.chosen)
        most = math.ceil((totals.hours if resource == "time" else totals.cost) or 0)
        yield f"limits.{field} of {most}", _with(options, f"limits.{field}={most}")


def _with(options: PlanOptions, *overrides: str) -> PlanOptions:
    return replace(options, overrides=(*options.overrides, *overrides))


def _setting(options: PlanOptions, name: str, value: object) -> PlanOptions:
    """A setting of train that is an option of its own, over which key=value applies."""
    others = [each for each in options.overrides if not each.startswith(f"train.{name}=")]
    return replace(options, overrides=(*others,), **{name: value})


def _allowing(options: PlanOptions, more: Sequence[Allowance]) -> PlanOptions:
    given = [] if options.allow is None else [options.allow]
    forbidden = [each for each in (options.forbid or "").split(",") if each and each not in more]
    return replace(options, allow=",".join([*given, *more]), forbid=",".join(forbidden) or None)


def _onto_nvme(options: PlanOptions, inputs: PlanInputs) -> Iterator[Change]:
    """The state on NVMe, of the size that is needed, with few other opt-ins if it does not suffice."""
    job = inputs.resolved.job
    if job.limits.nvme.path is not None and Allowance.OFFLOAD_NVME in job.allow:
        return
    base = [each for each in (Allowance.OFFLOAD_CPU, Allowance.OFFLOAD_NVME) if each not in job.allow]
    more = [each for each in OPT_INS if each not in (*job.allow, Allowance.OFFLOAD_CPU)]
    for added in accumulate(([each] for each in more), initial=list[Allowance]()):
        allowed = _allowing(options, [*base, *added])
        plan = _plan(_with(allowed, *(each.format(_ANY_NVME_GIB) for each in _NVME)), inputs)
        if plan is not None and plan.chosen.memory.nvme_bytes:
            size = math.ceil(plan.chosen.memory.nvme_bytes / GIB)
            name = f"NVMe{' and opt-ins' if added else ''}: {size} GiB of a disk"
            yield name, _with(allowed, *(each.format(size) for each in _NVME))


def _smaller_batch(options: PlanOptions, inputs: PlanInputs) -> Iterator[Change]:
    """One row a rank and step: no gradients are accumulated, and the update can run in the backward."""
    tokens = inputs.resolved.job.train.seq_len * inputs.hardware.num_devices
    yield f"{tokens:,} tokens a step", _with(options, f"train.tokens_per_step={tokens}")


def _shorter_rows(options: PlanOptions, inputs: PlanInputs) -> Iterator[Change]:
    seq_len = inputs.resolved.job.train.seq_len // 2
    while seq_len >= SHORTEST_ROW:
        yield f"rows of {seq_len:,} tokens", _setting(options, "seq_len", seq_len)
        seq_len //= 2


def _together(options: PlanOptions, inputs: PlanInputs) -> Iterator[tuple[Alternative, PlanOptions]]:
    """The fewest opt-ins, then with the smaller batch and shorter rows, where none suffices alone."""
    job = inputs.resolved.job
    missing = [each for each in OPT_INS if each not in job.allow]
    ((batch, smaller),) = _smaller_batch(options, inputs)
    bases = [("", options), (f", {batch}", smaller)]
    for name, shorter in _shorter_rows(options, inputs):
        tokens = (shorter.seq_len or 0) * inputs.hardware.num_devices
        bases.append((f", {name}, {tokens:,} a step", _with(shorter, f"train.tokens_per_step={tokens}")))
    for name, base in bases:
        if missing and _plan(_allowing(base, missing), inputs) is None:
            continue
        needed = missing
        for each in reversed(missing):
            fewer = [other for other in needed if other is not each]
            if fewer and _plan(_allowing(base, fewer), inputs) is not None:
                needed = fewer
        yield from _fitting([(f"opt-ins{name}", _allowing(base, needed))] if needed else [], inputs)
        return


def _machines(options: PlanOptions, inputs: PlanInputs) -> Iterator[Iterable[Change]]:
    """Other machines: more host RAM, a larger card, several cards, more nodes."""
    hardware, partition = inputs.hardware, options.partition
    if partition is not None:
        most = hardware.num_nodes * MOST_NODES
        yield ((f"{nodes} nodes", replace(options, nodes=nodes)) for nodes in _doublings(hardware.num_nodes, most))
        return
    if not hardware.gpus or (options.specs and Path(options.specs[0]).is_file()):
        return
    base = replace(options, gpus=None)
    card, per_node = hardware.gpus[0].spec_name, len(hardware.gpus)
    if card is None:
        return
    stated = "".join(f",{each}" for each in ",".join(options.specs).split(",")[1:])
    uncapped = base if inputs.resolved.job.limits.host_ram is None else _with(base, "limits.host_ram=null")
    yield _from_the_least(tuple(_more_ram(uncapped, stated, card, hardware.num_nodes, per_node)), inputs)
    yield _larger_cards(base, hardware.gpus[0].memory_bytes)
    several = [(1, count) for count in _doublings(per_node, MOST_GPUS_OF_A_NODE)]
    several += [(nodes, max(per_node, MOST_GPUS_OF_A_NODE)) for nodes in _doublings(1, MOST_NODES)]
    yield (
        (
            f"{nodes * count} x {card}",
            replace(base, specs=(f"{nodes}x{count}x{card}" if nodes > 1 else f"{count}x{card}",)),
        )
        for nodes, count in several
    )


def _doublings(count: int, most: int) -> Iterator[int]:
    while 2 * count <= most:
        count *= 2
        yield count


def _more_ram(options: PlanOptions, stated: str, card: str, num_nodes: int, per_node: int) -> Iterator[Change]:
    """The same cards in machines of more RAM, in the sizes that are sold."""
    others = [each for each in stated.split(",") if each and not each.startswith("ram=")]
    for ram in RAM_SIZES:
        spec = ",".join(
            [f"{num_nodes}x{per_node}x{card}" if num_nodes > 1 else f"{per_node}x{card}", f"ram={ram}GiB", *others]
        )
        yield f"machines of {ram} GiB of RAM", replace(options, specs=(spec,))


def _larger_cards(options: PlanOptions, memory_bytes: int) -> Iterator[Change]:
    """One card of each larger size of the catalogue, of each size the fastest, the smallest first; then eight."""
    fastest = {}
    for spec in sorted(GPU_SPECS.values(), key=lambda spec: (spec.memory_bytes, spec.fp16_flops_per_s)):
        if spec.memory_bytes > memory_bytes:
            fastest[round(spec.memory_bytes / GIB)] = spec
    for count in (1, MOST_GPUS_OF_A_NODE):
        for spec in fastest.values():
            if count == 1 or not spec.is_consumer:
                yield f"other cards: {count} x {spec.name}", replace(options, specs=(f"{count}x{spec.name}",))
