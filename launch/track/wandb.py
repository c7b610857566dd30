"""wandb as a tracker: one wandb run for one run directory, however often that is stopped, killed or queued again.

Only this module imports wandb, and only processes of their own load it: that of the trackers, and `python -m
launch.track.wandb login` and `save-view`, the commands of `start` and `workspace`. wandb's own service process
(wandb-core) does not protect the caller: with a wandb-core that hangs, `run.log` of wandb 0.31 blocks after 276 rows
and `run.finish` does not return. No process here has a terminal, so wandb never prompts for a key.

Each line of metrics.jsonl is logged with its place in the file as wandb's own step, which must increase: wandb drops a
row with a lower step. So every line is sent once, including steps that an attempt repeats after going back to a
checkpoint. The x axis of charts is `step`, the optimizer's. The number of lines that are already there comes from
wandb's server if the run is online, else from the logs in the run directory (`offline`).
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
import wandb

from shardwise.launch.rundir.paths import CONSOLE_LOG
from shardwise.launch.track.offline import (
    WandbRun,
    offline_folders,
    offline_logs,
    read_records,
    read_wandb_run,
    write_wandb_run,
)
from shardwise.launch.track.tracker import (
    PREDICTED,
    STEP,
    End,
    Incident,
    Line,
    Run,
    Summaries,
    Tracker,
    ViewRequest,
    WandbResult,
    predicted_series,
    show,
    summary_of,
)
from shardwise.trainer.planning.candidates import run_seconds, run_time
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.fields import job_tree
from shardwise.trainer.spec.job.sections import WandbMode
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending, Report
from shardwise.trainer.spec.secrets import REDACTED, redact, redacted_output

_TRAINER_NAMES = {"train/lr": "train/learning_rate"}  # others follow from `eval/eval_`
_MOST_TAG = 64  # characters that wandb accepts
_MOST_CONSOLE_BYTES = 2**20  # read at a time
_ALERT_WAIT_S = 600  # between two alerts with one title
_INIT_TIMEOUT_S = 30  # then the run is written offline; WANDB_INIT_TIMEOUT overrides it
# These would select another run than the one of the run directory, or need another process.
_OVERRIDDEN = ("WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM", "WANDB_SERVICE", "WANDB_DIR")


class WandbTracker(Tracker):
    """Feeds one wandb run."""

    name = "wandb"

    def __init__(self) -> None:
        self._run: wandb.Run | None = None
        self._is_online = False
        self._run_dir = Path()
        self._record: WandbRun | None = None
        self._first_line = self._num_lines = 0
        self._summaries = Summaries()
        self._defined: set[str] = set()
        self._console_offset = 0

    def begin(self, run: Run) -> None:
        """Opens the wandb run; writes it offline if wandb's server does not respond."""
        record = _wandb_run(run)
        write_wandb_run(run.run_dir, record)
        self._run, self._is_online = _open(run, record)
        if self._is_online:
            self._first_line = int(self._run.starting_step)
            url = None if self._run.url is None else str(self._run.url)
            record = msgspec.structs.replace(record, url=url, sent_lines=self._first_line)
            show(f"wandb: {url}")
        else:
            self._first_line = max(record.sent_lines, num_logged(run.run_dir))
        folder = Path(self._run.settings.sync_dir).name
        self._run_dir, self._record = run.run_dir, msgspec.structs.replace(record, writing=folder)
        write_wandb_run(run.run_dir, self._record)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def step(self, line: Line) -> None:
        """Sends a line that is not there yet."""
        assert self._run is not None
        values = {**line.values, **trainer_series(line)}
        self._summaries.add(values)
        self._num_lines = line.place + 1
        for name in sorted(values.keys() - self._defined - {STEP}):
            self._run.define_metric(name, step_metric=STEP, summary=",".join(summary_of(name)))
            self._defined.add(name)
        if line.place >= self._first_line:
            self._run.log({**values, STEP: line.step}, step=line.place, commit=True)
            self._send_console()

    def _send_console(self) -> None:
        """Sends the complete lines that the run has printed since, to the run's logs."""
        assert self._run is not None
        try:
            with (self._run_dir / CONSOLE_LOG).open("rb") as log:
                log.seek(self._console_offset)
                text, _, _ = log.read(_MOST_CONSOLE_BYTES).rpartition(b"\n")
        except OSError:
            return
        if text and hasattr(self._run, "write_logs"):  # wandb 0.25 lacks it
            self._console_offset += len(text) + 1
            self._run.write_logs(redact(text.decode(errors="replace")) + "\n")

    def incident(self, incident: Incident) -> None:
        """Sends an alert."""
        assert self._run is not None
        self._run.alert(incident.title, incident.text, level="WARN", wait_duration=_ALERT_WAIT_S)

    def end(self, end: End) -> None:
        """Writes the summary over all lines, the figures of the report and the exit code; waits until they are sent."""
        if self._run is None:
            return
        self._send_console()
        report = end.report
        summary: dict[str, Any] = dict(self._summaries.all())
        if report is not None:
            summary |= {f"report/{name}": value for name, value in run_figures(report).items()}
        self._run.summary.update(summary)
        is_finished = report is not None and report.ending is Ending.FINISHED
        if report is not None and report.ending is Ending.PREEMPTED:
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if is_finished else 1 if report is None else report.exit_code)
        assert self._record is not None
        record = msgspec.structs.replace(self._record, writing=None)
        if self._is_online:  # the server now has every line, including those of the offline folders
            folders = tuple(path.name for path in offline_folders(self._run_dir))
            record = msgspec.structs.replace(record, sent_lines=self._num_lines, synced=folders)
        write_wandb_run(self._run_dir, record)


