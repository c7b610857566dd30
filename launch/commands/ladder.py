"""`shardwise ladder`: what each technique saves on this machine, switched on one after the other.

What is measured is told in a table; `--csv` and `--html` write the same figures to files.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.attempt.supervisor import StopRequest
from launch.inputs.prepare_data import prepare_data
from launch.options import LadderOptions
from launch.plan.gather import PlanInputs, read_inputs, with_weights
from launch.probe.torch_fit import check_torch
from launch.run.attempts import stop_code
from launch.run.ladder import (
    Climb,
    Outcome,
    RungResult,
    climb,
    default_rungs,
    ladder_csv,
    ladder_page,
    ladder_rows,
    parse_rungs,
)
from launch.run.trials import check_trials_can_run
from launch.terminal import Console
from trainer.planning.explain.choice import machine_words
from trainer.planning.page.content import Page
from trainer.planning.page.text_layout import page_text
from trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError
from trainer.spec.units import format_count

# As a rank counts them: two that allocate and warm up, one whose memory is measured, and the three that are timed.
LEAST_STEPS = 3
_WIDTH = 100


def run_ladder(
    options: LadderOptions, console: Console, progress: Console, *, environment: Mapping[str, str] = os.environ
) -> ExitCode:
    """Climbs and tells; whatever is wrong with the input shows before the first rung."""
    if options.num_steps < LEAST_STEPS:
        raise InputError(f"--steps {options.num_steps}: the third step is the first that is measured; give 3 or more")
    rungs = None if options.rungs is None else parse_rungs(options.rungs)
    _check_folders(options)
    inputs = read_inputs(
        options.job,
        options.overrides,
        gpus=options.gpus,
        vram_cap_bytes=options.vram_cap_bytes,
        environment=environment,
    )
    check_trials_can_run(inputs.hardware, what="shardwise ladder")
    inputs = inputs._replace(hardware=check_torch(inputs.hardware, environment))
    inputs = with_weights(inputs)
    data = prepare_data(inputs.request, on_progress=progress.line)
    stop = StopRequest()
    around = Climb(options.job, options.overrides, inputs, data, options.num_steps, progress, stop, environment)
    with stop.listening():
        results = climb(around, rungs or default_rungs(inputs.hardware))
    if results:
        _tell(options, inputs, results, console, progress)
    if stop.kind is not None:
        progress.line("stopped: the rungs above were not climbed")
        return stop_code(stop)
    if not any(result.is_climbed for result in results):
        raise EnvironmentFaultError(f"ladder: none of {len(results)} rungs could run")
    return ExitCode.DONE


def _tell(
    options: LadderOptions, inputs: PlanInputs, results: Sequence[RungResult], console: Console, progress: Console
) -> None:
    page = _page(options, inputs, results)
    rows = ladder_rows(results)
    if options.as_json:
        console.line(json.dumps(rows, indent=1))
    else:
        console.line()
        console.line(page_text(page, width=_WIDTH))
    written = []
    if options.csv is not None:
        written.append(_write(options.csv, ladder_csv(rows).encode()))
    if options.html is not None:
        from trainer.planning.page.html import pages_html

        written.append(_write(options.html, pages_html([page], title=page.title).encode()))
    for path in written:
        progress.line(f"wrote {path}")


def _page(options: LadderOptions, inputs: PlanInputs, results: Sequence[RungResult]) -> Page:
    job, shape = inputs.resolved.job, inputs.shape
    title = f"{inputs.resolved.name}: {shape.model_type}, {format_count(shape.num_parameters)} parameters"
    ran = next((result.candidate for result in results if result.candidate is not None), None)
    micro = "" if ran is None else f"micro batch {ran.micro_batch} x {ran.accumulation}, "
    common = (
        f"{machine_words(inputs.hardware)}. Every rung: {micro}rows of {job.train.seq_len} tokens, "
        f"{job.train.tokens_per_step} tokens a step, seed {job.train.seed}, {options.num_steps} steps; allocated "
        "bytes of one device."
    )
    if any(result.outcome is Outcome.RAN for result in results):
        common += " A change is against the rung before; an error is of the prediction."
    return ladder_page(title, results, common=common)


def _check_folders(options: LadderOptions) -> None:
    """InputError for a file that could not be written, before minutes are spent on what it is to hold."""
    for name, path in (("--csv", options.csv), ("--html", options.html)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InputError(f"{name} {path}: name a file in a folder that exists")


def _write(path: Path, content: bytes) -> Path:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise EnvironmentFaultError(f"{path}: cannot be written: {error.strerror}") from error
    return path
