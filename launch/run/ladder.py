"""The ablation of `shardwise ladder`: each step switches on one more technique and trains for a few optimizer steps.

A step is written as in a job file: `bf16-mixed` is `pin.precision=bf16-mixed`, `lora` is `train.method=lora`, `compile`
is `pin.compile=true`. A value that several settings have (`eager`, `none`) is written with its setting, `loss=eager`,
and so is a setting without such a value: `train.lora.rank=8`. A `+` joins settings of one step.

Micro batch, global batch, rows and seed are the same in every step. A step that is predicted not to fit runs
nevertheless, which tests the prediction: it is planned for a machine without limits and run under those of this one,
on a CPU a data limit, so that the process ends and not the machine. The change of a step is relative to the last step
before it that finished.
"""

import csv
import io
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from shardwise.launch.attempt.supervisor import StopRequest
from shardwise.launch.job import config_home, site_config
from shardwise.launch.job.layers import COMMAND_LINE, read_job_layers
from shardwise.launch.plan.gather import PlanInputs, plan_inputs, with_job
from shardwise.launch.run.trials import ShortRun, run_short, scratch_folder, short_plan
from shardwise.launch.terminal import Console
from shardwise.trainer.planning.device import device_of
from shardwise.trainer.planning.page.content import Page, PairedBars, Section, Sentence, Table, Unit
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import InputError, NothingFitsError, close_matches
from shardwise.trainer.spec.hardware import DeviceKind, Hardware
from shardwise.trainer.spec.job.sections import Job, Limits
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.report import Figures, Report, relative_difference
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision
from shardwise.trainer.spec.units import format_bytes, format_seconds
from shardwise.trainer.spec.value import Value

METHOD = "train.method"
BASELINE = {
    "pin.precision": "fp32",
    "pin.checkpointing": "none",
    "pin.attention": "eager",
    "pin.loss": "eager",
    "pin.optimizer": "adamw",
    "pin.offload": "none",
    METHOD: "full",
}
# A value that two settings have belongs to the first in this order: `full` is of checkpointing, as the ablation starts
# from the method of that name anyway.
_VALUES: tuple[tuple[str, type[StrEnum]], ...] = (
    ("pin.precision", Precision),
    ("pin.checkpointing", Checkpointing),
    ("pin.attention", Attention),
    ("pin.loss", LossHead),
    ("pin.optimizer", Optimizer),
    ("pin.sharding", Sharding),
    ("pin.offload", Offload),
    (METHOD, Method),
)
_SWITCHES = ("compile", "activation_offload", "optimizer_in_backward")
_AMBIGUOUS = ("eager", "none")
_SECTIONS = ("pin.", METHOD, "train.lora.", "train.galore.")  # settings that do not change batch, data or seed
PHASES = ("forward", "backward", "optimizer")
_HEADER = ("technique", "peak", "predicted", "difference", "change", "step", "predicted", "change")
_RIGHT = tuple(range(1, len(_HEADER)))
_AMPLE_BYTES = 2**50  # of a machine on which every plan fits
_AMPLE_HOURS = 1e6


class Outcome(StrEnum):
    """Outcome of a step."""

    RAN = "ran"
    OUT_OF_MEMORY = "out of memory"
    SKIPPED = "skipped"  # not available on this device
    FAILED = "failed"


class Ablation(NamedTuple):
    """Values that all steps share."""

    job_path: Path
    overrides: Sequence[str]
    inputs: PlanInputs
    data: DataProfile
    num_steps: int
    console: Console
    stop: StopRequest
    environment: Mapping[str, str]


class AblationStep(Value, frozen=True, kw_only=True):
    """One more technique: its name and its settings."""

    name: str
    settings: dict[str, str]  # by their paths in the job file


class StepResult(Value, frozen=True, kw_only=True):
    """The result of one step; `report` is None if it neither ran nor ran out of memory."""

    step: AblationStep
    outcome: Outcome
    candidate: Candidate | None = None
    report: Report | None = None
    reason: str | None = None

    @property
    def is_included(self) -> bool:
        """True if the later steps include it."""
        return self.outcome in (Outcome.RAN, Outcome.OUT_OF_MEMORY)


