"""The one command that starts the ranks, and the environment it runs in. Both are pure: nothing is started here.

A launcher inherits whatever a shell has collected: variables of an earlier `accelerate` or torchrun, an MPI's, a list
of GPUs. Accelerate fills every open setting from them, so what would be taken for a setting is removed. Everything
else passes: proxies, NCCL settings, and secrets, which are never written to a file.

A `trainer.py` in the working directory must not be taken for ours. PYTHONSAFEPATH keeps the working directory out of
the module path, but Accelerate's DeepSpeed launcher puts it back through PYTHONPATH, and so does an empty entry of a
user's own PYTHONPATH. Hence our packages come first in PYTHONPATH.

The folder of the interpreter comes first in PATH: a rank that loads a compiled operator runs `ninja`, which is
installed there, and a virtual environment need not be active.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from launch.engine.accelerate_config import accelerate_file
from launch.probe.gpu_selection import cuda_variables
from trainer.spec.hardware import DeviceKind
from trainer.spec.plan import Plan

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

_PACKAGES = Path(__file__).resolve().parents[2]
_PROGRAMS = Path(sys.executable).parent  # not resolved: the link in a virtual environment is the one meant


def launch_command(attempt_dir: Path, *, log_dir: Path | None, python: str, node_rank: int = 0) -> list[str]:
    """The argv that starts every rank of this machine, as the files in the attempt say; `python` has the libraries."""
    folder = attempt_dir.absolute()
    argv = [python, "-m", "accelerate.commands.launch", "--config_file", str(accelerate_file(folder, node_rank))]
    argv += ["-m", "trainer", str(folder / "plan.json")]
    return argv if log_dir is None else [*argv, "--log-dir", str(log_dir.absolute())]


def launch_environment(base: Mapping[str, str], plan: Plan, *, extensions_dir: Path, cores: int) -> dict[str, str]:
    """`base` without other launchers' settings and with ours; `cores` are those this machine's ranks share."""
    kept = {name: value for name, value in base.items() if not _is_stale(name)}
    ranks_here = max(1, plan.chosen.num_ranks // plan.num_machines)
    ours = {
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": _first(_PACKAGES, kept.get("PYTHONPATH", "")),
        "PATH": _first(_PROGRAMS, kept.get("PATH", os.defpath)),
        "OMP_NUM_THREADS": str(max(1, cores // ranks_here)),
        "TOKENIZERS_PARALLELISM": "false",  # the ranks fork; a tokenizer's threads would not survive it
        "TORCH_EXTENSIONS_DIR": str(extensions_dir),
        "DS_ACCELERATOR": plan.device_kind.value,
        "PET_SIGNALS_TO_HANDLE": "SIGQUIT",  # torchrun ends its ranks at a TERM; they save at it, and end themselves
    }
    if plan.chosen.flash_kernel is not None:
        ours["HF_HUB_OFFLINE"] = "1"  # it is in the cache; no rank asks the hub, nor fetches what is not named
    return kept | ours | (_cuda(kept, plan) if plan.device_kind is DeviceKind.CUDA else {})


def _is_stale(name: str) -> bool:
    return name in _STALE_NAMES or name.startswith(_STALE_PREFIXES)


def _first(folder: Path, path: str) -> str:
    """`path` with `folder` before its entries; an empty entry, which means the working directory, is left out."""
    return os.pathsep.join([str(folder), *(entry for entry in path.split(os.pathsep) if entry)])


def _cuda(kept: Mapping[str, str], plan: Plan) -> dict[str, str]:
    ours = cuda_variables(plan.hardware, plan.chosen.num_ranks, kept)
    if plan.hardware.needs_p2p_disabled and plan.chosen.num_ranks > 1:
        ours["NCCL_P2P_DISABLE"] = "1"  # whatever the shell says: these cards hang, or deliver other values
    return ours
