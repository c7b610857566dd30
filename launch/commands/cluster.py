"""`shardwise submit` and `fetch`: from a job file on a login node to a job in Slurm's queue, and downloads before it.

A submission plans for the nodes of the partition, checks the files that the job reads and the room for its output, runs
`sbatch --test-only`, then makes the run directory and submits its script. If it is refused, nothing is left behind.

    D/  job.yaml  hardware.json  submission.json  train.sbatch                     one run, or a chain of jobs of it
    D/  submission.json  train.sbatch  point-1/ {job.yaml ...}  point-2/ ...       --sweep: one array

`fetch` downloads everything that a job needs, on a machine with a network and without a GPU. Compute nodes of many
clusters reach no hub, and many nodes at once should not load it. Downloads are in caches that login and compute nodes
share; afterwards `HF_HUB_OFFLINE=1 shardwise train JOB` works.
"""

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardwise.launch.inputs.data_files import source_bytes
from shardwise.launch.inputs.dataset_files import dataset_files
from shardwise.launch.inputs.hub import hub_cache
from shardwise.launch.inputs.model_files import read_model_config
from shardwise.launch.inputs.prepare_data import find_prepared, prepare_data
from shardwise.launch.inputs.trusted_code import has_kernel, load_kernel
from shardwise.launch.job import config_home, site_config
from shardwise.launch.job.layers import read_job_layers, render_resolved, sweep_points
from shardwise.launch.options import FetchOptions, SubmitOptions
from shardwise.launch.plan.gather import PlanInputs, read_inputs, with_weights
from shardwise.launch.probe.installed import installed_version
from shardwise.launch.run.disk_needs import (
    Need,
    check_room,
    check_room_of,
    data_need,
    data_sources,
    missing_for,
    model_need,
)
from shardwise.launch.run.submission import (
    Point,
    Target,
    batch_job,
    check_network,
    check_output_room,
    read_target,
    time_limit_s,
    time_text,
)
from shardwise.launch.rundir import paths as run_dirs
from shardwise.launch.terminal import Console
from shardwise.slurm.sbatch import BatchJob, render_script
from shardwise.slurm.submit import check_script, submit_script
from shardwise.trainer.planning.device import machine_text
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError
from shardwise.trainer.spec.job.sections import Job, without_url
from shardwise.trainer.spec.messages.submission import CHAIN_FILE, FILE_NAME, SCRIPT_NAME, Submission
from shardwise.trainer.spec.units import format_bytes, format_count

NUM_PREPARED_FILES = 50


def run_submit(
    options: SubmitOptions, console: Console, notes: Console, *, environment: Mapping[str, str] = os.environ
) -> ExitCode:
    """Submits, or prints the script; the jobs are printed to `console`, progress and remarks to `notes`."""
    points = sweep_points(options.sweeps)
    settings = [
        f"{path}={json.dumps(value, ensure_ascii=False)}"
        for path, value in options.slurm_settings.items()
        if value is not None
    ]
    target = read_target(
        options.job,
        [*options.overrides, *settings],
        points,
        spec=options.spec,
        environment=environment,
        needs_slurm=not options.dry_run,
    )
    run_dir = _run_dir(options, target)
    job = batch_job(target, run_dir, num_points=len(points) if options.sweeps else None, environment=environment)
    script = render_script(job)
    if options.dry_run:
        console.line(script.rstrip("\n"))
    _check(target, run_dir, options, notes)
    if target.found is not None:
        notes.line(check_script(script, job, target.found, environment=environment))
    if options.dry_run:
        return ExitCode.DONE
    job_ids = _submit(options, target, job, script, notes, environment)
    _report_submission(options, target, run_dir, job_ids, console)
    return ExitCode.DONE


def _run_dir(options: SubmitOptions, target: Target) -> Path:
    """The path of the run directory, absolute; it is not made."""
    if options.run_dir is None:
        base = run_dirs.output_base(target.resolved.job.output, target.resolved.name)
        return run_dirs.free_run_dir(base, now=datetime.now(UTC)).absolute()
    run_dirs.refuse_used(options.run_dir)
    return options.run_dir.absolute()


