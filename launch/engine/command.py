"""The command that starts the ranks, its environment (both pure), and the folder of an attempt with their files.

A launcher inherits variables of an earlier `accelerate` or torchrun, of an MPI, a list of GPUs. Accelerate fills every
open setting from them, so all that it could read as a setting is removed. Everything else passes: proxies, NCCL
settings, and secrets, which are never written to a file.

A `trainer.py` in the working directory must not shadow this package. PYTHONSAFEPATH keeps the working directory out of
the module path, but Accelerate's DeepSpeed launcher puts it back through PYTHONPATH, and so does an empty entry of a
user's own PYTHONPATH. Hence our packages come first in PYTHONPATH.

The folder of the interpreter comes first in PATH: a rank that loads a compiled operator runs `ninja`, which is
installed there, and a virtual environment need not be active.
"""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import yaml

from shardwise.launch.engine.config import accelerate_config, accelerate_file, deepspeed_config
from shardwise.launch.engine.offload import nvme_folder
from shardwise.launch.probe.gpu_selection import cuda_variables
from shardwise.launch.rundir import paths as run_dirs
from shardwise.launch.worker import import_settings, with_first
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.plan import Candidate, Plan

# Read as settings by Accelerate, DeepSpeed, torch.distributed or their MPI discovery.
_STALE_PREFIXES = (
    "ACCELERATE_",
    "FSDP_",
    "PARALLELISM_CONFIG_",
    "MEGATRON_LM_",
    "TORCHELASTIC_",
    "PET_",  # torchrun reads each of its options from one of these
    "OMPI_COMM_WORLD_",
    "MV2_COMM_WORLD_",
    "PMI_",
)
_STALE_NAMES = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "NODE_RANK",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "CROSS_SIZE", "CROSS_RANK",
    "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR", "FORK_LAUNCHED", "MPI_LOCALNRANKS", "MPI_LOCALRANKID",
})  # fmt: skip

_PROGRAMS = Path(sys.executable).parent  # not resolved: the link in a virtual environment counts


def launch_command(attempt_dir: Path, *, log_dir: Path | None, python: str, node_rank: int = 0) -> list[str]:
    """The argv that starts every rank of this machine from the files of the attempt; `python` has the libraries."""
    folder = attempt_dir.absolute()
    argv = [python, "-m", "accelerate.commands.launch", "--config_file", str(accelerate_file(folder, node_rank))]
    argv += ["-m", "shardwise.trainer", str(folder / "plan.json")]
    return argv if log_dir is None else [*argv, "--log-dir", str(log_dir.absolute())]


def launch_environment(base: Mapping[str, str], plan: Plan, *, extensions_dir: Path, cores: int) -> dict[str, str]:
    """`base` with our settings instead of other launchers'; this machine's ranks share `cores`."""
    inherited = {name: value for name, value in base.items() if not _is_stale(name)}
    ranks_here = max(1, plan.chosen.num_ranks // plan.num_machines)
    ours = {
        **import_settings(inherited),
        "PATH": with_first(_PROGRAMS, inherited.get("PATH", os.defpath)),
        "OMP_NUM_THREADS": str(max(1, cores // ranks_here)),
        "TOKENIZERS_PARALLELISM": "false",  # the ranks fork; a tokenizer's threads would not survive it
        "TORCH_EXTENSIONS_DIR": str(extensions_dir),
        "DS_ACCELERATOR": plan.device_kind.value,
        "PET_SIGNALS_TO_HANDLE": "SIGQUIT",  # torchrun would end its ranks at a TERM; they save and end themselves
    }
    if plan.chosen.flash_kernel is not None:
        ours["HF_HUB_OFFLINE"] = "1"  # it is in the cache; no rank connects to the hub
    return inherited | ours | (_cuda(inherited, plan) if plan.device_kind is DeviceKind.CUDA else {})


def _is_stale(name: str) -> bool:
    return name in _STALE_NAMES or name.startswith(_STALE_PREFIXES)


def _cuda(inherited: Mapping[str, str], plan: Plan) -> dict[str, str]:
    ours = cuda_variables(plan.hardware, plan.chosen.num_ranks, inherited)
    if plan.hardware.needs_p2p_disabled and plan.chosen.num_ranks > 1:
        ours["NCCL_P2P_DISABLE"] = "1"  # overrides the shell: these cards hang, or deliver other values
    return ours


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
        head = socket.gethostname() if attempt_plan.num_machines > 1 else None  # each agent writes its own later
        settings = accelerate_config(attempt_plan, attempt_dir=attempt_dir, head=head)
        codec.write_bytes(attempt_dir / "accelerate.yaml", yaml.safe_dump(settings, sort_keys=False).encode())
    except OSError as error:
        raise EnvironmentFaultError(f"{attempt_dir}: cannot be written: {error.strerror}") from error
    return attempt_dir
