"""`shardwise plan`: the plan for this machine, or for others, and their limits; as text, as JSON, as one HTML page.

A job comes from a file, or from the name of a model and options: a file is a job unless its name is config.json, and
everything else is a model. The text is the first screen, at most 20 lines; `-v` prints every section, `--show` the
named ones.
"""

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from shardwise.launch.inputs.model_files import find_known_model, preset_names, read_preset
from shardwise.launch.job.layers import REMOVED_OPT_INS
from shardwise.launch.options import PlanOptions
from shardwise.launch.plan.gather import (
    NodeOptions,
    PlanInputs,
    plan_inputs,
    profile_data,
    read_calibration_of,
    read_inputs,
)
from shardwise.launch.terminal import Console, show_lines, text_width, write_page
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.device import machine_text
from shardwise.trainer.planning.explain.first_screen import first_screen, summary_lines
from shardwise.trainer.planning.page.content import Page, Section, page_text
from shardwise.trainer.planning.planner import Extent, open_contexts, take_candidate
from shardwise.trainer.spec.errors import ExitCode, InputError, NothingFitsError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.model.readers import read_model_shape, supported_model_types
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method
from shardwise.trainer.spec.units import MIB, format_count

Result = tuple[str, Plan | NothingFitsError]


def run_plan(options: PlanOptions, console: Console) -> ExitCode:
    """Prints one explained plan, or several compared; with `as_json` one JSON plan a machine.

    With an option such as --longest-seq it prints the limits of the machine instead.
    """
    if options.longest_seq or options.largest_batch or options.largest_model:
        return _show_limits(options, console)
    shown = _sections_to_show(options)
    requested = machines(options)
    try:
        results = [_result_of(spec, inputs, options) for spec, inputs in requested]
    except NothingFitsError as error:
        if not error.tried:
            raise
        from shardwise.launch.commands.ways_out import show_ways_out

        show_ways_out(error, options, requested[0][1], console)
        return ExitCode.NOTHING_FITS
    dry_runs: dict[str, list[str]] = {}
    if options.simulate:
        from shardwise.launch.plan.dry_run import simulated_results

        results, dry_runs = simulated_results(results, Console(sys.stderr))  # progress, not part of the output
    plans = [(spec, result) for spec, result in results if isinstance(result, Plan)]
    engine_lines = [] if options.engine_files is None else _engine_files(plans, options.engine_files)
    more = {} if options.as_json and options.html is None else _partition_sections(dict(requested), plans)
    if options.html is not None:
        _write_html(options.html, results, top=options.top, more=more)
    for spec, plan in plans:
        if options.as_json:
            console.json(plan)
            continue
        if plan is not plans[0][1]:
            console.line()
        if shown is None:
            _show_first_screen(plan, dict(requested)[spec], options, console, more.get(spec, ()))
        else:
            from shardwise.trainer.planning.explain.plan_page import explain_plan

            width = text_width(console)
            console.line(explain_plan(plan, top=options.top, width=width, more=more.get(spec, ()), show=shown))
        for line in _section(dry_runs.get(spec, ())):
            console.line(line)
    for line in _section(engine_lines):
        (Console(sys.stderr) if options.as_json else console).line(line)
    if len(results) > 1 and not options.as_json:
        from shardwise.trainer.planning.explain.comparison import compare_plans

        console.line()
        console.line(compare_plans(results, width=text_width(console)))
    return ExitCode.DONE if plans else ExitCode.NOTHING_FITS


def _sections_to_show(options: PlanOptions) -> tuple[str, ...] | None:
    """The sections that are printed, () for all; None for the first screen."""
    if options.show is None:
        return () if options.verbose else None
    from shardwise.trainer.planning.explain.plan_page import SECTIONS

    names = tuple(name.strip() for name in options.show.split(","))
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise InputError(f"--show {unknown[0]}: there is no such section; there are {', '.join(SECTIONS)}")
    return names


