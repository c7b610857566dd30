"""The plan explorer: a model, a method, a length and cards in a form, and at once what fits and how long it would run.

The form is written as a command line, which the program's own parser reads. So the page shows what `shardwise plan`
prints for that line, and the line can be pasted. Cards are those of the package's table, models those of its table, a
repository of the hub, or the one file that the command line of `shardwise ui` names: a job or a config.json. No path of
a form is opened.
"""

import re
import shlex
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from markupsafe import Markup
from msgspec.structs import replace

from shardwise.launch.commands.plan import is_job_file, machines, plan_command, start_and_repeat
from shardwise.launch.commands.ui.pages import Query, folded_html, section_html
from shardwise.launch.commands.ui.render import Content, Tile, address, blocks_of, content_of
from shardwise.launch.commands.ui.runs import Runs
from shardwise.launch.commands.ways_out import page as no_plan_page
from shardwise.launch.commands.ways_out import ways_out
from shardwise.launch.inputs.model_files import find_known_model, known_models, similar_model
from shardwise.launch.job.layers import read_override
from shardwise.launch.options import PlanOptions, parse_command_line
from shardwise.launch.plan.gather import plan_inputs, profile_data
from shardwise.trainer.planning.candidates import run_totals
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.device import machine_text
from shardwise.trainer.planning.explain.alternatives import Alternative
from shardwise.trainer.planning.explain.first_screen import (
    about,
    alternatives,
    how,
    memory_text,
    time_range,
    without_text,
)
from shardwise.trainer.planning.explain.plan_page import plan_page
from shardwise.trainer.planning.planner import context_of, take_candidate
from shardwise.trainer.planning.search.certainty import error_text, peak_text, run_error
from shardwise.trainer.planning.tables.gpu_names import match_card
from shardwise.trainer.planning.tables.gpu_specs import GPU_SPECS
from shardwise.trainer.spec.errors import InputError, NothingFitsError, ShardwiseError
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method
from shardwise.trainer.spec.units import format_bytes, format_count, format_seconds, parse_count
from shardwise.trainer.spec.value import complete

_COUNT = re.compile(r"\s*[0-9_.]{1,20}\s*[A-Za-z]?\s*")  # without an exponent, which can stand for a very long number
_HUB_ID = re.compile(r"[A-Za-z0-9][\w-]*(\.[\w-]+)*/[A-Za-z0-9][\w-]*(\.[\w-]+)*", re.ASCII)
HERE = "here"  # in place of a card: this machine
METHODS = ("auto", *(method.value for method in Method))
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
MOST = {"seq_len": 10**7, "gpus": 16, "nodes": 1024, "tokens": 10**16, "take": 99}
_FOLDED = ("choice", "memory", "speed", "why", "runners-up", "gains", "opt-ins", "fallbacks", "rejected", "notes")
_NO_PLAN = ("problem", "fits", "tried", "lead", "missing", "memory", "ways", "back", "methods", "commands", "more")
_BY_DEFAULT = (Allowance.COMPILE, Allowance.OFFLOAD_CPU)  # of which opting in changes nothing
_OPT_INS = complete(
    Allowance,
    {
        Allowance.OFFLOAD_CPU: "State may move to host RAM: slower, and larger models fit.",
        Allowance.OFFLOAD_NVME: "State may move to a local NVMe disk: slower than host RAM, which it saves.",
        Allowance.OPTIMIZER_8BIT: "Optimizer state may have 8 bits: a quarter of its memory, nearly the same updates.",
        Allowance.OPTIMIZER_APPROX: "Another optimizer may be used, with less state and its own learning rate.",
        Allowance.BF16_WEIGHTS: "Weights may have only a bf16 copy: half the memory, and small updates round away.",
        Allowance.BF16_REDUCTION: "Ranks may add gradients up in bf16: half the traffic, with 8 bits instead of 24.",
        Allowance.FP8: "Products of matrices may have fp8 inputs: faster on some cards, with a larger rounding error.",
        Allowance.TF32: "Products in fp32 may round their inputs to TF32: faster, with 10 bits instead of 23.",
        Allowance.UNCLIPPED: "Updates may run inside the backward pass: less memory, and gradients are not clipped.",
        Allowance.COMPILE: "Blocks may be compiled, which changes no result.",
    },
    "the sentences of opt-ins",
)
_MOST_LINES, _MOST_LINE = 3, 240  # of a problem


