"""`shardwise workspace`: saves the view "shardwise: memory and throughput" in a project of wandb."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from launch.options import WorkspaceOptions
from launch.terminal import Console
from launch.track.wandb.workspace import IDENTITY, NAME, VIEW_NAME, workspace
from trainer.spec.errors import EnvironmentFaultError, ExitCode
from trainer.spec.job.sections import LogJob

_TIMEOUT_S = 120.0


def run_workspace(
    options: WorkspaceOptions, console: Console, *, environment: Mapping[str, str] = os.environ
) -> ExitCode:
    """Saves the view and says where it is; EnvironmentFaultError where wandb does not take it."""
    if options.as_json:
        console.line(json.dumps(workspace(), indent=1))
        return ExitCode.DONE
    from launch.track.checks import login_problem

    problem = login_problem(environment)
    if problem is not None:
        raise EnvironmentFaultError(f"shardwise workspace: {problem}")
    project = options.project or LogJob().project
    answer = _save(options, project, environment)
    if "url" not in answer:
        raise EnvironmentFaultError(
            f"shardwise workspace: {answer.get('problem', 'wandb gave no answer')};\n"
            "a project is there once a run was sent to it; name another with --project and --entity"
        )
    console.line(f"saved as {NAME!r}: {answer['url']}")
    return ExitCode.DONE


def _save(options: WorkspaceOptions, project: str, environment: Mapping[str, str]) -> dict[str, Any]:
    request = {
        "entity": options.entity or environment.get("WANDB_ENTITY"),
        "project": project,
        "identity": IDENTITY,
        "view_name": VIEW_NAME,
        "title": NAME,
        "view": workspace(),
    }
    try:
        finished = subprocess.run(
            [sys.executable, "-P", "-m", "launch.track.wandb.view"],
            input=json.dumps(request),
            env=dict(environment),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            start_new_session=True,  # no terminal to ask at
            check=False,
        )
        answer = json.loads(finished.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"problem": f"wandb did not answer within {_TIMEOUT_S:.0f} s"}
    except (ValueError, IndexError):
        return {}
    return answer if isinstance(answer, dict) else {}