def _show_first_screen(
    plan: Plan, inputs: PlanInputs, options: PlanOptions, console: Console, more: Sequence[Section]
) -> None:
    width = text_width(console)
    if len(options.specs) > 1:
        show_lines(summary_lines(plan, width=width), console)
        return
    start, again = start_and_repeat(options, inputs)
    if plan.hardware.source != "probe" and inputs.partition is None and not plan.hardware.is_one_cpu_machine:
        start = (f"(on that machine) {start[0]}", *start[1:])
    remarks = [section.title for section in more]
    show_lines(first_screen(plan, start=start, more=f"{again} -v", remarks=remarks, width=width), console)


def start_and_repeat(options: PlanOptions, inputs: PlanInputs) -> tuple[tuple[str, ...], str]:
    """The commands that start the planned run, and the one that repeats the plan."""
    machine, devices = _machine_options(options), _device_options(options)
    *before, train = next_commands(options)
    if inputs.partition is not None and is_job_file(options.job):
        train = shlex.join(["shardwise", "submit", *shlex.split(train)[2:], *machine])
    else:
        here = machine if inputs.hardware.is_one_cpu_machine else []
        train = " ".join([train, *map(shlex.quote, (*here, *devices))])
    return (*before, train), plan_command(options)


def plan_command(options: PlanOptions) -> str:
    """The command that makes the plan of these options."""
    named = {
        "--data": options.data,
        "--method": options.method,
        "--seq-len": options.seq_len,
        "--allow": options.allow,
        "--forbid": options.forbid,
    }
    settings = [*options.overrides, *_given(named), *_machine_options(options), *_device_options(options)]
    return shlex.join(["shardwise", "plan", str(options.job), *settings])


def _machine_options(options: PlanOptions) -> list[str]:
    nodes = {"--partition": options.partition, "--nodes": options.nodes, "--constraint": options.constraint}
    return [*(word for spec in options.specs for word in ("--hardware", spec)), *_given(nodes)]


def _device_options(options: PlanOptions) -> list[str]:
    devices = {
        "--vram": None if options.vram_cap_bytes is None else _size_text(options.vram_cap_bytes),
        "--gpus": None if options.gpus is None else ",".join(map(str, options.gpus)),
        "--take": options.take if options.take > 1 else None,
    }
    return _given(devices)


def _engine_files(plans: Sequence[tuple[str, Plan]], folder: Path) -> list[str]:
    """Writes the engine's files of the one plan; returns the lines about them: what a script must do itself."""
    from shardwise.launch.engine.launcher import write_engine_files

    if len(plans) != 1 or plans[0][1].num_machines > 1:
        raise InputError(f"--engine-files {folder}: they are of one machine; give one --hardware, and one node")
    plan = plans[0][1]
    chosen = plan.chosen
    has_cpu_ranks = plan.device_kind is DeviceKind.CPU and chosen.num_ranks > 1
    if has_cpu_ranks and not chosen.strategy.sharding.is_replicated:
        raise InputError(
            f"--engine-files {folder}: on several CPU ranks Accelerate trains a script with DDP, so that "
            f"{chosen.strategy.name} of its file would be ignored; pin.sharding=ddp"
        )
    names = write_engine_files(plan, folder)
    settings = [
        f"method {chosen.method}",
        f"rows of {chosen.seq_len} tokens",
        f"micro batch {chosen.micro_batch}",
        f"accumulation {chosen.accumulation}",
        f"activation checkpointing {chosen.checkpointing}",
        f"attention {chosen.attention}",
        f"optimizer {chosen.strategy.optimizer}",
        *(["compiled"] if chosen.compile else []),
        *(["activations offloaded"] if chosen.activation_offload else []),
    ]
    return [
        f"Files of {chosen.strategy.name} in {folder}: {', '.join(names)}",
        f"{shlex.join(['accelerate', 'launch', '--config_file', str(folder / names[0])])} YOUR_SCRIPT.py",
        f"set in the script: {', '.join(settings)}",
        *([_cpu_ranks_line(chosen.num_ranks)] if has_cpu_ranks else []),
    ]


def _cpu_ranks_line(num_ranks: int) -> str:
    """Accelerate 1.15 gives `use_cpu` of its file to a script that it starts alone, and not to several ranks."""
    return (
        f"and Accelerator(cpu=True), or TrainingArguments(use_cpu=True): without it each of the {num_ranks} processes "
        "trains a model of its own"
    )


