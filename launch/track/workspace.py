"""`shardwise workspace`: saves the view "shardwise: memory and throughput" in a wandb project.

To change the view, edit `SECTIONS`. The package wandb-workspaces writes it in a process of its own (`wandb.save_view`).
"""

import os
from collections.abc import Mapping

from shardwise.launch.options import WorkspaceOptions
from shardwise.launch.probe.installed import installed_version
from shardwise.launch.terminal import Console
from shardwise.launch.track.start import login_problem, run_wandb_command
from shardwise.launch.track.tracker import PREDICTED, ViewRequest, series_name
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode
from shardwise.trainer.spec.job.sections import LogJob
from shardwise.trainer.spec.packages import extra_line

NAME = "shardwise: memory and throughput"
_TIMEOUT_S = 120.0
_PREDICTED = {  # fields whose prediction is shown as well
    "memory_peak_bytes", "memory_allocated_bytes", "memory_reserved_bytes", "memory_device_bytes", "host_rss_bytes",
    "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "step_s",
}  # fmt: skip
SECTIONS = {  # charts by their heading, each with its fields of metrics.jsonl
    "memory": {
        "peak memory of a step, bytes": ("memory_peak_bytes",),
        "memory between steps, bytes": ("memory_allocated_bytes",),
        "memory that torch reserves, bytes": ("memory_reserved_bytes",),
        "memory of the whole card, bytes": ("memory_device_bytes",),
        "peak by phase, bytes": tuple(f"memory_peak_{phase}_bytes" for phase in ("forward", "backward", "optimizer")),
        "host memory, bytes": ("host_rss_bytes", "host_pinned_bytes"),
    },
    "throughput": {
        "tokens a second": ("tokens_per_s",),
        "tokens a second and device": ("tokens_per_s_per_gpu",),
        "model FLOPs utilisation": ("mfu",),
        "seconds of a step": ("step_s",),
        "where a step's seconds go": ("data_s", "forward_s", "backward_s", "optimizer_s", "wait_s", "checkpoint_s"),
        "utilisation of rank 0's GPU": ("gpu_utilization",),
    },
    "training": {
        "loss": ("loss", "eval_loss"),
        "learning rate": ("lr",),
        "norm of the gradient": ("grad_norm",),
        "attempt": ("attempt",),
    },
}


def series_of(fields: tuple[str, ...]) -> tuple[str, ...]:
    """The series of a chart, predicted ones last."""
    measured = tuple(map(series_name, fields))
    return (*measured, *(f"{series_name(field)}{PREDICTED}" for field in fields if field in _PREDICTED))


def run_workspace(
    options: WorkspaceOptions, console: Console, *, environment: Mapping[str, str] = os.environ
) -> ExitCode:
    """Saves the view and prints its URL; EnvironmentFaultError if wandb does not accept it."""
    if installed_version("wandb-workspaces") is None:
        raise EnvironmentFaultError(f"shardwise workspace: needs wandb-workspaces: {extra_line('workspace')}")
    problem = login_problem(environment)
    if problem is not None:
        raise EnvironmentFaultError(f"shardwise workspace: {problem}")
    request = ViewRequest(
        entity=options.entity or environment.get("WANDB_ENTITY"),
        project=options.project or LogJob().project,
        title=NAME,
        sections={
            heading: {title: series_of(fields) for title, fields in charts.items()}
            for heading, charts in SECTIONS.items()
        },
    )
    result = run_wandb_command("save-view", request, environment, timeout_s=_TIMEOUT_S)
    if result.url is None:
        raise EnvironmentFaultError(
            f"shardwise workspace: {result.problem};\n"
            "a project exists once a run was sent to it; name another with --project and --entity"
        )
    console.line(f"saved as {NAME!r}: {result.url}")
    return ExitCode.DONE
