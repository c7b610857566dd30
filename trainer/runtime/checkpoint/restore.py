"""From a checkpoint back into a model and its optimizer, in the order that works under every engine.

Weights go into the plain model before `accelerator.prepare`: an engine's setters do not always refresh the copy it
computes with. Moments and step counts follow after it. Nothing here knows how many ranks wrote, or under which engine.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from trainer.runtime.checkpoint.engines import engine_of
from trainer.runtime.checkpoint.manifest import CheckpointFacts, CheckpointFolder, Manifest
from trainer.runtime.checkpoint.model_state import named_state
from trainer.runtime.checkpoint.optimizer_state import check_supported
from trainer.runtime.checkpoint.pieces import dtype_of, flat, type_of
from trainer.runtime.checkpoint.shards import OpenShards
from trainer.runtime.optimizers import unwrapped
from trainer.spec.errors import InputError, InputProblemsError
from trainer.spec.strategy import Optimizer, Sharding

_SHOWN = 3  # names in a message
_ADAM_FP32 = frozenset({Optimizer.ADAMW, Optimizer.ADAMW_FUSED, Optimizer.DEEPSPEED_CPU_ADAM})  # one state, exactly


def check_compatible(checkpoint: CheckpointFolder, facts: CheckpointFacts) -> None:
    """InputError, with both values, where the checkpoint is of another model, dataset, seed, batch or optimizer.

    Of `facts`, what the checkpoint may differ in is not looked at: step, tokens, engine, world size, precision.
    """
    saved = checkpoint.facts
    compared: tuple[tuple[str, object, object], ...] = (
        ("model (sha256 of its config)", saved.model_config_sha256[:12], facts.model_config_sha256[:12]),
        ("dataset (fingerprint)", saved.data_fingerprint, facts.data_fingerprint),
        ("train.seed", saved.seed, facts.seed),
        ("train.tokens_per_step", saved.tokens_per_step, facts.tokens_per_step),
        ("sequences per step", saved.sequences_per_step, facts.sequences_per_step),
        ("optimizer", *_optimizers(saved.optimizer, facts.optimizer)),
        ("kind of training", _kind(saved), _kind(facts)),
        ("base model (fingerprint)", (saved.base_fingerprint or "none")[:12], (facts.base_fingerprint or "none")[:12]),
    )
    where = f"{checkpoint.path.name} of {saved.run_name}"
    problems = [f"{where}: another {what}: it has {old}, this job {new}" for what, old, new in compared if old != new]
    if problems:
        raise InputProblemsError([*problems, "undo the change, or start a new run without --resume"])


def import_weights(model: nn.Module, checkpoint: CheckpointFolder) -> None:
    """Fills every parameter and persistent buffer of a plain model, before `accelerator.prepare`.

    InputError where names or shapes differ, or where the model holds fewer bits than the checkpoint (fp32 into bf16).
    """
    manifest = checkpoint.manifest
    state = named_state(model)
    _check_names(state, manifest)
    with OpenShards(checkpoint) as shards:
        for name, item in state.items():
            entry = manifest.entry(name).weight
            assert entry is not None, "check_manifest saw it"
            if tuple(item.tensor.shape) != entry.shape:
                raise InputError(
                    f"{name}: has shape {entry.shape} in the checkpoint, {tuple(item.tensor.shape)} in this job"
                )
            if item.tied_to is None:
                shards.fill(flat(item.tensor, name=name), entry, start=0, what=name)
            elif manifest.entry(name) is not manifest.entry(item.tied_to):
                raise InputError(f"{name}: is tied to {item.tied_to} in this job and not in the checkpoint")


def read_weights(checkpoint: CheckpointFolder) -> dict[str, torch.Tensor]:
    """Every saved weight by its name, a tied one once, without a model to put them in."""
    weights = {}
    with OpenShards(checkpoint) as shards:
        for name, entry in checkpoint.manifest.parameters.items():
            if entry.weight is not None:
                values = torch.empty(entry.weight.num_elements, dtype=dtype_of(entry.weight.type))
                shards.fill(values, entry.weight, start=0, what=name)
                weights[name] = values.view(entry.weight.shape)
    return weights


def import_optimizer(model: nn.Module, optimizer: object, checkpoint: CheckpointFolder, *, sharding: Sharding) -> None:
    """Fills moments and step counts after `accelerator.prepare`, without stepping; learning rates stay the job's."""
    engine, inner, manifest = engine_of(sharding), unwrapped(optimizer), checkpoint.manifest
    check_supported(inner)
    _check_names(named_state(model), manifest)
    pieces = engine.create_state(model, inner, manifest)
    with OpenShards(checkpoint) as shards:
        for piece in pieces:
            assert piece.state is not None, "weights are imported before"
            shards.fill(
                piece.values, manifest.entry(piece.name).state[piece.state], start=piece.start, what=piece.title
            )


def state_digest(model: nn.Module, optimizer: object, *, sharding: Sharding) -> str:
    """Hash over every weight, moment and step count this rank holds, by name: equal where all bits are equal."""
    engine, inner = engine_of(sharding), unwrapped(optimizer)
    digest = hashlib.sha256()
    for name, entry in sorted(engine.describe(model, inner).items()):
        digest.update(f"{name} {entry.tied_to} {entry.step}\n".encode())
    for piece in sorted(engine.held_pieces(model, inner), key=lambda piece: piece.title):
        digest.update(f"{piece.title} {piece.start} {type_of(piece.values)} {piece.num_elements}\n".encode())
        digest.update(piece.values.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _optimizers(saved: Optimizer, wanted: Optimizer) -> tuple[Optimizer, Optimizer]:
    """The two, as equal where their state means the same."""
    return (saved, saved) if {saved, wanted} <= _ADAM_FP32 else (saved, wanted)


def _kind(facts: CheckpointFacts) -> str:
    """`all weights`, or what the adapters are, as far as they mean another function with the same shapes."""
    lora = facts.lora
    if lora is None:
        return "all weights"
    base = "4-bit base, " if facts.is_quantised else ""
    scaling = "rank-stabilised " if lora.rslora else ""
    return f"{base}adapters of {scaling}rank {lora.rank}, alpha {lora.alpha:g}{', DoRA' if lora.dora else ''}"


def _check_names(names: Iterable[str], manifest: Manifest) -> None:
    ours, saved = set(names), set(manifest.parameters)
    for which, missing in (("the checkpoint has no", ours - saved), ("this job's model has no", saved - ours)):
        if missing:
            shown = ", ".join(sorted(missing)[:_SHOWN])
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise InputError(f"{which} {shown}{more}")
