"""The room that a run's checkpoints need on its disks, and the candidates that can resume from one.

A fallback that its ranks would refuse costs a start and teaches nothing, so the manifest is read here, without torch.
The remaining checks of the ranks (names, shapes, the base under adapters) are the same for every fallback of a plan.
"""

from pathlib import Path
from typing import Any

import msgspec

from shardwise.launch.engine.offload import check_nvme
from shardwise.launch.probe.disks import check_room
from shardwise.launch.rundir.paths import committed_checkpoints
from shardwise.trainer.spec.optimizers import Optimizer, have_same_state
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.strategy import Method, Precision


class SavedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Of a manifest's facts, what decides; the ranks read the whole of it, strictly."""

    step: int
    optimizer: Optimizer
    precision: Precision
    lora: dict[str, Any] | None = None
    galore: dict[str, Any] | None = None
    is_quantised: bool = False


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    facts: SavedFacts


def read_facts(checkpoint: Path) -> SavedFacts | None:
    """Of a checkpoint's folder; None if its manifest cannot be read: the ranks will say why."""
    try:
        return msgspec.json.decode((checkpoint / "MANIFEST.json").read_bytes(), type=_Manifest).facts
    except (OSError, msgspec.DecodeError):
        return None


def newest_facts(run_dir: Path) -> SavedFacts | None:
    """Of the newest checkpoint of a run whose manifest can be read; None if there is none."""
    facts = (read_facts(folder) for folder in reversed(committed_checkpoints(run_dir)))
    return next((each for each in facts if each is not None), None)


def obstacle_to_resume(saved: SavedFacts | None, candidate: Candidate) -> str | None:
    """Why the candidate cannot go on from what was saved, after its name in a sentence; None if it can."""
    if saved is None:
        return None
    strategy, method = candidate.strategy, candidate.method
    if not have_same_state(saved.optimizer, strategy.optimizer):
        return f"cannot go on from a checkpoint of {saved.optimizer}"
    if (saved.lora is not None) is not method.freezes_base or saved.is_quantised is not (method is Method.QLORA):
        return "trains other weights than the checkpoint holds"
    if (saved.galore is not None) is not (method is Method.GALORE):
        return "keeps moments of other gradients than the checkpoint holds"
    if strategy.precision.master_bytes < saved.precision.master_bytes:
        return f"keeps weights in fewer bits than the checkpoint of {saved.precision}"
    return None


EXPORT_BYTES_PER_PARAMETER = 4


def needed_disk_bytes(plan: Plan) -> int:
    """Bytes a run of this plan needs on the disk at once."""
    memory, freezes_base = plan.chosen.memory, plan.chosen.method.freezes_base
    export = memory.checkpoint_bytes if freezes_base else plan.model_shape.num_parameters * EXPORT_BYTES_PER_PARAMETER
    return export + memory.checkpoint_bytes * min(2, plan.job.checkpoint.keep + 1)


def check_disk(plan: Plan, run_dir: Path) -> None:
    """EnvironmentFaultError with both numbers if the run would fill a disk, or a quota on it."""
    check_nvme(plan)
    check_room(
        run_dir,
        num_bytes=needed_disk_bytes(plan),
        what="checkpoints and the exported model need",
        remedy="make room, or name another disk with output or --run-dir",
    )