def _check(target: Target, run_dir: Path, options: SubmitOptions, notes: Console) -> None:
    check_output_room([point.plan for point in target.points], run_dir)
    lines = [check_network(point.inputs, point.plan, job_name=str(options.job)) for point in target.points]
    machines = target.points[0].plan.num_machines
    if machines < target.hardware.num_nodes:
        lines.append(f"the plan uses {machines} of {target.hardware.num_nodes} nodes; request fewer with --nodes")
    for line in dict.fromkeys(filter(None, lines)):
        notes.line(line)


def _submit(
    options: SubmitOptions,
    target: Target,
    job: BatchJob,
    script: str,
    notes: Console,
    environment: Mapping[str, str],
) -> tuple[str, ...]:
    """The ids of the jobs, in the order in which they run."""
    run_dir, was_there = Path(job.run_dir), Path(job.run_dir).exists()
    run_dirs.use_run_dir(run_dir)
    try:
        _write(target, job, script, ())
        first = submit_script(run_dir / SCRIPT_NAME, job, target.found, environment=environment)
    except BaseException:
        _remove(run_dir, was_there=was_there)
        raise
    job_ids = [first]
    try:
        while len(job_ids) < target.slurm.chain:
            job_ids.append(
                submit_script(run_dir / SCRIPT_NAME, job, target.found, after=job_ids[-1], environment=environment)
            )
    except (InputError, EnvironmentFaultError) as error:
        notes.line(f"Slurm accepted {len(job_ids)} of {target.slurm.chain} jobs: {error}")
    _write(target, job, None, tuple(job_ids))
    return tuple(job_ids)


def _write(target: Target, job: BatchJob, script: str | None, job_ids: Sequence[str]) -> None:
    """Writes the files of the run directory: with `script` all of them, else those that contain ids of jobs."""
    run_dir = Path(job.run_dir)
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    try:
        if script is not None:
            codec.write_bytes(run_dir / SCRIPT_NAME, script.encode())
        if len(job_ids) > 1:
            codec.write_bytes(run_dir / CHAIN_FILE, "".join(f"{job_id}\n" for job_id in job_ids).encode())
        if job.num_points is not None:
            codec.write(run_dir / FILE_NAME, _submission(target, target.points[0], job, now, job_ids, number=None))
        for number, point in enumerate(target.points, start=1):
            folder = run_dir if job.num_points is None else run_dir / f"point-{number}"
            folder.mkdir(exist_ok=True)
            ids = tuple(job_ids) if job.num_points is None else tuple(f"{each}_{number}" for each in job_ids)
            if script is not None:
                is_secret = without_url(point.inputs.resolved.job) != point.inputs.resolved.job
                content = render_resolved(point.inputs.resolved).encode()
                codec.write_bytes(folder / "job.yaml", content, mode=0o600 if is_secret else 0o666)
                codec.write(folder / "hardware.json", point.inputs.hardware)
            own = None if job.num_points is None else number
            codec.write(folder / FILE_NAME, _submission(target, point, job, now, ids, number=own))
    except OSError as error:
        raise EnvironmentFaultError(f"{run_dir}: cannot be written: {error.strerror}") from error


def _submission(
    target: Target, point: Point, job: BatchJob, now: str, job_ids: Sequence[str], *, number: int | None
) -> Submission:
    return Submission(
        hardware=point.inputs.hardware,
        submitted=now,
        script=f"{job.run_dir}/{SCRIPT_NAME}",
        partition=job.partition if target.found is None else target.found.partition.name,
        time_limit_s=job.time_limit_s,
        job_ids=tuple(job_ids),
        overrides=point.overrides,
        point=number,
    )


def _remove(run_dir: Path, *, was_there: bool) -> None:
    """Removes what was written; a folder that existed before stays, empty."""
    for entry in run_dir.iterdir() if was_there else ():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    if not was_there:
        shutil.rmtree(run_dir)


def _report_submission(
    options: SubmitOptions, target: Target, run_dir: Path, job_ids: Sequence[str], console: Console
) -> None:
    if options.as_json:
        console.json(_as_json(options, target, run_dir, job_ids), is_indented=False)
        return
    what = f"array {job_ids[0]} of {len(target.points)} points" if options.sweeps else f"job {' then '.join(job_ids)}"
    assert target.found is not None
    console.line(f"submitted {what} to partition {target.found.partition.name}: {machine_text(target.hardware)}")
    console.line(time_text(target))
    for number, point in enumerate(target.points, start=1):
        if point.overrides:
            console.line(f"  point {number}: {' '.join(point.overrides)}")
    console.line(f"run directory: {run_dir}")
    console.line("next:")
    for command in ("status", "logs", "cancel"):
        console.line(f"  shardwise {command} {shlex.quote(str(run_dir))}")


