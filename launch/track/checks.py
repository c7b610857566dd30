"""What a job's sinks need, asked before anything is started: packages, a login, a command that is there.

The login is asked for in a process of its own, so that wandb is loaded nowhere else. No key is read here, let alone
shown.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from launch.probe.installed import installed_version
from launch.track.notify import NotifyError, url_in
from launch.track.wandb.mode import wandb_mode
from trainer.spec.errors import InputProblemsError
from trainer.spec.job.kinds import is_url, variable_of
from trainer.spec.job.sections import Job, WandbMode
from trainer.spec.pip_lines import extra_line, pip_line

_LOGIN_TIMEOUT_S = 60.0  # to import wandb over a slow file system


def check_sinks(job: Job, environment: Mapping[str, str] = os.environ, *, on_node: bool | None = None) -> None:
    """InputProblemsError with everything that the sinks of this job lack here."""
    problems = tuple(_problems(job, environment, on_node=on_node))
    if problems:
        raise InputProblemsError(problems)


def _problems(job: Job, environment: Mapping[str, str], *, on_node: bool | None) -> Iterator[str]:
    mode = wandb_mode(job, environment, on_node=on_node)
    if mode is not WandbMode.OFF and installed_version("wandb") is None:
        yield f"log.wandb: {mode}: wandb is not installed; set log.wandb=off, or {pip_line('wandb')}"
    elif mode is WandbMode.ONLINE:
        problem = login_problem(environment)
        if problem is not None:
            yield f"log.wandb: online: {problem}, or set log.wandb=offline"
    if job.log.tensorboard and installed_version("tensorboard") is None:
        yield f"log.tensorboard: tensorboard is not installed; {extra_line('tensorboard')}"
    yield from _command_problems(job.log.notify, environment)


def login_problem(environment: Mapping[str, str]) -> str | None:
    """What wandb lacks to be online, in words; None where it lacks nothing."""
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-m", "launch.track.wandb.login"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LOGIN_TIMEOUT_S,
            start_new_session=True,  # no terminal to ask at
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"wandb did not say within {_LOGIN_TIMEOUT_S:.0f} s whether there is a login"
    if answer.returncode == 0:
        return None
    lines = answer.stdout.splitlines() or answer.stderr.splitlines()
    words = lines[-1] if lines else "wandb could not be asked for its login"
    return f"{words}; run wandb login, or set WANDB_API_KEY"


def _command_problems(notify: tuple[str, ...] | None, environment: Mapping[str, str]) -> Iterator[str]:
    if notify is None or is_url(notify):
        return
    variable = variable_of(notify)
    if variable is not None:
        try:
            url_in(variable, environment)
        except NotifyError as error:
            yield f"log.notify: {error}"
        return
    program = str(Path(notify[0]).expanduser())
    if shutil.which(program, path=environment.get("PATH")) is None:
        yield f"log.notify: {notify[0]} is no program that is found here; give its path, or a URL"