class Form(NamedTuple):
    """The fields of the form."""

    model: str = "llama-3.1-8b"
    method: str = "auto"
    seq_len: int | None = 2048  # None: as the job has it
    card: str = "RTX-4090"
    gpus: int = 1
    nodes: int = 1
    tokens: str = ""  # to learn, as it was typed
    allow: tuple[str, ...] = ()
    take: int = 1  # the candidate of the plan that runs

    @property
    def arguments(self) -> list[str]:
        """The arguments of `shardwise` that plan this."""
        spec = f"{self.nodes}x{self.gpus}x{self.card}" if self.nodes > 1 else f"{self.gpus}x{self.card}"
        options = {
            "--method": None if self.method == "auto" else self.method,
            "--seq-len": None if self.seq_len is None else str(self.seq_len),
            "--hardware": None if self.card == HERE else spec,
            "--allow": ",".join(self.allow) or None,
            "--take": str(self.take) if self.take > 1 else None,
        }
        given = [part for flag, value in options.items() if value is not None for part in (flag, value)]
        return ["plan", self.model, *given, *([f"train.tokens={parse_count(self.tokens)}"] if self.tokens else [])]

    @property
    def query(self) -> dict[str, Any]:
        """The form as the query of an address; of a model of the table, fields that have their default are left out."""
        is_in_table = find_known_model(self.model) is not None
        given = {name: value for name, value in self._asdict().items() if value is not None}
        return {name: value for name, value in given.items() if not is_in_table or value != self._field_defaults[name]}


def first_form(own: Path | None) -> Form:
    """The form before anything is chosen: of the own file, if there is one. A job has its own length and machine."""
    if own is None:
        return Form()
    return Form(str(own), seq_len=None, card=HERE) if is_job_file(own) else Form(str(own))


def read_form(query: Query, own: Path | None = None) -> Form:
    """The fields of an address, a card as for `--hardware`; InputError for one that is none of those of the form."""
    given = {name: query[name][0] for name in Form._fields if name in query}
    first = first_form(own)
    first = first if given.get("model", first.model) == first.model else Form()
    model, method, card = (given.get(name, getattr(first, name)) for name in ("model", "method", "card"))
    model = model if own is not None and model == str(own) else _model(model)
    if method not in METHODS:
        raise InputError(f"method {method}: is none of {', '.join(METHODS)}")
    numbers = {name: _whole(name, given[name]) for name in ("seq_len", "gpus", "nodes", "take") if name in given}
    if card != HERE and card not in GPU_SPECS:
        card = match_card(card, count=numbers.get("gpus") or 1).spec.name
    named = (name for each in query.get("allow", ()) for name in each.split(","))
    allow = tuple(each for each in named if each in list(Allowance))
    tokens = given.get("tokens", "").strip()
    if tokens:
        _whole("tokens", tokens)
    seq_len = numbers.pop("seq_len", first.seq_len)
    return Form(model, method, seq_len, card=card, allow=allow, tokens=tokens, **numbers)


def _model(model: str) -> str:
    """The name of a model of the table, or a repository of the hub; InputError for anything else."""
    known = find_known_model(model.strip())
    if known is not None:
        return known.name
    if _HUB_ID.fullmatch(model.strip()) and not Path(model.strip()).exists():
        return model.strip()
    near = similar_model(model)
    hint = f"did you mean {near}?" if near else "type a repository of the hub, such as Qwen/Qwen2.5-7B"
    raise InputError(f"model {model}: is not in the table; {hint}\nfor a file of your own: shardwise ui FILE")


def _whole(name: str, text: str) -> int:
    field = f"{name.replace('_', ' ')} {text}"
    if not _COUNT.fullmatch(text):
        raise InputError(f'{field}: is not a count such as 2048, "64k" or "2G"')
    try:
        value = parse_count(text)
    except ValueError as error:
        raise InputError(f"{field}: is not {error}") from None
    if not 1 <= value <= MOST[name]:
        raise InputError(f"{field}: is not between 1 and {MOST[name]:,}")
    return value


