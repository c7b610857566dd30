"""`shardwise export`: a Hugging Face folder from the newest checkpoint of a run, written by a subprocess with torch."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from launch.run_dir import committed_checkpoints
from trainer.spec.errors import EnvironmentFaultError, InputError


def export_run(run_dir: Path, output: Path, *, on_progress: Callable[[str], None]) -> None:
    """Writes `output`; a folder that holds anything is refused, so nothing is overwritten."""
    if not (run_dir / "plan.json").is_file():
        raise InputError(f"{run_dir}: is not a run directory: it has no plan.json")
    if not committed_checkpoints(run_dir):
        raise InputError(f"{run_dir}: has no checkpoint to export yet")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: exists already; name a folder that does not")
    answer = subprocess.run(
        [sys.executable, "-P", "-m", "trainer.runtime.export_run", str(run_dir), str(output)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    if answer.returncode != 0:
        raise EnvironmentFaultError(f"export failed: {(answer.stderr.strip().splitlines() or ['no output'])[-1]}")
    for line in answer.stderr.strip().splitlines():
        on_progress(line)
    on_progress(f"wrote {output}; load it with AutoModelForCausalLM.from_pretrained({str(output)!r})")
