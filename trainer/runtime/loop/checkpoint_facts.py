"""Facts of a run that its checkpoints record, and which runs have checkpoints.

A run that trains adapters saves these alone. Its base is known again by a fingerprint: of its safetensors files, names,
sizes, headers and a sample of their bytes, as hashing all of them would take minutes; of a base that was drawn, its
config and the seed.
"""

import hashlib
import os
from pathlib import Path

import msgspec

from trainer.runtime.checkpoint import CheckpointFacts, config_sha256
from trainer.runtime.checkpoint import LossScaler as SavedScaler
from trainer.runtime.checkpoint.layout.optimizer_state import check_supported
from trainer.runtime.optimizers import unwrapped
from trainer.runtime.precision.mixed_precision import LossScaler
from trainer.runtime.run.report_writer import installed_versions
from trainer.runtime.run.state import RunState
from trainer.spec.errors import InputError
from trainer.spec.plan import Plan
from trainer.spec.strategy import Method

_NUM_SAMPLES, _SAMPLE_BYTES = 64, 64 << 10  # of each file, spread evenly; the first holds the header's beginning


def obstacle_to_checkpoints(optimizer: object) -> str | None:
    """Why a run of this (wrapped) optimizer saves no checkpoint, in a sentence; None where it does."""
    try:
        check_supported(unwrapped(optimizer))
    except InputError as error:
        return str(error)
    return None


def facts_of(plan: Plan, state: RunState, scaler: LossScaler | None = None) -> CheckpointFacts:
    """Facts of the run at this moment; `scaler` is that of an fp16 run."""
    method = plan.chosen.method
    return CheckpointFacts(
        run_name=plan.name,
        step=state.step,
        tokens_seen=state.tokens_seen,
        seed=plan.job.train.seed,
        sequences_per_step=plan.schedule.sequences_per_step,
        tokens_per_step=plan.schedule.tokens_per_step,
        model_config_sha256=config_sha256(plan.model_config),
        data_fingerprint=plan.data.fingerprint,
        optimizer=plan.chosen.strategy.optimizer,
        lora=plan.job.train.lora if method.freezes_base else None,
        galore=plan.job.train.galore if method is Method.GALORE else None,
        is_quantised=method is Method.QLORA,
        base_fingerprint=base_fingerprint(plan) if method.freezes_base else None,
        sharding=plan.chosen.strategy.sharding,
        world_size=plan.chosen.num_ranks,
        precision=plan.chosen.strategy.precision,
        versions=installed_versions(),
        spikes=state.spikes,
        evaluations=tuple(state.evaluations),
        best_step=state.best_step,
        loss_scaler=None
        if scaler is None
        else SavedScaler(scale=scaler.loss_scale, growth_tracker=scaler.growth_tracker),
    )


def base_fingerprint(plan: Plan) -> str:
    """Identity of a frozen base, independent of the location of its files."""
    digest = hashlib.sha256()
    if plan.model_path is None:
        digest.update(msgspec.json.encode([plan.model_config, plan.job.train.seed], order="sorted"))
        return digest.hexdigest()[:32]
    for path in sorted(Path(plan.model_path).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for sample in range(_NUM_SAMPLES):
                file.seek(sample * max(size - _SAMPLE_BYTES, 0) // (_NUM_SAMPLES - 1), os.SEEK_SET)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
