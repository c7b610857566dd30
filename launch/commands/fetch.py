"""`shardwise fetch`: everything a job needs from a network, on a machine that has one and needs no GPU.

Compute nodes of many clusters reach no hub, and sixty-four nodes that do should not ask it at once. What is fetched
lies in caches that login and compute nodes share; afterwards `HF_HUB_OFFLINE=1 shardwise train JOB` works.
"""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from launch.inputs.data_files import source_bytes
from launch.inputs.dataset_hub import dataset_files
from launch.inputs.hub import hub_cache
from launch.inputs.model_files import read_model_config
from launch.inputs.prepare_data import find_prepared, prepare_data
from launch.inputs.trusted_code import has_kernel, load_kernel
from launch.job import folders
from launch.job.layers import read_job_layers
from launch.options import FetchOptions
from launch.plan.gather import PlanInputs, read_inputs, with_weights
from launch.probe.installed import installed_version
from launch.run.fetch_needs import Need, check_room, check_room_of, data_need, data_sources, missing_for, model_need
from launch.terminal import Console
from trainer.spec.errors import EnvironmentFaultError, ExitCode
from trainer.spec.job.sections import Job
from trainer.spec.units import format_bytes, format_count

NUM_PREPARED_FILES = 50


def run_fetch(options: FetchOptions, console: Console, *, environment: Mapping[str, str] = os.environ) -> ExitCode:
    """Fetches what is missing and says what was there; EnvironmentFaultError where the hub or a disk is in the way."""
    resolved = read_job_layers(
        options.job,
        options.overrides,
        config_home=folders.config_home(environment),
        site_config=folders.site_config(environment),
    )
    named = resolved.folders.get("huggingface")
    hub_home = Path(named) if named else None
    needs = _needs(resolved.job, hub_home)
    check_room_of(needs)
    for need in needs:
        console.line(need.words)
    for source in data_sources(resolved.job):
        dataset_files(source.source.source, source.part, cache=hub_cache(hub_home), setting=source.setting)
    inputs = with_weights(read_inputs(options.job, options.overrides, describes_models=True, environment=environment))
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
        raise EnvironmentFaultError(problem or f"{kernel}: the cache has it not")
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
