"""`shardwise ladder` and `profile`: short real runs that measure techniques, or the parts of a step.

`ladder` is an ablation: it switches techniques on one after the other and shows the savings of each on this machine as
a table; `--csv` and `--html` write the same figures to files.

A profile measures the first steps as in any run; the last step runs under torch's profiler, whose files are in
`profile/` of the run directory. With `--time` the steps are only timed, and no file is written.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from msgspec.structs import replace

from shardwise.launch.attempt.supervisor import StopRequest
from shardwise.launch.options import LadderOptions, ProfileOptions
from shardwise.launch.plan.gather import PlanInputs, plan_inputs, read_inputs
from shardwise.launch.run.attempts import stop_code
from shardwise.launch.run.ladder import (
    Ablation,
    Outcome,
    StepResult,
    default_steps,
    ladder_csv,
    ladder_page,
    ladder_rows,
    parse_steps,
    run_ablation,
)
from shardwise.launch.run.trials import check_trials_can_run, ready_inputs, run_short, scratch_folder, short_plan
from shardwise.launch.rundir import paths as run_dirs
from shardwise.launch.rundir.lock import locked
from shardwise.launch.rundir.metrics import read_steps
from shardwise.launch.show.report import profile_json, profile_page
from shardwise.launch.terminal import WIDEST, Console, text_width
from shardwise.trainer.planning.device import machine_text
from shardwise.trainer.planning.page.content import Page, page_text
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError
from shardwise.trainer.spec.job.kinds import Every
from shardwise.trainer.spec.plan import FIGURES_FILE, PROFILE_FOLDER, Plan, ProfileFigures, ProfileRequest
from shardwise.trainer.spec.report import Report
from shardwise.trainer.spec.units import format_count

# As a rank counts them: two that allocate and warm up, one whose memory is measured, and the three that are timed.
LEAST_LADDER_STEPS = 3
# As a rank counts them: two that allocate and warm up, one whose memory is measured, then those that are timed, and
# the one that is profiled.
LEAST_PROFILED_STEPS = 5
_UNTIMED_STEPS = 3


def run_ladder(
    options: LadderOptions, console: Console, progress: Console, *, environment: Mapping[str, str] = os.environ
) -> ExitCode:
    """Runs and shows the ablation; every fault of the input is reported before its first step."""
    if options.num_steps < LEAST_LADDER_STEPS:
        raise InputError(f"--steps {options.num_steps}: the third step is the first that is measured; give 3 or more")
    steps = None if options.rungs is None else parse_steps(options.rungs)
    _check_folders(options)
    inputs = read_inputs(
        options.job,
        options.overrides,
        gpus=options.gpus,
        vram_cap_bytes=options.vram_cap_bytes,
        environment=environment,
    )
    check_trials_can_run(inputs.hardware, what="shardwise ladder")
    inputs, data = ready_inputs(inputs, console=progress, environment=environment)
    stop = StopRequest()
    ablation = Ablation(options.job, options.overrides, inputs, data, options.num_steps, progress, stop, environment)
    with stop.listening():
        results = run_ablation(ablation, steps or default_steps(inputs.hardware))
    if results:
        _show_results(options, inputs, results, console, progress)
    if stop.kind is not None:
        progress.line("stopped: the remaining steps did not run")
        return stop_code(stop)
    if not any(result.is_included for result in results):
        raise EnvironmentFaultError(f"ladder: none of {len(results)} steps could run")
    return ExitCode.DONE


def _show_results(
    options: LadderOptions, inputs: PlanInputs, results: Sequence[StepResult], console: Console, progress: Console
) -> None:
    page = _page(options, inputs, results)
    rows = ladder_rows(results)
    if options.as_json:
        console.json(rows)
    else:
        console.line()
        console.line(page_text(page, width=text_width(console)))
    written = []
    if options.csv is not None:
        written.append(_write(options.csv, ladder_csv(rows).encode()))
    if options.html is not None:
        from shardwise.trainer.planning.page.html import pages_html

        written.append(_write(options.html, pages_html([page], title=page.title).encode()))
    for path in written:
        progress.line(f"wrote {path}")


def _page(options: LadderOptions, inputs: PlanInputs, results: Sequence[StepResult]) -> Page:
    job, shape = inputs.resolved.job, inputs.shape
    title = f"{inputs.resolved.name}: {shape.model_type}, {format_count(shape.num_parameters)} parameters"
    ran = next((result.candidate for result in results if result.candidate is not None), None)
    micro = (
        ""
        if ran is None
        else f"micro batch {ran.micro_batch} x {ran.accumulation}, {ran.num_ranks} "
        f"rank{'s' if ran.num_ranks > 1 else ''}, "
    )
    common = (
        f"{machine_text(inputs.hardware)}. In every step: {micro}rows of {job.train.seq_len} tokens, "
        f"seed {job.train.seed}, {options.num_steps} optimizer steps; "
        "allocated bytes of one device."
    )
    if any(result.outcome is Outcome.RAN for result in results):
        common += " A change is relative to the step before, a difference to the prediction."
    return ladder_page(title, results, common=common)


def _check_folders(options: LadderOptions) -> None:
    """InputError for a file that could not be written, before minutes are spent on its content."""
    for name, path in (("--csv", options.csv), ("--html", options.html)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InputError(f"{name} {path}: name a file in a folder that exists")


def _write(path: Path, content: bytes) -> Path:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise EnvironmentFaultError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def run_profile(
    options: ProfileOptions, console: Console, progress: Console, *, environment: Mapping[str, str] = os.environ
) -> ExitCode:
    """Runs the steps and reports; every fault of the input is reported before they start."""
    if options.num_steps < LEAST_PROFILED_STEPS:
        raise InputError(
            f"--steps {options.num_steps}: three warm up and one is profiled; give {LEAST_PROFILED_STEPS} or more"
        )
    inputs = read_inputs(
        options.job,
        options.overrides,
        gpus=options.gpus,
        vram_cap_bytes=options.vram_cap_bytes,
        environment=environment,
    )
    check_trials_can_run(inputs.hardware, what="shardwise profile")
    if options.out is not None:
        run_dirs.refuse_used(options.out)
    inputs, data = ready_inputs(inputs, console=progress, environment=environment)
    plan = plan_inputs(inputs, data, environment=environment)
    stop = StopRequest()
    with stop.listening(), _place(options, inputs, plan) as run_dir:
        return _profile(options, inputs, plan, run_dir, stop, console, progress, environment)


@contextmanager
def _place(options: ProfileOptions, inputs: PlanInputs, plan: Plan) -> Iterator[Path]:
    """The run directory; with --time alone a temporary one, unless --out names one."""
    if options.only_time and options.out is None:
        with scratch_folder(inputs.cache / PROFILE_FOLDER) as scratch:
            run_dir = scratch / "run"
            run_dir.mkdir()
            yield run_dir
            shutil.rmtree(run_dir)
        return
    base = run_dirs.output_base(plan.job.output, plan.name)
    named = base.with_name(f"{base.name}-{PROFILE_FOLDER}")
    now = datetime.now(UTC)
    run_dir = run_dirs.make_run_dir(named, now=now) if options.out is None else run_dirs.use_run_dir(options.out)
    with locked(run_dir):
        yield run_dir


def _profile(
    options: ProfileOptions,
    inputs: PlanInputs,
    plan: Plan,
    run_dir: Path,
    stop: StopRequest,
    console: Console,
    progress: Console,
    environment: Mapping[str, str],
) -> ExitCode:
    few = short_plan(plan, plan.chosen, num_steps=options.num_steps)
    every_step = replace(few.job, log=replace(few.job.log, every=Every(steps=1)))  # each is read back
    few = replace(few, job=every_step, profile=None if options.only_time else ProfileRequest())
    codec.write(run_dir / "plan.json", few)
    progress.line(f"{options.num_steps} steps of {plan.chosen.strategy.name} ...")
    run = run_short(few, run_dir, cache=inputs.cache, console=progress, stop=stop, environment=environment)
    if stop.kind is not None:
        progress.line("stopped: nothing was measured")
        return stop_code(stop)
    if run.report is None:
        logs = "add --out DIR to keep the logs" if options.only_time and options.out is None else f"logs: {run_dir}"
        raise EnvironmentFaultError(f"profile: the steps could not run: {run.problem}\n{logs}")
    if run.ran_out_of_memory:
        progress.line(f"the steps ran out of memory: {run.report.error}")
        return ExitCode.OUT_OF_MEMORY
    _show_profile(options, plan, run.report, run_dir, console)
    return ExitCode.DONE


def _show_profile(options: ProfileOptions, plan: Plan, report: Report, run_dir: Path, console: Console) -> None:
    figures = None
    if not options.only_time:
        figures = codec.read(run_dir / PROFILE_FOLDER / FIGURES_FILE, ProfileFigures)
    steps_s = timed_steps(run_dir, num_profiled=0 if figures is None else 1)
    page = profile_page(plan, report, figures, steps_s)
    if options.as_json:
        console.json({"run_dir": str(run_dir), **profile_json(plan, report, figures, steps_s)})
        return
    console.line(page_text(page, width=text_width(console)))
    if figures is not None:
        text = page_text(page, width=WIDEST)
        codec.write_bytes(run_dir / PROFILE_FOLDER / "profile.txt", f"{text}\n".encode())
        console.line(f"\nin {run_dir}")


def timed_steps(run_dir: Path, *, num_profiled: int) -> list[float]:
    """Seconds of the steps that were neither warming up nor profiled, from metrics.jsonl."""
    steps = read_steps(run_dir / "metrics.jsonl").steps
    timed = steps[_UNTIMED_STEPS : len(steps) - num_profiled]
    return [step.step_s for step in timed if step.step_s is not None]
