"""Batch jobs for tests: a run directory with a `train.sbatch`, and a stand-in for `shardwise` that does as it is told.

The stand-in writes what it sees into `events` of its run directory. How each start ends is a line of `ends` there: a
code to end with at once, `told` to wait for USR1 and end with 75, `deaf` to die of USR1 like one that still imports.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.slurm.sbatch import BatchJob, render_script
from shardwise.trainer.spec.messages.submission import JOBS_FILE, SCRIPT_NAME, JobStart, parse_job_starts

STAND_IN = """\
#!/usr/bin/env python3
import os, signal, sys, time
run_dir = sys.argv[4]
with open(f"{run_dir}/events", "a+") as events, open(f"{run_dir}/ends") as ends:
    events.seek(0)
    end = ends.read().split()[sum(line.startswith("start") for line in events)]
def tell(line):
    with open(f"{run_dir}/events", "a") as events:
        events.write(f"{line}\\n")
def on_usr1(number, frame):
    tell("told")
    os._exit(75)
if end == "told":
    signal.signal(signal.SIGUSR1, on_usr1)
signal.signal(signal.SIGTERM, lambda *_: None)  # Slurm sends it to every process of a job that it ends
tell(f"start restarts={os.environ.get('SLURM_RESTART_COUNT', 0)} {' '.join(sys.argv[1:])}")
while end in ("told", "deaf"):
    time.sleep(0.05)
sys.exit(int(end))
"""


def batch_job(run_dir: Path | str, **changes: Any) -> BatchJob:
    """A job of one node, whose `shardwise` is what stands in `run_dir/bin`."""
    summary = "ddp on 2 ranks, predicted 4 s: 1 job of 00:05:00"
    plain: dict[str, Any] = {"name": "tiny", "summary": summary, "written_by": "shardwise 0.6.0"}
    plain |= {"run_dir": str(run_dir), "workdir": str(Path(run_dir).parent), "program_dir": f"{run_dir}/bin"}
    return BatchJob(**{**plain, "uses_whole_nodes": False, **changes})


def write_run(job: BatchJob, *ends: str, program: str = STAND_IN) -> Path:
    run_dir = Path(job.run_dir)
    (run_dir / "bin").mkdir(parents=True)
    write_program(run_dir / "bin" / "shardwise", program)
    folders = [run_dir] if job.num_points is None else [run_dir / f"point-{n + 1}" for n in range(job.num_points)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        tell_ends(folder, *ends)
    script = run_dir / SCRIPT_NAME
    script.write_text(render_script(job))
    return script


def tell_ends(run_dir: Path, *ends: str) -> None:
    (run_dir / "ends").write_text("\n".join(ends))


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def read_events(run_dir: Path) -> list[str]:
    path = run_dir / "events"
    return [" ".join(line.split()[:2]) for line in path.read_text().splitlines()] if path.exists() else []


def read_starts(run_dir: Path) -> Sequence[JobStart]:
    return parse_job_starts((run_dir / JOBS_FILE).read_text())


def read_output(run_dir: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(run_dir.glob("slurm-*.out")))
