"""The one place where wandb is imported: what the other modules need of it. Only processes of their own load this.

wandb asks at a terminal for a key, or whether to go on without one, where it finds no key (`wandb.sdk.lib.wbauth`). The
processes that load this have no terminal, and ask for no login in offline mode, so that question never comes.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined] # protobuf makes it at run time

from launch.track.tracker import SinkOrder

_INIT_TIMEOUT_S = 30  # then the run is written offline; WANDB_INIT_TIMEOUT says otherwise
# What would make this another run than the one that the run directory names, or would need another process.
_NOT_OURS = ("WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM", "WANDB_SERVICE", "WANDB_DIR")


def login_problem() -> str | None:
    """What wandb lacks to be online, None where it has a key or an identity; asks nobody and nothing over a network."""
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib import wbauth

    settings = wandb_setup.singleton().settings  # wandb.setup() would start its service
    try:
        found = wbauth.authenticate_session(host=settings.base_url, source="shardwise", prompt=False)
    except wandb.Error as error:
        return str(error).partition("\n")[0]
    return None if found is not None else f"there is no login for {settings.base_url}"


class Session:
    """A wandb run in a run directory: a new one, or the one of this identity gone on with."""

    def __init__(
        self,
        run_dir: Path,
        order: SinkOrder,
        *,
        identity: str,
        project: str,
        is_online: bool,
        config: Mapping[str, Any],
    ) -> None:
        for variable in _NOT_OURS:
            os.environ.pop(variable, None)
        os.environ.setdefault("WANDB_INIT_TIMEOUT", str(_INIT_TIMEOUT_S))
        os.environ.setdefault("WANDB_DISABLE_GIT", "true")  # what runs is in the job and the plan, not in this folder
        os.environ.setdefault("WANDB_DISABLE_CODE", "true")
        self.is_online = is_online
        self._run = wandb.init(
            project=project,
            id=identity,
            name=order.name,
            group=order.group,
            config=dict(config),
            dir=str(run_dir),
            mode="online" if self.is_online else "offline",
            resume="allow",
            settings=wandb.Settings(console="off", force=self.is_online),
        )

    @property
    def starting_step(self) -> int:
        """The first of wandb's steps that its server does not have."""
        return int(self._run.starting_step)

    @property
    def folder(self) -> str:
        """The name of the folder that this is written to."""
        return Path(self._run.settings.sync_dir).name

    @property
    def url(self) -> str | None:
        return None if self._run.url is None else str(self._run.url)

    def define(self, series: str, *, step_metric: str | None = None, summary: str | None = None) -> None:
        """Names the axis of a series, and which of its values stand in the summary."""
        self._run.define_metric(series, step_metric=step_metric, summary=summary)

    def log(self, values: Mapping[str, float], *, index: int) -> None:
        """One row, at once."""
        self._run.log(dict(values), step=index, commit=True)

    def alert(self, title: str, text: str, *, wait_s: float) -> None:
        self._run.alert(title, text, level="WARN", wait_duration=wait_s)

    def summarise(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))

    def mark_preempted(self) -> None:
        self._run.mark_preempting()

    def finish(self, exit_code: int) -> None:
        """Returns when everything is sent, or written."""
        self._run.finish(exit_code=exit_code)


class Server:
    """wandb's server, asked as the person that is logged in."""

    def __init__(self) -> None:
        self._api = wandb.Api()

    @property
    def app_url(self) -> str:
        """Where its pages are."""
        return str(wandb.setup().settings.app_url).rstrip("/")

    def ask(self, query: str, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The data that a GraphQL query answers; wandb has no public call for saved views."""
        answer: dict[str, Any] = self._api._service_api.execute_graphql(query, variables=dict(variables))
        return answer


def forget() -> None:
    """Ends what an attempt to open a run left behind, so that it can be opened in another way."""
    wandb.teardown(exit_code=1)


def sweep_identity() -> str | None:
    """The id that the agent of a wandb sweep gave this run; None outside of one."""
    return os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None


def logged_step(record: bytes) -> int | None:
    """The step of a serialised record that is a row of the history, None of another."""
    parsed = Record()
    parsed.ParseFromString(record)
    return int(parsed.history.step.num) if parsed.WhichOneof("record_type") == "history" else None