def _given(options: Mapping[str, object]) -> list[str]:
    return [word for flag, value in options.items() if value is not None for word in (flag, str(value))]


def _size_text(num_bytes: int) -> str:
    return f"{num_bytes // MIB}MiB" if num_bytes % MIB == 0 else f"{num_bytes}B"


def _section(lines: Sequence[str]) -> list[str]:
    """Lines as a section of the text, the first its title."""
    return ["", lines[0], *(f"  {line}" for line in lines[1:])] if lines else []


def _show_limits(options: PlanOptions, console: Console) -> ExitCode:
    """Prints the requested limits of every machine."""
    from shardwise.trainer.planning.explain.limits import (
        Question,
        largest_batches,
        largest_models,
        limits_json,
        limits_section,
        longest_sequences,
    )

    def presets() -> dict[str, ModelShape]:
        configs = {name: read_preset(name) for name in preset_names()}
        return {
            name: read_model_shape(config, origin=name)
            for name, config in configs.items()
            if config["model_type"] in supported_model_types()
        }

    searches = {
        Question.LONGEST_SEQ: (options.longest_seq, longest_sequences),
        Question.LARGEST_BATCH: (options.largest_batch, largest_batches),
        Question.LARGEST_MODEL: (options.largest_model, lambda contexts: largest_models(contexts, presets())),
    }
    sections: list[Section] = []
    has_result = False
    title = ""
    for _, inputs in machines(options):
        contexts = _contexts(inputs)
        machine, train = machine_text(inputs.hardware), inputs.resolved.job.train
        size = format_count(inputs.shape.num_parameters)
        title = f"{inputs.resolved.name}: {inputs.shape.model_type}, {size} parameters"
        for question, (is_requested, search) in searches.items():
            if not is_requested:
                continue
            found = search(contexts)
            has_result |= bool(found)
            if options.as_json:
                console.json(limits_json(question, found, machine=machine), is_indented=False)
            sections.append(limits_section(question, found, machine=machine, seq_len=train.seq_len, shape=inputs.shape))
    page = Page(title=title, sections=tuple(sections))
    if not options.as_json:
        console.line(page_text(page, width=text_width(console)))
    if options.html is not None:
        from shardwise.trainer.planning.page.html import pages_html

        write_page(options.html, pages_html([page], title=title))
    return ExitCode.DONE if has_result else ExitCode.NOTHING_FITS


def _contexts(inputs: PlanInputs) -> dict[Method, PlanningContext]:
    calibration, versions = read_calibration_of(inputs)
    return open_contexts(
        inputs.resolved.job,
        hardware=inputs.hardware,
        shape=inputs.shape,
        data=profile_data(inputs),
        calibration=calibration,
        versions=versions,
    )


def machines(options: PlanOptions, *, traced: ModelShape | None = None) -> list[tuple[str, PlanInputs]]:
    """The inputs for each requested machine, by its name on the command line; `traced` as of `read_inputs`."""
    specs: Sequence[str | None] = options.specs or [None]
    nodes = NodeOptions(options.partition, options.nodes, options.constraint)
    if any(nodes) and len(specs) > 1:
        raise InputError("--partition is one machine, whose cards one --hardware may state; remove the others")
    is_job, overrides = is_job_file(options.job), overrides_of(options)
    found = []
    for spec in specs:
        inputs = read_inputs(
            options.job if is_job else None,
            overrides,
            gpus=options.gpus,
            vram_cap_bytes=options.vram_cap_bytes,
            hardware_spec=spec,
            nodes=nodes,
            only_plans=options.trial is None,
            assumes_data=not is_job and not any(re.match(_DATA, override) for override in overrides),
            traced=traced,
        )
        if not is_job:
            inputs = inputs._replace(resolved=replace(inputs.resolved, name=run_name(options.job)))
        found.append((spec or "this machine" if inputs.partition is None else inputs.hardware.source, inputs))
    return found


_DATA = r"\s*(data\.(train|dataset)|dataset|data)\s*="  # overrides that name data


def is_job_file(path: Path) -> bool:
    """True if the argument of `plan` is a job file rather than a model."""
    return path.suffix in (".yaml", ".yml") or (path.is_file() and path.name != "config.json")


