"""Real runs with trackers: what they wrote of a stopped run that goes on is read back, and no key is in any file."""

import json
import signal

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracker_factory import LoggedRun, write_program
from workplace_factory import LIMIT_S, Workplace, read_metrics, wait_for

from shardwise.launch.track.offline import offline_logs, read_wandb_run
from shardwise.launch.track.tracker import measured_series, predicted_series
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Report, TimePart

KEY = "canary" + "0123456789" * 4
KEEP = "import sys\nopen({path!r}, 'a').write(sys.stdin.read() + '\\n')\n"
SLOW = """
import os
import time


def on_step(step, metrics):
    time.sleep(0.05 if os.path.exists("slow") else 0)
"""
SUMMED_UP = {
    "train/loss": "min", "eval/eval_loss": "min", "speed/tokens_per_s": "mean", "memory/memory_peak_bytes": "max"
}  # fmt: skip


def test_every_tracker_has_every_step_of_a_stopped_run_once_and_the_end_is_told(workplace: Workplace) -> None:
    program = write_program(workplace.folder, KEEP.format(path=str(workplace.folder / "told")))
    log = {"wandb": "offline", "tensorboard": True, "notify": [str(program), "$HOME;"], "project": "mine"}
    (workplace.folder / "slow.py").write_text(SLOW)
    (workplace.folder / "slow").touch()
    workplace.write_job(log=log, train={"steps": 40}, extensions="slow.py")
    process, folder = workplace.start("train", "job.yaml"), workplace.folder

    def has_steps() -> bool:
        return any(path.read_text().count("\n") > 2 for path in folder.glob("runs/*/metrics.jsonl"))

    wait_for(has_steps, "3 steps", process)
    process.send_signal(signal.SIGINT)  # a run that goes back to a scheduler waits ten seconds alone for its trackers
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, output
    (workplace.folder / "slow").unlink()
    workplace.run("train", "job.yaml", "--resume")
    run_dir = workplace.only_run()
    plan = codec.read(run_dir / "attempts" / "1" / "plan.json", Plan)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]

    first, last = runs = [LoggedRun(path) for path in offline_logs(run_dir)]
    history = [row for run in runs for row in run.history]
    assert [row["_step"] for row in history] == list(range(40)) and [row["step"] for row in history] == list(
        range(1, 41)
    )
    for row, line in zip(history, lines, strict=True):
        sent = {**measured_series(line), **predicted_series(plan.chosen, plan.device_kind)}
        sent |= {name.replace("eval/eval_", "eval/"): value for name, value in sent.items()}
        sent |= {"train/learning_rate": sent["train/lr"], "train/global_step": line["step"]}
        assert {name: value for name, value in row.items() if not name.startswith("_")} == pytest.approx(sent)
    for name, kind in SUMMED_UP.items():
        assert getattr(last.metrics[name].summary, kind), name
        values = [row[name] for row in history if name in row]
        expected = sum(values) / len(values) if kind == "mean" else {"min": min, "max": max}[kind](values)
        assert last.summary[name][kind] == pytest.approx(expected)
    assert last.config["job"]["train"]["steps"] == 40 and last.config["job"]["log"]["notify"] == "[redacted]"
    assert [run.identity for run in runs] == [read_wandb_run(run_dir).id] * 2
    assert [run.of("exit")[0].exit_code for run in runs] == [130, 0]
    assert [run.summary["report/ending"] for run in (first, last)] == ["stopped", "finished"]
    report = codec.read(run_dir / "report.json", Report)
    assert sum(report.predicted_parts_s.values()) == pytest.approx(report.predicted_s)
    assert sum(report.parts_s.values()) == pytest.approx(report.duration_s)
    assert {TimePart.STEPS, TimePart.SAVING, TimePart.SAMPLE, TimePart.EXPORT} <= report.parts_s.keys()
    assert report.saved_bytes and last.summary["report/duration_s"] == report.duration_s
    assert last.summary["report/duration_s_predicted"] == report.predicted_s

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == pytest.approx({step: line["loss"] for step, line in read_metrics(run_dir).items()})

    stopped, ended = [json.loads(line) for line in (workplace.folder / "told").read_text().splitlines()]
    assert (stopped["ending"], ended["ending"]) == ("stopped", "finished")
    assert 3 <= stopped["step"] < ended["step"] == 40 and ended["run_dir"] == str(run_dir)


def test_a_server_that_refuses_stops_nothing_and_no_key_is_in_any_file(workplace: Workplace) -> None:
    address = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": KEY, "WANDB_INIT_TIMEOUT": "1"}
    place = Workplace(workplace.folder, workplace.environment | address)
    place.write_job(log={"wandb": "online", "notify": f"http://me:{KEY}@127.0.0.1:9/hook"})
    answer = place.run("train", "job.yaml")
    assert "wandb:" in answer.stdout and "--sync" in answer.stdout
    assert "notify: switched off" in answer.stdout and "127.0.0.1" in answer.stdout
    assert len(LoggedRun(offline_logs(place.only_run())[0]).history) == 8
    shown = place.run("status", place.only_run())
    assert "offline" in shown.stdout
    assert KEY not in answer.stdout + answer.stderr + shown.stdout
    files = [path for path in place.folder.rglob("*") if path.is_file() and path != place.job]
    assert "notify: http://127.0.0.1:9/[redacted]" in (place.only_run() / "job.yaml").read_text().replace('"', "")
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