def run_ablation(ablation: Ablation, steps: Sequence[AblationStep]) -> tuple[StepResult, ...]:
    """Runs the steps in order; ends early after a stop request."""
    results: list[StepResult] = []
    settings = common_settings(ablation)
    with scratch_folder(ablation.inputs.cache / "ladder") as scratch:
        for number, step in enumerate(steps, start=1):
            ablation.console.line(f"step {number} of {len(steps)}: {step.name} ...")
            run_dir = scratch / str(number)
            result = _run_step(ablation, step, settings | step.settings, run_dir)
            if ablation.stop.kind is not None:
                shutil.rmtree(run_dir, ignore_errors=True)
                break
            ablation.console.line(f"step {number} of {len(steps)}: {step.name}: {_outcome_text(result)}")
            results.append(result)
            if result.is_included:
                settings |= step.settings
            if result.outcome is not Outcome.FAILED:
                shutil.rmtree(run_dir, ignore_errors=True)
    return tuple(results)


def common_settings(ablation: Ablation) -> dict[str, str]:
    """Overrides of every step: no checkpoints, and the micro batch and sharding of the job's own plan."""
    job, settings = ablation.inputs.resolved.job, dict(BASELINE)
    if job.pin.offload is not None:
        del settings["pin.offload"]
    try:
        chosen = plan_inputs(ablation.inputs, ablation.data, environment=ablation.environment).chosen
    except NothingFitsError:
        return settings | {"pin.micro_batch": str(job.pin.micro_batch or 1)}
    settings["pin.micro_batch"] = str(chosen.micro_batch)
    if chosen.num_ranks > 1:
        settings["pin.sharding"] = str(chosen.strategy.sharding)
    return settings


def step_plan(ablation: Ablation, settings: dict[str, str]) -> Plan:
    """The plan with these settings, whether it fits or not; InputError and NothingFitsError where there is none."""
    inputs = with_job(ablation.inputs, _job_of(ablation, settings))
    return plan_regardless(inputs, ablation.data, environment=ablation.environment)


def _job_of(ablation: Ablation, settings: dict[str, str]) -> Job:
    """The job with these settings, read as from the command line; neither time nor money limits a few steps.

    A job with adapters on initialized weights is refused; their memory and speed are measured nevertheless.
    """
    method = settings[METHOD]
    is_on_initial_weights = (
        method in (Method.LORA, Method.QLORA) and ablation.inputs.resolved.job.model.config is not None
    )
    read = settings | {METHOD: Method.FULL.value} if is_on_initial_weights else settings
    job = read_job_layers(
        ablation.job_path,
        [*ablation.overrides, *(f"{path}={value}" for path, value in read.items())],
        config_home=config_home(ablation.environment),
        site_config=site_config(ablation.environment),
    ).job
    train = replace(job.train, method=Method(method)) if is_on_initial_weights else job.train
    return replace(job, train=train, limits=without_limits(job.limits))


def _run_step(ablation: Ablation, step: AblationStep, settings: dict[str, str], run_dir: Path) -> StepResult:
    try:
        plan = step_plan(ablation, settings)
    except (InputError, NothingFitsError) as error:
        reason = " ".join(str(error).replace(f"{COMMAND_LINE}: ", "").split())
        return StepResult(step=step, outcome=Outcome.SKIPPED, reason=reason)
    run_dir.mkdir()
    run = run_short(
        short_plan(plan, plan.chosen, num_steps=ablation.num_steps),
        run_dir,
        cache=ablation.inputs.cache,
        console=ablation.console,
        stop=ablation.stop,
        environment=ablation.environment,
    )
    return _result_of(step, plan.chosen, run, run_dir)


def _result_of(step: AblationStep, candidate: Candidate, run: ShortRun, run_dir: Path) -> StepResult:
    if run.report is None:
        reason = f"{run.problem} (logs: {run_dir})"
        return StepResult(step=step, outcome=Outcome.FAILED, candidate=candidate, reason=reason)
    outcome = Outcome.OUT_OF_MEMORY if run.ran_out_of_memory else Outcome.RAN
    return StepResult(step=step, outcome=outcome, candidate=candidate, report=run.report)


def _outcome_text(result: StepResult) -> str:
    """The outcome in one line."""
    if result.report is None or result.candidate is None:
        return f"{result.outcome}: {result.reason}"
    memory = result.candidate.memory
    if result.outcome is Outcome.OUT_OF_MEMORY:
        return (
            f"ran out of memory (exit code {result.report.exit_code}); predicted to need "
            f"{format_bytes(memory.need_bytes)} of {format_bytes(memory.usable_bytes)}"
        )
    measured = result.report.measured
    peak, step = measured.memory.peak_allocated_bytes, measured.speed.step_s
    text = f"peak {format_bytes(peak or 0)}, predicted {format_bytes(memory.peak_allocated_bytes)}"
    return text if step is None else f"{text}; {format_seconds(step)} a step"