def overrides_of(options: PlanOptions) -> list[str]:
    """Overrides that a model and the options of a plan stand for, and the plan's own."""
    settings = [*_settings_of(options), *options.overrides]
    return settings if is_job_file(options.job) else [*_settings_of_model(options.job), *settings]


def _settings_of(options: PlanOptions) -> list[str]:
    """Overrides that the options of a plan stand for."""
    settings = {
        "data.train": None if options.data is None else json.dumps(options.data),
        "train.method": options.method,
        "train.seq_len": options.seq_len,
        "allow": None if options.allow is None else f"[{options.allow}]",
        REMOVED_OPT_INS.rstrip("="): None if options.forbid is None else f"[{options.forbid}]",
    }
    return [f"{path}={value}" for path, value in settings.items() if value is not None]


def _settings_of_model(model: Path) -> list[str]:
    """Overrides that make a model a job: its weights, or its shape if none are published."""
    known, name = find_known_model(str(model)), json.dumps(str(_model_of(model)))
    return [f"model.name={name}"] if known is None or known.hub else [f"model.config={name}", "model.tokenizer=train"]


def next_commands(options: PlanOptions) -> tuple[str, ...]:
    """The command lines that train what was planned; of a plan without a job file, the first writes that file."""
    settings = [*_settings_of(options), *options.overrides]
    if is_job_file(options.job):
        return (shlex.join(["shardwise", "train", str(options.job), *settings]),)
    data, model = options.data or "YOUR_DATA.jsonl", str(_model_of(options.job))
    further = [setting for setting in settings if not setting.startswith("data.train=")]
    return (
        shlex.join(["shardwise", "init", "--model", model, "--data", data]),
        shlex.join(["shardwise", "train", "job.yaml", *further]),
    )


def _model_of(argument: Path) -> Path:
    """A model as the command line names it; a config.json stands for its folder."""
    return argument.parent if argument.name == "config.json" else argument


def run_name(model: Path) -> str:
    """Name of a run of a model without a job file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", _model_of(model).name).strip("-.").lower() or "job"


def _result_of(spec: str, inputs: PlanInputs, options: PlanOptions) -> Result:
    try:
        return spec, take_candidate(_plan(inputs, options), options.take)
    except NothingFitsError as error:
        if len(options.specs) < 2:
            raise
        return spec, error


def _plan(inputs: PlanInputs, options: PlanOptions) -> Plan:
    if options.trial is None:
        is_first_screen = options.show is None and not (options.verbose or options.as_json or options.html)
        extent = Extent.SCREEN if is_first_screen else Extent.WHOLE
        plan = plan_inputs(inputs, profile_data(inputs), extent=extent)
        if inputs.model_code is None or options.simulate:
            return plan
        from shardwise.launch.plan.dry_run import after_dry_run

        return after_dry_run(plan, Console(sys.stderr))
    from shardwise.launch.run.trials import tried_plan

    return tried_plan(inputs, options.trial, console=Console(sys.stderr))  # progress, not part of the output


def _partition_sections(
    requested: Mapping[str, PlanInputs], plans: Sequence[tuple[str, Plan]]
) -> dict[str, tuple[Section, ...]]:
    """Comparisons of node counts, for each machine that is a number of nodes of a partition."""
    if all(inputs.partition is None for inputs in requested.values()):
        return {}
    from shardwise.launch.run.submission import node_counts_section

    sections = {spec: node_counts_section(requested[spec], plan) for spec, plan in plans}
    return {spec: (section,) for spec, section in sections.items() if section is not None}


def _write_html(path: Path, results: Sequence[Result], *, top: int, more: Mapping[str, tuple[Section, ...]]) -> None:
    from shardwise.trainer.planning.explain.comparison import comparison_page
    from shardwise.trainer.planning.explain.plan_page import plan_page
    from shardwise.trainer.planning.page.html import pages_html

    pages = [
        plan_page(result, top=top, more=more.get(spec, ())) for spec, result in results if isinstance(result, Plan)
    ]
    if len(results) > 1:
        pages.insert(0, comparison_page(results))
    write_page(path, pages_html(pages, title=pages[0].title))
