"""wandb as a sink: one run of it for one run directory, however often that is stopped, killed or queued again.

A line of metrics.jsonl is sent with its place in the file as wandb's own step, which may only grow: wandb drops what
comes with a lower one. So every line is sent once, also those of steps that an attempt went back over, and charts are
drawn over `step`, our own, where the later value of a step stands beside the earlier. Which lines are there already is
asked of what holds them: wandb's server while online, else the logs of records that wandb left in the run directory.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from launch.track.metrics import STEP, Summaries, predicted_series, summary_of
from launch.track.tracker import End, Incident, Line, Run, say
from launch.track.wandb.files import (
    WandbRun,
    new_identity,
    offline_folders,
    offline_logs,
    read_records,
    read_wandb_run,
    write_wandb_run,
)
from launch.track.wandb.library import Session, forget, logged_step, sweep_identity
from trainer.spec import codec
from trainer.spec.errors import InputError
from trainer.spec.job.fields import job_tree
from trainer.spec.job.sections import WandbMode
from trainer.spec.plan import Plan
from trainer.spec.report import Ending, Report
from trainer.spec.secrets import REDACTED

_ALERT_WAIT_S = 600  # between two alerts of one title


class WandbSink:
    """Feeds one wandb run."""

    name = "wandb"

    def __init__(self) -> None:
        self._session: Session | None = None
        self._run_dir = Path()
        self._kept: WandbRun | None = None
        self._first_line = self._num_lines = 0
        self._summaries = Summaries()
        self._defined: set[str] = set()

    def begin(self, run: Run) -> None:
        """Opens the run; where wandb's server does not answer, it is written offline."""
        kept = _kept_run(run)
        write_wandb_run(run.run_dir, kept)
        config = run_config(run.plan)
        self._session = _open(run, kept, config)
        if self._session.is_online:
            self._first_line = self._session.starting_step
            kept = msgspec.structs.replace(kept, url=self._session.url, sent_lines=self._first_line)
            say(f"wandb: {kept.url}")
        else:
            self._first_line = max(kept.sent_lines, num_logged(run.run_dir))
        self._run_dir, self._kept = run.run_dir, msgspec.structs.replace(kept, writing=self._session.folder)
        write_wandb_run(run.run_dir, self._kept)
        self._session.define(STEP)
        self._session.define("*", step_metric=STEP)

    def step(self, line: Line) -> None:
        """Sends a line that is not there yet."""
        assert self._session is not None
        self._summaries.add(line.values)
        self._num_lines = line.place + 1
        for name in sorted(line.values.keys() - self._defined - {STEP}):
            self._session.define(name, step_metric=STEP, summary=",".join(summary_of(name)))
            self._defined.add(name)
        if line.place >= self._first_line:
            self._session.log({**line.values, STEP: line.step}, index=line.place)

    def incident(self, incident: Incident) -> None:
        """An alert, which wandb sends on as the person asked it to."""
        assert self._session is not None
        self._session.alert(incident.title, incident.text, wait_s=_ALERT_WAIT_S)

    def end(self, end: End) -> None:
        """The summary over all lines, the report's figures and the ending."""
        if self._session is None:
            return
        report = end.report
        summary: dict[str, Any] = dict(self._summaries.all())
        if report is not None:
            summary |= {f"report/{name}": value for name, value in _report_figures(report).items()}
        self._session.summarise(summary)
        is_done = report is not None and report.ending is Ending.FINISHED
        if report is not None and report.ending is Ending.PREEMPTED:
            self._session.mark_preempted()
        self._session.finish(0 if is_done else 1 if report is None else report.exit_code)
        assert self._kept is not None
        kept = msgspec.structs.replace(self._kept, writing=None)
        if self._session.is_online:  # then the server has every line, those that were written offline as well
            folders = tuple(path.name for path in offline_folders(self._run_dir))
            kept = msgspec.structs.replace(kept, sent_lines=self._num_lines, synced=folders)
        write_wandb_run(self._run_dir, kept)


def run_config(plan: Plan) -> dict[str, Any]:
    """What stands beside the charts: the job, what was chosen and why, the machine, what is predicted; no secret."""
    job = job_tree(plan.job)
    if plan.job.log.notify is not None:  # its path may be all that protects it
        job["log"]["notify"] = REDACTED
    chosen = msgspec.to_builtins(plan.chosen)
    tree: dict[str, Any] = {
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
            **predicted_series(plan.chosen),
        },
        "hardware": msgspec.to_builtins(plan.hardware),
        "model": {**msgspec.to_builtins(plan.model_shape), "num_parameters": plan.model_shape.num_parameters},
        "data": {"fingerprint": plan.data.fingerprint, "source": plan.data.source},
        "versions": plan.versions,
    }
    shown: dict[str, Any] = codec.redacted(tree)
    return shown


def num_logged(run_dir: Path) -> int:
    """How many lines the folders that were written offline hold: one more than the highest that is there."""
    records = (record for path in offline_logs(run_dir) for record in read_records(path))
    return max((step + 1 for record in records if (step := logged_step(record)) is not None), default=0)


def _kept_run(run: Run) -> WandbRun:
    try:
        kept = read_wandb_run(run.run_dir)
    except InputError as error:
        say(f"wandb: {error}; a new run begins")
        kept = None
    if kept is not None:
        return kept
    return WandbRun(id=sweep_identity() or new_identity(), project=run.order.project)


def _open(run: Run, kept: WandbRun, config: Mapping[str, Any]) -> Session:
    def opened(*, is_online: bool) -> Session:
        return Session(
            run.run_dir, run.order, identity=kept.id, project=kept.project, is_online=is_online, config=config
        )

    if run.order.wandb is WandbMode.OFFLINE:
        return opened(is_online=False)
    try:
        return opened(is_online=True)
    except Exception as error:  # noqa: BLE001 - whatever it is, the run can still be written offline
        words = (str(error).splitlines() or [""])[0]
        say(f"wandb: is not reached ({type(error).__name__}: {words}): writing offline instead")
        say(f"wandb: to send it later: shardwise status {run.run_dir} --sync")
        forget()
        return opened(is_online=False)


def _report_figures(report: Report) -> dict[str, Any]:
    memory, speed = report.measured.memory, report.measured.speed
    figures = {
        "ending": str(report.ending),
        "steps": report.step,
        "tokens": report.tokens,
        "attempts": report.attempts,
        "final_loss": report.final_loss,
        "eval_loss": report.evaluations[-1].loss if report.evaluations else None,
        "memory_peak_bytes": memory.peak_allocated_bytes,
        "memory_peak_bytes_predicted": report.predicted.memory.peak_allocated_bytes,
        "tokens_per_s_per_gpu": speed.tokens_per_s_per_gpu,
        "tokens_per_s_per_gpu_predicted": report.predicted.speed.tokens_per_s_per_gpu,
        "incidents": len(report.incidents),
    }
    return {name: value for name, value in figures.items() if value is not None}
