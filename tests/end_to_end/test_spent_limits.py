"""limits.hours ends a real run with a checkpoint; it goes on when the limit is raised, and not before."""

from workplace_factory import Workplace, read_metrics

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.report import Ending, Report

SLOW = """\
import pathlib
import time


def on_step(step, metrics):
    if step > 2 and not pathlib.Path("fast").exists():
        time.sleep(1.0)
"""


def test_a_run_stops_ahead_of_its_hours_and_goes_on_when_they_are_raised(workplace: Workplace):
    """The first start tells how long loading takes here; the second has that, half of it again, and three seconds."""
    (workplace.folder / "slow.py").write_text(SLOW)
    rarely = {"every": "1000 steps"}
    workplace.write_job(
        train={"steps": 150}, checkpoint=rarely, eval=rarely, extensions="slow.py", limits={"hours": "2 s"}
    )
    first = workplace.run("train", "job.yaml", check=False)
    run_dir = workplace.only_run()
    assert first.returncode == 130, first.stdout + first.stderr
    assert "limits.hours" in first.stdout and "2 s" in first.stdout
    stopped = codec.read(run_dir / "report.json", Report)
    assert stopped.ending is Ending.STOPPED and stopped.exit_code == 130 and stopped.limit == "limits.hours"
    for command in ("report", "status"):
        assert "limits.hours" in workplace.run(command, str(run_dir)).stdout

    used_s = stopped.history[0].duration_s
    spent = workplace.run("train", "job.yaml", "--resume", check=False)
    assert spent.returncode == 2, spent.stdout
    assert str(run_dir.relative_to(workplace.folder)) in spent.stderr and "limits.hours" in spent.stderr

    raised = f"limits.hours={used_s * 2.5 + 3:.0f} s"
    second = workplace.run("train", "job.yaml", "--resume", raised, check=False)
    assert second.returncode == 130, second.stdout + second.stderr
    stopped = codec.read(run_dir / "report.json", Report)
    assert stopped.ending is Ending.STOPPED and 0 < stopped.step < 150
    assert stopped.checkpoint == f"checkpoints/step-{stopped.step:08d}"
    (incident,) = [each for each in stopped.incidents if each.startswith("limits.hours")]
    assert f"step {stopped.step} of 150" in incident and "--resume" in incident and "limits.hours=" in incident
    assert incident in second.stdout and len(stopped.history) == 2

    (workplace.folder / "fast").touch()
    workplace.run("train", "job.yaml", "--resume", "limits.hours=24")
    finished = codec.read(run_dir / "report.json", Report)
    assert finished.ending is Ending.FINISHED and finished.limit is None and finished.resumed_from_step == stopped.step
    assert sorted(read_metrics(run_dir)) == list(range(1, 151))