def plan_content(runs: Runs, query: Query) -> Content:
    """The explorer with the plan of its form."""
    form = first_form(runs.own_file)
    try:
        form = read_form(query, runs.own_file)
        parts = plan_parts(form, _stamp(runs.own_file))
        own, is_here = runs.own_file, form.card == HERE
        if runs.nonce is not None and own is not None and form.model == str(own) and is_here and is_job_file(own):
            fields = {name: str(value) for name, value in form.query.items() if name != "allow"}
            start = blocks_of("start.html", nonce=runs.nonce, fields={**fields, "allow": ",".join(form.allow)})
            parts = {**parts, "command": parts["command"] + start["start"]}
    except ShardwiseError as error:
        parts = _planned(problem=short(str(error)))
    return content_of(
        "plan.html",
        f"{form.model}: plan",
        place="/plan",
        api="/api/plan",
        form=form._asdict(),
        models=_models(runs.own_file),
        methods=[(each, each) for each in METHODS],
        cards=_cards(),
        most=MOST,
        lengths=LENGTHS,
        opt_ins=[(each, text) for each, text in _OPT_INS.items() if each not in _BY_DEFAULT],
    )._replace(parts=parts)


def _cards() -> list[tuple[str, str]]:
    by_name = sorted(GPU_SPECS.values(), key=lambda spec: spec.name)
    return [
        (HERE, "this machine"),
        *((each.name, f"{each.name}, {format_bytes(each.memory_bytes)}") for each in by_name),
    ]


def _models(own: Path | None) -> list[tuple[str, str]]:
    known = [(each.name, format_count(each.parameters) if each.parameters else "") for each in known_models()]
    return known if own is None else [(str(own), "the file of the command line"), *known]


def _stamp(own: Path | None) -> int:
    """When the own file was changed."""
    try:
        return 0 if own is None else own.stat().st_mtime_ns
    except OSError:
        return 0


def short(text: str) -> str:
    """The first lines of a problem, none of them long."""
    found = [each if len(each) <= _MOST_LINE else f"{each[:_MOST_LINE].rstrip()}…" for each in text.splitlines()]
    if len(found) <= _MOST_LINES:
        return "\n".join(found)
    return "\n".join(
        (*found[: _MOST_LINES - 1], f"and {len(found) - _MOST_LINES + 1} more; the command line lists all")
    )


_PLANNING = Lock()  # a plan is a second of computation: two at a time would take twice as long each


@lru_cache(maxsize=128)
def plan_parts(form: Form, _stamp_of_file: int = 0) -> dict[str, str]:
    """The parts of the page for a form; ShardwiseError where the program refuses the settings."""
    _, options = parse_command_line(form.arguments)
    command = shlex.join(["shardwise", *form.arguments])
    try:
        with _PLANNING:
            ((_, inputs),) = machines(options)
            plan = take_candidate(plan_inputs(inputs, profile_data(inputs)), options.take)
    except NothingFitsError as error:
        return _no_plan(error, options, form, command)
    context = context_of(plan)
    sections = {section.name: section for section in plan_page(plan).sections}
    memory, methods = sections["memory"], sections["methods"]
    sections["memory"] = replace(memory, title="memory at every event of a step", blocks=memory.blocks[1:])
    return _planned(
        **_verdict(plan, context),
        memory=section_html(replace(memory, blocks=memory.blocks[:1]), "card"),
        ways=[
            _way(each, changed(form, each.setting) if each.setting else None, format_seconds)
            for each in alternatives(plan, context)
        ],
        back=address("/plan", **form._replace(take=1).query) if form.take > 1 else "",
        take=form.take,
        methods=section_html(replace(methods, blocks=methods.blocks[:1]), "card"),
        commands=[command, *start_and_repeat(options, inputs)[0]],
        more=Markup().join(folded_html(sections[name]) for name in _FOLDED if name in sections),
    )


def _planned(**values: object) -> dict[str, str]:
    """The parts of the page; those without a value are empty."""
    return blocks_of("planned.html", **{**dict.fromkeys(_NO_PLAN, ""), **values})


def _no_plan(error: NothingFitsError, options: PlanOptions, form: Form, command: str) -> dict[str, str]:
    """The parts where nothing fits: what was tried and what is missing, and the ways out."""
    first, *rest = str(error).removeprefix("nothing fits: ").splitlines()
    values: dict[str, object] = {"lead": first, "missing": "\n".join(rest), "commands": [command]}
    if not error.tried:
        return _planned(**values)
    with _PLANNING:
        ((_, inputs),) = machines(options)
        found = list(ways_out(options, inputs, error.tried))
    tried, _ = no_plan_page(error, [way for way, _ in found], name=form.model).sections
    memory = section_html(replace(tried, blocks=tried.blocks[-1:]), "card")
    ways = [_way(replace(way, effect=""), form_of(form, options_of_way), about) for way, options_of_way in found]
    return _planned(**values, tried=True, memory=memory, ways=ways)