def parse_steps(text: str) -> tuple[AblationStep, ...]:
    """The steps that `--rungs a,b,c` names; InputError for a name that is not the value of a setting."""
    names = [name.strip() for name in text.split(",")]
    return tuple(AblationStep(name=name, settings=dict(map(_setting_of, name.split("+")))) for name in names)


def default_steps(hardware: Hardware) -> tuple[AblationStep, ...]:
    """The default order, in the 16-bit precision that the cards support."""
    capabilities = [gpu.compute_capability for gpu in hardware.gpus if gpu.compute_capability is not None]
    half = Precision.FP16_MIXED if capabilities and min(capabilities) < (8, 0) else Precision.BF16_MIXED
    return parse_steps(f"fp32,{half},full,sdpa,flash,chunked,adamw_8bit,lora,qlora")


def _setting_of(word: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in word.partition("="))
    if equals:
        return _named(name), value
    if name in _AMBIGUOUS:
        examples = " or ".join(f"{key.removeprefix('pin.')}={name}" for key, kind in _VALUES if name in [*kind])
        raise InputError(f"--rungs: {name} could be of several settings; write {examples}")
    if name in _SWITCHES:
        return f"pin.{name}", "true"
    for key, kind in _VALUES:
        if name in [*kind]:
            return key, name
    meant = close_matches(name, [*(value for _, kind in _VALUES for value in kind), *_SWITCHES])
    hint = f"did you mean {meant[0]}?" if meant else "a step is a value of a pin, such as bf16-mixed, full, chunked"
    raise InputError(f"--rungs: {name!r} is not a technique; {hint}")


def _named(name: str) -> str:
    """The path of a setting that is named, with or without its section."""
    pins = [key for key, _ in _VALUES]
    path = name if "." in name else next((key for key in pins if key.endswith(f".{name}")), f"pin.{name}")
    if not path.startswith(_SECTIONS):
        raise InputError(f"--rungs: {name} cannot be a step: batch, data and seed are the same in all of them")
    return path


def ladder_rows(results: Sequence[StepResult]) -> list[dict[str, Any]]:
    """One mapping for each step, with plain figures: bytes, seconds, shares; None if there is no figure."""
    rows: list[dict[str, Any]] = []
    previous: dict[str, Any] = {}
    for result in results:
        row = _row(result, previous)
        rows.append(row)
        previous = row if result.outcome is Outcome.RAN else previous
    return rows


def _row(result: StepResult, previous: dict[str, Any]) -> dict[str, Any]:
    measured = Figures() if result.report is None else result.report.measured
    is_whole = result.outcome is Outcome.RAN
    peak = measured.memory.peak_allocated_bytes if is_whole else None
    step_s = measured.speed.step_s if is_whole else None
    memory = None if result.candidate is None else result.candidate.memory
    speed = None if result.candidate is None else result.candidate.speed
    predicted = None if memory is None else memory.peak_allocated_bytes
    predicted_s = None if speed is None else speed.step_s
    return {
        "rung": result.step.name,
        "outcome": str(result.outcome),
        "peak_bytes": peak,
        "predicted_peak_bytes": predicted,
        "peak_difference": relative_difference(predicted, peak),
        "peak_change": _change(peak, previous.get("peak_bytes")),
        "step_s": step_s,
        "predicted_step_s": predicted_s,
        "step_change": _change(step_s, previous.get("step_s")),
        **{f"{phase}_peak_bytes": measured.memory.peaks.get(phase) for phase in PHASES},
        "steady_bytes": measured.memory.steady_allocated_bytes,
        "need_bytes": None if memory is None else memory.need_bytes,
        "limit_bytes": None if memory is None else memory.usable_bytes,
        "exit_code": None if result.report is None else result.report.exit_code,
        "strategy": None if result.candidate is None else result.candidate.strategy.name,
        "micro_batch": None if result.candidate is None else result.candidate.micro_batch,
        "settings": " ".join(f"{path}={value}" for path, value in result.step.settings.items()),
        "reason": result.reason,
    }