def run_config(plan: Plan) -> dict[str, Any]:
    """The config of the wandb run: job, plan, predictions, hardware, model, data, versions; without secrets."""
    job = job_tree(plan.job)
    if plan.job.log.notify is not None:  # the path of a URL may be its only protection
        job["log"]["notify"] = REDACTED
    context, chosen = context_of(plan), msgspec.to_builtins(plan.chosen)
    tree: dict[str, Any] = {
        "learning_rate": plan.schedule.lr,
        "max_steps": plan.schedule.num_steps,
        "per_device_train_batch_size": plan.chosen.micro_batch,
        "gradient_accumulation_steps": plan.chosen.accumulation,
        "job": job,
        "plan": {
            "strategy": plan.chosen.strategy.name,
            **{name: value for name, value in chosen.items() if name not in ("memory", "speed", "strategy")},
            "row": chosen["strategy"],
            "schedule": msgspec.to_builtins(plan.schedule),
            "num_fallbacks": len(plan.fallbacks),
        },
        "predicted": {
            "memory": chosen["memory"],
            "speed": chosen["speed"],
            **predicted_series(plan.chosen, plan.device_kind),
            **_times(run_seconds(context, plan.chosen), run_time(context, plan.chosen).parts_s, suffix=PREDICTED),
        },
        "hardware": msgspec.to_builtins(plan.hardware),
        "model": {**msgspec.to_builtins(plan.model_shape), "num_parameters": plan.model_shape.num_parameters},
        "data": {"fingerprint": plan.data.fingerprint, "source": plan.data.source},
        "versions": plan.versions,
    }
    return dict(codec.redacted(tree))


def trainer_series(line: Line) -> dict[str, float]:
    """The series of a line by the names of transformers' Trainer, where they differ from ours."""
    same = {_TRAINER_NAMES.get(name, name.replace("eval/eval_", "eval/")): value for name, value in line.values.items()}
    return {name: value for name, value in same.items() if name not in line.values} | {"train/global_step": line.step}


def run_tags(plan: Plan) -> tuple[str, ...]:
    """Method, architecture, sharding and device, and those of WANDB_TAGS."""
    device = plan.hardware.gpus[0].name if plan.hardware.gpus else "CPU"
    found = (str(plan.chosen.method), plan.model_shape.model_type, str(plan.chosen.strategy.sharding), device)
    given = [tag.strip() for tag in os.environ.get("WANDB_TAGS", "").split(",")]
    return tuple(dict.fromkeys(tag[:_MOST_TAG] for tag in (*given, *found) if tag))


def num_logged(run_dir: Path) -> int:
    """The number of lines in the offline folders: one more than the highest wandb step."""
    records = (record for path in offline_logs(run_dir) for record in read_records(path))
    return max((step + 1 for record in records if (step := _logged_step(record)) is not None), default=0)


