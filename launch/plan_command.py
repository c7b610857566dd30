"""`shardwise plan`: for this machine, or for one or several that are not here."""

from collections.abc import Sequence
from pathlib import Path

from launch.console import Console
from launch.plan_job import plan_inputs, profile_data, read_inputs
from trainer.planning.explain import compare_plans, explain_plan
from trainer.planning.planner import take_candidate
from trainer.spec import codec
from trainer.spec.errors import ExitCode, NothingFitsError
from trainer.spec.plan import Plan


def run_plan(
    job: Path,
    overrides: Sequence[str],
    *,
    gpus: tuple[int, ...] | None,
    vram_cap_bytes: int | None,
    specs: Sequence[str],
    take: int,
    top: int,
    as_json: bool,
    console: Console,
) -> ExitCode:
    """Prints one explained plan, or several compared; with `as_json` one JSON plan a machine."""
    answers: list[tuple[str, Plan | NothingFitsError]] = []
    machines: Sequence[str | None] = specs or [None]
    for spec in machines:
        inputs = read_inputs(job, overrides, gpus=gpus, vram_cap_bytes=vram_cap_bytes, hardware_spec=spec)
        try:
            plan: Plan | NothingFitsError = take_candidate(plan_inputs(inputs, profile_data(inputs)), take)
        except NothingFitsError as error:
            if len(specs) < 2:
                raise
            plan = error
        answers.append((spec or "this machine", plan))
    for _, answer in answers:
        if isinstance(answer, Plan):
            console.line(codec.encode(answer).decode().rstrip() if as_json else explain_plan(answer, top=top))
    if len(answers) > 1 and not as_json:
        console.line()
        console.line(compare_plans(answers))
    fitting = [answer for _, answer in answers if isinstance(answer, Plan)]
    return ExitCode.DONE if fitting else ExitCode.NOTHING_FITS