def ladder_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as CSV with a header; unknown figures are empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(rows[0]) if rows else ["rung"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def ladder_page(title: str, results: Sequence[StepResult], *, common: str) -> Page:
    """The table and charts for a terminal and for HTML; `common` states what is the same in every step."""
    rows = ladder_rows(results)
    seen = [row for row in rows if row["peak_bytes"] is not None or row["outcome"] == Outcome.OUT_OF_MEMORY]
    blocks = (
        Sentence(text=common),
        Table(rows=(_HEADER, *map(_cells, seen)), right=_RIGHT),
        PairedBars(caption="Peak memory", rows=_pairs(seen, "predicted_peak_bytes", "peak_bytes"), unit=Unit.BYTES),
        PairedBars(caption="Step", rows=_pairs(seen, "predicted_step_s", "step_s"), unit=Unit.SECONDS),
    )
    sections = [Section(title="Each technique on top of those above it", blocks=blocks)]
    phases = [row for row in seen if any(row[f"{phase}_peak_bytes"] for phase in PHASES)]
    if phases:
        sections.append(Section(title="Peak by phase of the step", blocks=(_phase_table(phases),)))
    others = tuple(_remarks(results, rows))
    if others:
        sections.append(Section(title="Not measured", blocks=others))
    return Page(title=title, sections=tuple(sections))


def _pairs(rows: Sequence[dict[str, Any]], predicted: str, measured: str) -> tuple[tuple[str, Any, Any], ...]:
    return tuple((row["rung"], row[predicted], row[measured]) for row in rows)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    is_whole = row["outcome"] == Outcome.RAN
    return (
        row["rung"],
        _bytes(row["peak_bytes"]) if is_whole else "out of memory",
        _bytes(row["predicted_peak_bytes"]),
        _percent(row["peak_difference"]),
        _percent(row["peak_change"]),
        _seconds(row["step_s"]),
        _seconds(row["predicted_step_s"]),
        _percent(row["step_change"]),
    )


def _phase_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = (*(f"{phase}_peak_bytes" for phase in PHASES), "steady_bytes")
    cells = [(row["rung"], *(_bytes(row[column]) for column in columns)) for row in rows]
    return Table(rows=(("technique", *PHASES, "between steps"), *cells), right=(1, 2, 3, 4))


def _remarks(results: Sequence[StepResult], rows: Sequence[dict[str, Any]]) -> Iterator[Sentence]:
    """Remarks that do not fit the table."""
    for result, row in zip(results, rows, strict=True):
        if result.outcome is Outcome.OUT_OF_MEMORY:
            yield Sentence(
                text=f"{row['rung']}: ran out of memory, exit code {row['exit_code']}; predicted to need "
                f"{format_bytes(row['need_bytes'])}, {format_bytes(row['limit_bytes'])} are usable"
            )
        elif result.outcome is not Outcome.RAN:
            yield Sentence(text=f"{row['rung']}: {result.outcome}: {result.reason}")


def _change(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base - 1


def _bytes(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"


def plan_regardless(inputs: PlanInputs, data: DataProfile, *, environment: Mapping[str, str] = os.environ) -> Plan:
    """The plan of these inputs, whether it fits or not; InputError and NothingFitsError if there is none."""
    try:
        return plan_inputs(inputs, data, environment=environment)
    except NothingFitsError:
        ample = inputs._replace(hardware=_ample(inputs.hardware))
        return held_to(plan_inputs(ample, data, environment=environment), inputs.hardware)


def held_to(plan: Plan, hardware: Hardware) -> Plan:
    """A plan that was made without a memory limit, with the limit of `hardware`."""
    usable = device_of(hardware).usable_bytes
    chosen = replace(plan.chosen, memory=replace(plan.chosen.memory, usable_bytes=usable))
    if plan.device_kind is DeviceKind.CPU:
        hardware = replace(hardware, vram_cap_bytes=usable)
    return replace(plan, hardware=hardware, candidates=(chosen,))


def without_limits(limits: Limits) -> Limits:
    """Limits without time and money, which a few steps do not need."""
    return replace(limits, hours=_AMPLE_HOURS, cost=None)


def _ample(hardware: Hardware) -> Hardware:
    gpus = tuple(
        replace(gpu, memory_bytes=_AMPLE_BYTES, usable_bytes=_AMPLE_BYTES, free_bytes=None) for gpu in hardware.gpus
    )
    host = replace(hardware.host, ram_bytes=_AMPLE_BYTES, ram_available_bytes=None, usable_ram_bytes=None)
    return replace(hardware, gpus=gpus, host=host, vram_cap_bytes=None)