def _logged_step(record: bytes) -> int | None:
    """The step of a serialized record if it is a row of the history."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined] # protobuf makes it at run time

    parsed = Record()
    parsed.ParseFromString(record)
    return int(parsed.history.step.num) if parsed.WhichOneof("record_type") == "history" else None


def _wandb_run(run: Run) -> WandbRun:
    """The wandb run of the run directory; a new one gets the id from the agent of a wandb sweep."""
    try:
        record = read_wandb_run(run.run_dir)
    except InputError as error:
        show(f"wandb: {error}; starting a new run")
        record = None
    if record is not None:
        return record
    identity = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
    return WandbRun(id=identity or token_hex(6), project=run.order.project)


def _open(run: Run, record: WandbRun) -> "tuple[wandb.Run, bool]":
    """The wandb run, and whether it is online."""
    config = run_config(run.plan)
    if run.order.wandb is WandbMode.ONLINE:
        try:
            return _init(run, record, config, mode="online"), True
        except Exception as error:  # noqa: BLE001 - after any error the run can still be written offline
            reason = (str(error).splitlines() or [""])[0]
            show(f"wandb: cannot be reached ({type(error).__name__}: {reason}); the run is written offline")
            show(f"wandb: to send it later: shardwise status {run.run_dir} --sync")
            wandb.teardown(exit_code=1)
    return _init(run, record, config, mode="offline"), False


def _init(run: Run, record: WandbRun, config: Mapping[str, Any], *, mode: str) -> "wandb.Run":
    for variable in _OVERRIDDEN:
        os.environ.pop(variable, None)
    os.environ.setdefault("WANDB_INIT_TIMEOUT", str(_INIT_TIMEOUT_S))
    os.environ.setdefault("WANDB_DISABLE_GIT", "true")  # the job and the plan describe the run, not this folder
    os.environ.setdefault("WANDB_DISABLE_CODE", "true")
    return wandb.init(
        project=record.project,
        id=record.id,
        name=run.order.name,
        group=run.order.group,
        tags=run_tags(run.plan),
        config=dict(config),
        dir=str(run.run_dir),
        mode="online" if mode == "online" else "offline",
        resume="allow",
        settings=wandb.Settings(
            console="off",
            force=mode == "online",
            # the supervisor, or the rank of a run by hand, with its ranks; not this process alone
            x_stats_pid=os.getppid(),
            x_stats_track_process_tree=True,
        ),
    )


def run_figures(report: Report) -> dict[str, Any]:
    memory, speed = report.measured.memory, report.measured.speed
    figures = {
        "ending": str(report.ending),
        "steps": report.step,
        "tokens": report.tokens,
        "targets": report.targets,
        "attempts": report.attempts,
        **_times(report.duration_s, report.parts_s),
        **_times(report.predicted_s, report.predicted_parts_s, suffix=PREDICTED),
        "final_loss": report.final_loss,
        "eval_loss": report.evaluations[-1].loss if report.evaluations else None,
        "memory_peak_bytes": memory.peak_allocated_bytes,
        "memory_peak_bytes_predicted": report.predicted.memory.peak_allocated_bytes,
        "tokens_per_s_per_gpu": speed.tokens_per_s_per_gpu,
        "targets_per_s_per_gpu": speed.targets_per_s_per_gpu,
        "tokens_per_s_per_gpu_predicted": report.predicted.speed.tokens_per_s_per_gpu,
        "gpu_idle_share": None if report.device_time is None else report.device_time.idle_share,
        "graph_breaks": None if report.verified is None else sum(report.verified.graph_breaks.values()) or None,
        "incidents": len(report.incidents),
    }
    return {name: value for name, value in figures.items() if value is not None}


def _times(whole_s: float | None, parts_s: Mapping[str, float], *, suffix: str = "") -> dict[str, float | None]:
    """`duration_s` of the run and `start_up_s`, `steps_s` and so on of its parts, with a suffix."""
    parts = {f"{part.replace('-', '_')}_s{suffix}": seconds for part, seconds in parts_s.items()}
    return {f"duration_s{suffix}": whole_s, **parts}


# The two commands below run in processes of their own, since wandb takes a second to import.


def login_result() -> WandbResult:
    """The problem with the login to the server unless it has a key or an identity; sends nothing, never prompts."""
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib import wbauth

    host = str(wandb_setup.singleton().settings.base_url)  # wandb.setup() would start its service
    try:
        found = wbauth.authenticate_session(host=host, source="shardwise", prompt=False)
    except wandb.Error as error:
        return WandbResult(problem=str(error).partition("\n")[0])
    return WandbResult(problem=None if found is not None else f"there is no login for {host}")


def save_view(request: ViewRequest) -> WandbResult:
    """Saves a new view in a project."""
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    view = workspaces.Workspace(
        entity=request.entity or wandb.Api().default_entity,
        project=request.project,
        name=request.title,
        sections=[
            workspaces.Section(
                name=heading,
                is_open=True,
                panels=[reports.LinePlot(title=title, x=STEP, y=list(series)) for title, series in charts.items()],
            )
            for heading, charts in request.sections.items()
        ],
        settings=workspaces.WorkspaceSettings(x_axis=STEP),
        auto_generate_panels=True,
    )
    return WandbResult(url=view.save().url)


def main(command: str, request: Path, result: Path) -> None:
    """`login` or `save-view`, for `launch.worker.ask`."""
    try:
        outcome = login_result() if command == "login" else save_view(codec.read(request, ViewRequest))
    except Exception as error:  # noqa: BLE001 - wandb raises many types; the first line of the message is shown
        problem = redact(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        outcome = WandbResult(problem=problem)
    codec.write(result, outcome)


if __name__ == "__main__":
    with redacted_output():
        main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