def _as_json(options: SubmitOptions, target: Target, run_dir: Path, job_ids: Sequence[str]) -> dict[str, Any]:
    def entry(number: int, point: Point) -> dict[str, Any]:
        return {
            "run_dir": str(run_dir / f"point-{number}"),
            "job_id": f"{job_ids[0]}_{number}",
            "overrides": list(point.overrides),
        }

    points = [entry(number, point) for number, point in enumerate(target.points, start=1)] if options.sweeps else []
    return {
        "run_dir": str(run_dir),
        "script": str(run_dir / SCRIPT_NAME),
        "job_ids": list(job_ids),
        "partition": None if target.found is None else target.found.partition.name,
        "nodes": target.hardware.num_nodes,
        "time_limit_s": time_limit_s(target),
        "predicted_hours": target.hours,
        **({"points": points} if points else {}),
    }


def run_fetch(options: FetchOptions, console: Console, *, environment: Mapping[str, str] = os.environ) -> ExitCode:
    """Downloads missing files and lists those that exist; EnvironmentFaultError if the hub or a disk prevents it."""
    resolved = read_job_layers(
        options.job,
        options.overrides,
        config_home=config_home(environment),
        site_config=site_config(environment),
    )
    named = resolved.folders.get("huggingface")
    hub_home = Path(named) if named else None
    needs = _needs(resolved.job, hub_home)
    check_room_of(needs)
    for need in needs:
        console.line(need.summary)
    for source in data_sources(resolved.job):
        dataset_files(source.source.source, source.part, cache=hub_cache(hub_home), setting=source.setting)
    inputs = with_weights(read_inputs(options.job, options.overrides, needs_costs=False, environment=environment))
    kernel = resolved.job.model.flash_kernel if installed_version("flash-attn") is None else None
    if kernel is not None:
        _fetch_kernel(kernel, console, environment)
    if options.prepare:
        _prepare(inputs, console)
    missing = missing_for(inputs, kernel=kernel, environment=environment)
    if missing:
        raise EnvironmentFaultError(f"still missing after everything was fetched: {' and '.join(missing)}")
    fetched = sum(need.num_bytes for need in needs)
    console.line(f"fetched {format_bytes(fetched)}" if fetched else "nothing had to be fetched")
    job = shlex.join([str(options.job), *options.overrides])
    console.line(f"without a network: HF_HUB_OFFLINE=1 shardwise train {job}")
    return ExitCode.DONE


def _needs(job: Job, hub_home: Path | None) -> list[Need]:
    model = model_need(job, read_model_config(job, cache_home=hub_home), hub_home)
    return [*([] if model is None else [model]), *(data_need(source, hub_home) for source in data_sources(job))]


def _fetch_kernel(kernel: str, console: Console, environment: Mapping[str, str]) -> None:
    """A build that only a GPU can load counts as fetched: the job loads it before its ranks start."""
    was_here = has_kernel(kernel, environment)
    problem = load_kernel(kernel, console.line)
    if not has_kernel(kernel, environment):
        raise EnvironmentFaultError(problem or f"{kernel}: the cache does not contain it")
    console.line(f"the kernel {kernel}: {'here already' if was_here else 'fetched'}")
    if problem is not None:
        console.line(f"  it was not loaded here, the job does that: {problem.splitlines()[0].rstrip(';')}")


def _prepare(inputs: PlanInputs, console: Console) -> None:
    cache = Path(inputs.request.cache_root)
    prepared = find_prepared(inputs.request)
    if prepared is None:
        check_room(
            cache, num_bytes=source_bytes(inputs.request), num_files=NUM_PREPARED_FILES, what="the prepared data"
        )
    profile = prepare_data(inputs.request, on_progress=console.line)
    state = "prepared now" if prepared is None else "here already"
    console.line(f"the prepared data: {state}, {format_count(profile.num_tokens)} tokens in {profile.cache_dir}")
