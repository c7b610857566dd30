"""`shardwise plan`: for this machine, or for one or several that are not here; as text, as JSON, as one HTML page."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwise.launch.options import PlanOptions
from shardwise.launch.plan.gather import NodeOptions, PlanInputs, plan_inputs, profile_data, read_inputs
from shardwise.launch.terminal import Console, write_page
from shardwise.trainer.planning.explain.comparison import compare_plans, comparison_page
from shardwise.trainer.planning.explain.plan_page import explain_plan, plan_page
from shardwise.trainer.planning.page.content import Section
from shardwise.trainer.planning.planner import take_candidate
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import ExitCode, InputError, NothingFitsError
from shardwise.trainer.spec.plan import Plan

Answer = tuple[str, Plan | NothingFitsError]


def run_plan(options: PlanOptions, console: Console) -> ExitCode:
    """Prints one explained plan, or several compared; with `as_json` one JSON plan a machine.

    A question on the machine's limits is answered instead, by `plan_limits`.
    """
    if options.longest_seq or options.largest_batch or options.largest_model:
        from shardwise.launch.commands.limits import run_limits

        return run_limits(options, console)
    requested = machines(options)
    answers = [_answer(spec, inputs, options) for spec, inputs in requested]
    dry_runs: dict[str, list[str]] = {}
    if options.simulate:
        from shardwise.launch.plan.dry_run import simulated_results

        answers, dry_runs = simulated_results(answers, Console(sys.stderr))  # progress beside the answer, not in it
    plans = [(spec, answer) for spec, answer in answers if isinstance(answer, Plan)]
    more = {} if options.as_json and options.html is None else _partition_sections(dict(requested), plans)
    if options.html is not None:
        _write_html(options.html, answers, top=options.top, more=more)
    for spec, plan in plans:
        if options.as_json:
            console.line(codec.encode(plan).decode().rstrip())
            continue
        text = explain_plan(plan, top=options.top, more=more.get(spec, ()))
        console.line("\n".join((text, *_section(dry_runs.get(spec, ())))))
        if plan is not plans[-1][1]:
            console.line()
    if len(answers) > 1 and not options.as_json:
        console.line()
        console.line(compare_plans(answers))
    return ExitCode.DONE if plans else ExitCode.NOTHING_FITS


def _section(lines: Sequence[str]) -> list[str]:
    """Lines as a section of the text, the first its title."""
    return ["", lines[0], *(f"  {line}" for line in lines[1:])] if lines else []


def machines(options: PlanOptions) -> list[tuple[str, PlanInputs]]:
    """The inputs for each machine that is asked about, by its name on the command line."""
    specs: Sequence[str | None] = options.specs or [None]
    nodes = NodeOptions(options.partition, options.nodes, options.constraint)
    if any(nodes) and len(specs) > 1:
        raise InputError("--partition is one machine, whose cards one --hardware may state; leave out the others")
    found = []
    for spec in specs:
        inputs = read_inputs(
            options.job,
            options.overrides,
            gpus=options.gpus,
            vram_cap_bytes=options.vram_cap_bytes,
            hardware_spec=spec,
            describes_models=options.simulate,
            nodes=nodes,
        )
        found.append((spec or "this machine" if inputs.partition is None else inputs.hardware.source, inputs))
    return found


def _answer(spec: str, inputs: PlanInputs, options: PlanOptions) -> Answer:
    try:
        return spec, take_candidate(_plan(inputs, options), options.take)
    except NothingFitsError as error:
        if len(options.specs) < 2:
            raise
        return spec, error


def _plan(inputs: PlanInputs, options: PlanOptions) -> Plan:
    if options.trial is None:
        plan = plan_inputs(inputs, profile_data(inputs))
        if inputs.model_code is None or options.simulate:
            return plan
        from shardwise.launch.plan.dry_run import after_dry_run

        return after_dry_run(plan, Console(sys.stderr))
    from shardwise.launch.run.trials import tried_plan

    return tried_plan(inputs, options.trial, console=Console(sys.stderr))  # progress beside the answer, not in it


def _partition_sections(
    requested: Mapping[str, PlanInputs], plans: Sequence[tuple[str, Plan]]
) -> dict[str, tuple[Section, ...]]:
    """Of each machine that is nodes of a partition, how many of them are worth it."""
    if all(inputs.partition is None for inputs in requested.values()):
        return {}
    from shardwise.launch.run.submission import node_counts_section

    sections = {spec: node_counts_section(requested[spec], plan) for spec, plan in plans}
    return {spec: (section,) for spec, section in sections.items() if section is not None}


def _write_html(path: Path, answers: Sequence[Answer], *, top: int, more: Mapping[str, tuple[Section, ...]]) -> None:
    from shardwise.trainer.planning.page.html import pages_html

    pages = [
        plan_page(answer, top=top, more=more.get(spec, ())) for spec, answer in answers if isinstance(answer, Plan)
    ]
    if len(answers) > 1:
        pages.insert(0, comparison_page(answers))
    write_page(path, pages_html(pages, title=pages[0].title))
