"""What the ranks of a machine had in their environment, kept beside their logs: `attempts/N/environment.json`.

Of a run that behaves strangely on one node this is what people compare. Only variables that decide how ranks find each
other, their devices and their files are kept, and no secret among them.
"""

import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from trainer.spec.codec import write_bytes
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.secrets import names_secret, redact

_KEPT = re.compile(
    r"(SLURM|SBATCH|SRUN|NCCL|GLOO|UCX|FI|CUDA|NVIDIA|ROCR|TORCH|PYTORCH|TRITON|OMP|MKL|KMP|DS|DEEPSPEED|ACCELERATE|PET"
    r"|HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|SHARDWISE|WANDB|XDG|PYTHON|LD|LC|LOADEDMODULES|MODULEPATH|CONDA)(_.*)?"
    r"|PATH|HOME|USER|HOSTNAME|LANG|TMPDIR|VIRTUAL_ENV|.*_(PROXY|proxy)"
)


def kept_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are worth keeping, by name, without those that are named like a secret."""
    names = sorted(name for name in environment if _KEPT.fullmatch(name) and not names_secret(name))
    return {name: environment[name] for name in names}


def write_environment(attempt_dir: Path, environment: Mapping[str, str], *, node_rank: int = 0) -> None:
    """Keeps what the ranks of this machine are started with; a secret inside a value is shown as `[redacted]`."""
    name = "environment.json" if node_rank == 0 else f"environment-{node_rank}.json"
    content = {"host": socket.gethostname(), "variables": kept_variables(environment)}
    text = redact(json.dumps(content, indent=1), environment)
    try:
        write_bytes(attempt_dir / name, text.encode() + b"\n")
    except OSError as error:
        raise EnvironmentFaultError(f"{attempt_dir}: cannot be written: {error.strerror}") from error
