"""`shardwise plan --longest-seq`, `--largest-batch`, `--largest-model`: how far a machine goes."""

import json
from collections.abc import Mapping

from shardwise.launch.commands.plan import machines
from shardwise.launch.inputs.model_files import preset_names, read_preset
from shardwise.launch.options import PlanOptions
from shardwise.launch.plan.gather import PlanInputs, profile_data, read_calibration_of
from shardwise.launch.terminal import Console, write_page
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.device import machine_text
from shardwise.trainer.planning.limits import (
    LimitStep,
    Question,
    largest_batches,
    largest_models,
    limits_json,
    limits_section,
    longest_sequences,
)
from shardwise.trainer.planning.page.content import Page, Section, page_text
from shardwise.trainer.planning.page.html import pages_html
from shardwise.trainer.planning.planner import open_contexts
from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.strategy import Method
from shardwise.trainer.spec.units import format_count


def run_limits(options: PlanOptions, console: Console) -> ExitCode:
    """Answers every question that was asked, for every machine."""
    requested = [
        question
        for question, is_requested in (
            (Question.LONGEST_SEQ, options.longest_seq),
            (Question.LARGEST_BATCH, options.largest_batch),
            (Question.LARGEST_MODEL, options.largest_model),
        )
        if is_requested
    ]
    sections: list[Section] = []
    has_result = False
    title = ""
    for _, inputs in machines(options):
        contexts = _contexts(inputs)
        machine, train = machine_text(inputs.hardware), inputs.resolved.job.train
        size = format_count(inputs.shape.num_parameters)
        title = f"{inputs.resolved.name}: {inputs.shape.model_type}, {size} parameters"
        for question in requested:
            steps = _answer(question, contexts)
            has_result |= bool(steps)
            if options.as_json:
                console.line(json.dumps(limits_json(question, steps, machine=machine)))
            section = limits_section(question, steps, machine=machine, seq_len=train.seq_len, shape=inputs.shape)
            sections.append(section)
    page = Page(title=title, sections=tuple(sections))
    if not options.as_json:
        console.line(page_text(page, width=100))
    if options.html is not None:
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


def _answer(question: Question, contexts: Mapping[Method, PlanningContext]) -> tuple[LimitStep, ...]:
    if question is Question.LONGEST_SEQ:
        return longest_sequences(contexts)
    if question is Question.LARGEST_BATCH:
        return largest_batches(contexts)
    return largest_models(contexts, {name: read_model_shape(read_preset(name), origin=name) for name in preset_names()})
