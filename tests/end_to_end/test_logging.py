"""Real runs with trackers: what wandb wrote is read back, a stopped run goes on, no tracker disturbs training."""

import json
import signal

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracker_factory import write_program
from wandb_log import LoggedRun
from wandb_stand_in import write_stand_in
from workplace_factory import LIMIT_S, Workplace, make_workplace, read_metrics, wait_for

from shardwise.launch.track.offline import offline_logs, read_wandb_run
from shardwise.launch.track.tracker import measured_series, predicted_series
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Plan

pytestmark = pytest.mark.cold  # wandb and TensorBoard beside a run that starts as it does for a user
KEY = "canary" + "0123456789" * 4
KEEP = "import sys\nopen({path!r}, 'a').write(sys.stdin.read() + '\\n')\n"
SUMMED_UP = {
    "train/loss": "min",
    "eval/eval_loss": "min",
    "speed/tokens_per_s": "mean",
    "memory/memory_peak_bytes": "max",
}


def told(place: Workplace) -> list[dict]:
    return [json.loads(line) for line in (place.folder / "told").read_text().splitlines()]


def stop_in_the_middle(place: Workplace) -> str:
    """USR1 at the third step: the run goes back to a scheduler."""
    process = place.start("train", "job.yaml")
    metrics = "runs/*/metrics.jsonl"
    wait_for(
        lambda: [path for path in place.folder.glob(metrics) if path.read_text().count("\n") > 2], "3 steps", process
    )
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, output
    return output


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run with every tracker, that was stopped, queued again and finished."""
    place = make_workplace(tmp_path_factory.mktemp("logged") / "work place")
    program = write_program(place.folder, KEEP.format(path=str(place.folder / "told")))
    log = {"wandb": "offline", "tensorboard": True, "notify": [str(program), "$HOME;"], "project": "mine"}
    place.write_job(log=log, train={"steps": 40})
    stop_in_the_middle(place)
    place.run("train", "job.yaml", "--resume")
    return place


def test_every_promised_series_is_read_back_from_what_wandb_wrote(logged):
    run_dir = logged.only_run()
    plan = codec.read(run_dir / "attempts" / "1" / "plan.json", Plan)
    history = [row for log in offline_logs(run_dir) for row in LoggedRun(log).history]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(history) == len(lines) >= 40
    for row, line in zip(history, lines, strict=True):
        sent = {**measured_series(line), **predicted_series(plan.chosen)}
        assert {name: value for name, value in row.items() if not name.startswith("_")} == pytest.approx(sent)
    last = LoggedRun(offline_logs(run_dir)[-1])
    for name, kind in SUMMED_UP.items():
        assert getattr(last.metrics[name].summary, kind), name
        values = [row[name] for row in history if name in row]
        expected = sum(values) / len(values) if kind == "mean" else {"min": min, "max": max}[kind](values)
        assert last.summary[name][kind] == pytest.approx(expected)
    assert last.config["job"]["train"]["steps"] == 40 and last.config["job"]["log"]["notify"] == "[redacted]"
    assert last.summary["report/ending"] == "finished"


def test_a_stopped_run_goes_on_as_the_same_one_with_every_step_once(logged):
    run_dir = logged.only_run()
    runs = [LoggedRun(log) for log in offline_logs(run_dir)]
    assert [run.identity for run in runs] == [read_wandb_run(run_dir).id] * 2
    assert [row["_step"] for run in runs for row in run.history] == list(range(40))
    assert [row["step"] for run in runs for row in run.history] == list(range(1, 41))
    assert [run.of("exit")[0].exit_code for run in runs] == [75, 0]
    assert runs[0].summary["report/ending"] == "preempted"


def test_tensorboard_has_every_step_once(logged):
    events = EventAccumulator(str(logged.only_run() / "tensorboard"))
    events.Reload()
    lines = read_metrics(logged.only_run())
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == pytest.approx({step: line["loss"] for step, line in lines.items()})


def test_who_is_told_is_told_of_the_requeue_and_of_the_end(logged):
    first, second = told(logged)
    assert (first["ending"], second["ending"]) == ("preempted", "finished")
    assert 3 <= first["step"] < second["step"] == 40
    assert second["run_dir"] == str(logged.only_run())


def test_a_server_that_refuses_stops_nothing_and_no_key_is_in_any_file(workplace: Workplace):
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


def test_a_run_that_fails_before_its_first_step_is_told_of_while_wandb_raises(workplace: Workplace):
    path = write_stand_in(workplace.folder / "stand in", "raises when it is loaded")
    place = Workplace(workplace.folder, workplace.environment | {"PYTHONPATH": str(path)})
    program = write_program(place.folder, KEEP.format(path=str(place.folder / "told")))
    (place.folder / "mine.py").write_text("def loss(logits, labels):\n    raise RuntimeError('a fault of mine')\n")
    place.write_job(log={"wandb": "offline", "notify": str(program).replace(" ", "\\ ")}, extensions="mine.py")
    answer = place.run("train", "job.yaml", check=False)
    assert answer.returncode == 4
    shown = answer.stdout
    assert "ImportError" in shown and "a fault of mine" in shown
    (message,) = told(place)
    assert (message["ending"], message["step"]) == ("failed", 0)
    assert "a fault of mine" in message["error"]
