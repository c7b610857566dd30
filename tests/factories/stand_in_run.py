"""A stand-in for `shardwise train` in a batch script: makes the files of a run, step by step, and nothing else."""

import json
import sys
import time
from pathlib import Path

from run_factory import metrics_row, write_attempt, write_report

from shardwise.launch.attempt.supervisor import StopRequest
from shardwise.launch.rundir.lock import is_cancelled, locked, must_end_at_start
from shardwise.launch.rundir.paths import next_attempt
from shardwise.trainer.spec.report import Ending

STEP_S = 0.05


def program() -> str:
    repository = Path(__file__).parents[2]
    folders = [str(repository), str(repository / "tests" / "factories")]
    lines = [f"#!{sys.executable}", "import sys", f"sys.path[:0] = {folders!r}", "import stand_in_run"]
    return "\n".join([*lines, "sys.exit(stand_in_run.main())", ""])


def main() -> int:
    run_dir = Path(sys.argv[4])
    stop = StopRequest()
    with stop.listening(), locked(run_dir):
        if must_end_at_start(run_dir):
            say("this run was cancelled")
            return 130
        attempt = next_attempt(run_dir)
        folder = write_attempt(run_dir, attempt)
        step = 0
        say(f"attempt {attempt} runs")
        while stop.kind is None and not (run_dir / "finish").exists():
            step += 1
            with (run_dir / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps(metrics_row(step, attempt)) + "\n")
            (folder / "status.json").write_text(json.dumps({"phase": "training", "step": step}))
            time.sleep(STEP_S)
        ending = Ending.FINISHED if stop.kind is None else Ending.STOPPED if is_cancelled(run_dir) else Ending.PREEMPTED
        write_report(run_dir, ending, attempt=attempt, step=step)
        say(f"attempt {attempt} ended: {ending}")
    return {Ending.FINISHED: 0, Ending.STOPPED: 130, Ending.PREEMPTED: 75}[ending]


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
