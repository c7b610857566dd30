"""The folder of an attempt, with everything that its ranks read."""

import socket
from pathlib import Path

import msgspec
import yaml

from launch.engine.accelerate_config import accelerate_config
from launch.engine.deepspeed_config import deepspeed_config
from launch.engine.nvme_folder import nvme_folder
from launch.rundir import paths as run_dirs
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.plan import Candidate, Plan


def prepare_attempt(plan: Plan, candidate: Candidate, *, run_dir: Path, resume: bool) -> Path:
    """Writes the next `attempts/N/` with everything its ranks read; returns it."""
    number = run_dirs.next_attempt(run_dir)
    attempt_dir = run_dir / "attempts" / str(number)
    try:
        (attempt_dir / "logs").mkdir(parents=True)
        attempt_plan = msgspec.structs.replace(plan, candidates=(candidate,), resume=resume)
        codec.write(attempt_dir / "plan.json", attempt_plan)
        if candidate.strategy.sharding.uses_deepspeed:
            folder = nvme_folder(attempt_plan, run_dir, number)
            config = deepspeed_config(attempt_plan, nvme_path=None if folder is None else str(folder))
            filled = msgspec.json.format(msgspec.json.encode(config), indent=1)
            codec.write_bytes(attempt_dir / "ds_config.json", filled + b"\n")
        head = socket.gethostname() if attempt_plan.num_machines > 1 else None  # each agent writes what holds then
        settings = accelerate_config(attempt_plan, attempt_dir=attempt_dir, head=head)
        codec.write_bytes(attempt_dir / "accelerate.yaml", yaml.safe_dump(settings, sort_keys=False).encode())
    except OSError as error:
        raise EnvironmentFaultError(f"{attempt_dir}: cannot be written: {error.strerror}") from error
    return attempt_dir