class Way(NamedTuple):
    """A row of the table of other ways."""

    name: str
    address: str  # of its own plan; empty if the form does not offer it
    time: str
    memory: str
    setting: str
    effect: str = ""


def _way(each: Alternative, form: Form | None, format_time: Callable[[float], str]) -> Way:
    """An alternative as a link to its own plan."""
    return Way(
        each.name,
        "" if form is None else address("/plan", **form.query),
        "-" if each.seconds is None else format_time(each.seconds),
        "-" if each.need_bytes is None else format_bytes(each.need_bytes),
        each.setting,
        each.effect,
    )


def form_of(form: Form, options: PlanOptions) -> Form | None:
    """The form of a way out, or None if a change of it is none that the form offers."""
    machine = re.fullmatch(r"(?:(\d+)x)?(\d+)x([^,]+)", ",".join(options.specs))
    allow = tuple(each for each in (options.allow or "").split(",") if each)
    if machine is not None:
        nodes, gpus, card = machine.groups()
        form = form._replace(nodes=int(nodes or 1), gpus=int(gpus), card=card)
    method, seq_len = options.method or form.method, options.seq_len or form.seq_len
    form = form._replace(method=method, seq_len=seq_len, allow=allow, take=1)
    _, again = parse_command_line(form.arguments)
    return form if plan_command(again) == plan_command(options) else None


def verdict_html(plan: Plan, context: PlanningContext) -> str:
    """The verdict of a plan: its time, memory and speed, and how it runs."""
    return _planned(**_verdict(plan, context))["verdict"]


def _verdict(plan: Plan, context: PlanningContext) -> dict[str, object]:
    chosen, shape = plan.chosen, plan.model_shape
    method = f"{shape.model_type}, {format_count(shape.num_parameters)} parameters, {chosen.method}"
    text = "; ".join(how(plan, context))
    return {
        "fits": True,
        "what": f"{method} on {machine_text(plan.hardware)}",
        "lead": text[:1].upper() + text[1:],
        "strategy": chosen.strategy.name,
        "tiles": list(_tiles(plan, context)),
        "warnings": plan.all_warnings,
    }


def _tiles(plan: Plan, context: PlanningContext) -> Iterator[Tile]:
    chosen, totals = plan.chosen, run_totals(context, plan.chosen)
    memory, seconds = chosen.memory, totals.hours * 3600
    needed, usable = memory.need_bytes, memory.usable_bytes
    error = run_error(context, chosen)
    within = "" if error is None else f"{time_range(seconds, error)}, {error_text(error)}"
    steps = f"{plan.schedule.num_steps:,} steps of {format_seconds(chosen.speed.step_s)}"
    yield Tile(
        "time",
        about(seconds) if context.device.has_known_speed else "not known",
        (within, steps, without_text(context, chosen)),
    )
    place, peak = ("RAM of each process", "peak of tensors") if context.is_cpu else ("each card", "peak")
    yield Tile(
        "memory",
        format_bytes(needed),
        (
            f"{memory_text(memory)}, {place}",
            f"{peak} {format_bytes(memory.peak_allocated_bytes)} ({peak_text(context, chosen)})",
        ),
        share=needed / usable,
        mark=memory.device_bytes / usable if memory.device_bytes > needed else None,
    )
    mfu = f"MFU {chosen.speed.mfu:.0%}" if chosen.speed.mfu is not None else ""
    tokens = f"{format_count(plan.num_tokens)} tokens in all"
    yield Tile("tokens/s", format_count(totals.tokens_per_s), (tokens, mfu))
    host, granted = memory.pinned_bytes + memory.host_bytes, context.host_ram_bytes
    if host and not context.is_cpu:
        share = host / granted if granted else None
        of = f"of {format_bytes(granted)} of a node" if granted else ""
        yield Tile("host RAM", format_bytes(host), (of,), share=share, is_full=share is not None and share > 0.9)


def changed(form: Form, setting: str) -> Form | None:
    """The form with a setting of an alternative, as the command line would read it; None if the form has no such."""
    _, options = parse_command_line(["plan", form.model, *shlex.split(setting)])
    form = form._replace(take=options.take)
    for override in options.overrides:
        tree = read_override(override)
        train, allow = tree.pop("train", {}), tree.pop("allow", ())
        if tree or train.keys() - {"method"}:
            return None
        form = form._replace(method=train.get("method", form.method), allow=tuple(dict.fromkeys((*form.allow, *allow))))
    return form
