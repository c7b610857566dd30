"""The session of a rank: everything it builds before its first step, in the order that every engine needs.

An engine that shards weights is filled shard by shard: FSDP2 before the optimizer is built, whose groups hold shards;
ZeRO-3 after it, as a parameter that is cut no longer shows its shape. Whole weights go to their GPU tensor by tensor;
for ZeRO-1 and ZeRO-2, and on a CPU, they are loaded into the plain model before `prepare`. A checkpoint is chosen
before all of that and hashed meanwhile; it comes into the prepared engine, each rank reading its own ranges. A memory
cap is set when the libraries are loaded and the ranks have met, so that it counts what the plan counts.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from shardwise.trainer.runtime.checkpoint import (
    CheckpointFacts,
    CheckpointFolder,
    Ranks,
    base_fingerprint,
    check_compatible,
    config_sha256,
)
from shardwise.trainer.runtime.checkpoint import LossScaler as SavedScaler
from shardwise.trainer.runtime.checkpoint.load import Resumption, begin_resumption
from shardwise.trainer.runtime.checkpoint.optimizer_state import BLOCK_ELEMENTS
from shardwise.trainer.runtime.checkpoint.save import BackgroundSave
from shardwise.trainer.runtime.data.cache import TokenRows
from shardwise.trainer.runtime.data.documents import check_documents_apart
from shardwise.trainer.runtime.data.stream.rows import StreamRows
from shardwise.trainer.runtime.engines import engine_of
from shardwise.trainer.runtime.engines.accelerator import build_accelerator, verify_engine
from shardwise.trainer.runtime.engines.sharded_loading import loads_by_tensor
from shardwise.trainer.runtime.loop.memory_profile import cap_memory
from shardwise.trainer.runtime.models.build import Installed, build_meta_model, build_trainable
from shardwise.trainer.runtime.models.meta_model import MetaModel, blank
from shardwise.trainer.runtime.optimizers import build_optimizer, check_in_backward
from shardwise.trainer.runtime.precision.mixed_precision import LossScaler, install_precision
from shardwise.trainer.runtime.run.extension import Hooks, load_hooks
from shardwise.trainer.runtime.run.reach import check_reach
from shardwise.trainer.runtime.run.state import IncidentKind, ReportWriter, RunPaths, RunState, installed_versions
from shardwise.trainer.spec.data.shapes import packing_note
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method


@dataclass(slots=True)
class InFlight:
    """A checkpoint that is written while training continues; at most one."""

    save: BackgroundSave | None = None
    occasion: str = ""


@dataclass(frozen=True, slots=True)
class Session:
    """Everything a rank has built for its run."""

    plan: Plan
    paths: RunPaths
    writer: ReportWriter
    state: RunState
    accelerator: Accelerator
    ranks: Ranks
    model: nn.Module
    optimizer: Any  # Accelerate's wrapper around torch's or DeepSpeed's
    installed: Installed
    scaler: LossScaler | None  # of fp16, where the engine has none
    train_rows: TokenRows
    eval_rows: TokenRows | None
    tokenizer: PreTrainedTokenizerBase | None
    hooks: Hooks | None = None  # of the user's extensions file
    stream: StreamRows | None = None  # of a stream, whose first window is `train_rows`
    in_flight: InFlight = field(default_factory=InFlight)

    @property
    def is_first(self) -> bool:
        """True on the rank that writes for all."""
        return bool(self.accelerator.process_index == 0)


def build_session(plan: Plan, paths: RunPaths, writer: ReportWriter, state: RunState) -> Session:
    """Builds the engine, the model and the optimizer, checks that they are the planned ones, and resumes."""
    writer.write_status("starting the engine")
    check_reach()
    sharding = plan.chosen.strategy.sharding
    engine = engine_of(sharding)
    accelerator = build_accelerator(plan, ds_config=engine.read_config(paths.plan_dir))
    ranks = Ranks.distributed() if dist.is_initialized() and dist.get_world_size() > 1 else Ranks.alone()
    writer.write_status("loading the data")
    train_rows, eval_rows = _open_rows(plan)
    if plan.hardware.vram_cap_bytes is not None:
        cap, outside = plan.hardware.vram_cap_bytes, plan.chosen.memory.outside_bytes
        cap_memory(plan.device_kind, accelerator.device, cap, outside_bytes=outside)
    writer.write_status("loading the model")
    hooks = load_hooks(plan.extension)
    resumption = _begin_resumption(plan, paths, state, ranks)
    meta_model: MetaModel | None = None
    if loads_by_tensor(plan):
        meta_model, installed = build_meta_model(plan)
        model = meta_model.model
    else:
        model, installed = build_trainable(plan, hooks)
    if resumption is not None and meta_model is not None and not plan.chosen.method.freezes_base:
        meta_model = blank(meta_model)
    chosen = plan.chosen
    installed = install_precision(model, installed, chosen, plan.device_kind)
    check_in_backward(chosen, is_layerwise=plan.job.train.galore.layerwise)
    if meta_model is not None:
        engine.load_shards(meta_model, accelerator)
    optimizer = _build_optimizer(plan, model)
    if meta_model is not None:
        engine.cut_loaded(meta_model, accelerator, chosen.strategy.precision)
    writer.write_status("preparing the engine")
    wrapped, wrapped_optimizer = engine.prepare(accelerator, model, optimizer)
    if chosen.prefetch_two_blocks:
        engine.prefetch_two_blocks(wrapped)
    state.verified = verify_engine(
        accelerator, wrapped, wrapped_optimizer, installed, chosen, hybrid_mesh=plan.hybrid_mesh
    )
    scaler = engine.loss_scaler(wrapped, chosen.strategy.precision, plan.device_kind)
    if resumption is not None:
        num_coded_anew = resumption.load(wrapped, wrapped_optimizer, sharding=sharding)
        _continue_from(state, resumption.checkpoint, scaler, num_coded_anew=num_coded_anew)
    check_documents_apart(wrapped, plan, accelerator.device)
    _note_packing(plan, state)
    _note_copies(plan, state)
    return Session(
        plan=plan,
        paths=paths,
        writer=writer,
        state=state,
        accelerator=accelerator,
        ranks=ranks,
        model=wrapped,
        optimizer=wrapped_optimizer,
        installed=installed,
        scaler=scaler,
        train_rows=train_rows,
        eval_rows=eval_rows,
        tokenizer=_tokenizer(plan),
        hooks=hooks,
        stream=_stream(plan, paths, writer, state, is_first=bool(accelerator.process_index == 0)),
    )


def _note_packing(plan: Plan, state: RunState) -> None:
    """Notes in the report that rows are not packed, where only the model is the reason."""
    obstacle = plan.model_shape.packing_obstacle
    note = packing_note(plan.data.format, packing=plan.job.data.packing, obstacle=obstacle)
    if note is not None and not plan.data.is_packed:
        state.log.note(note)


def _note_copies(plan: Plan, state: RunState) -> None:
    """Notes in the report that some held-out rows are learned."""
    if plan.data.num_eval_copies and not plan.is_trial:
        state.log.note(
            f"{plan.data.num_eval_copies:,} held-out rows are also in data.train: the held-out loss is partly one of "
            "learned rows (data.drop_copies)",
            IncidentKind.AT_START,
        )


def _open_rows(plan: Plan) -> tuple[TokenRows, TokenRows | None]:
    """The prepared rows of training, and those of evaluation if there are any."""
    assert plan.data.cache_dir is not None, "a plan that is run has prepared data"
    cache_dir = Path(plan.place_of(plan.data.cache_dir))
    return TokenRows.open(cache_dir, "train"), TokenRows.open(cache_dir, "eval") if plan.data.num_eval_rows else None


def _build_optimizer(plan: Plan, model: nn.Module) -> Any:  # noqa: ANN401  # torch's or a library's
    chosen = plan.chosen
    return build_optimizer(
        chosen.strategy.optimizer,
        model,
        lr=plan.schedule.lr,
        weight_decay=plan.job.train.weight_decay,
        galore=plan.job.train.galore if chosen.method is Method.GALORE else None,
        in_backward=chosen.optimizer_in_backward,
    )


def facts_of(plan: Plan, state: RunState, scaler: LossScaler | None = None) -> CheckpointFacts:
    """Facts of the run at this moment; `scaler` is that of an fp16 run."""
    method = plan.chosen.method
    return CheckpointFacts(
        run_name=plan.name,
        step=state.step,
        tokens_seen=state.tokens_seen,
        targets_seen=state.targets_seen,
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


def _stream(plan: Plan, paths: RunPaths, writer: ReportWriter, state: RunState, *, is_first: bool) -> StreamRows | None:
    if not plan.data.is_stream:
        return None
    return StreamRows(
        plan,
        paths,
        on_wait=lambda message: writer.write_status(message, step=state.step),
        incidents=state.log,
        is_first=is_first,
    )


def _tokenizer(plan: Plan) -> PreTrainedTokenizerBase | None:
    if plan.tokenizer_path is None:
        return None
    tokenizer = AutoTokenizer.from_pretrained(plan.tokenizer_path, local_files_only=True, trust_remote_code=False)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def _begin_resumption(plan: Plan, paths: RunPaths, state: RunState, ranks: Ranks) -> Resumption | None:
    if not plan.resume:
        return None
    begun = begin_resumption(
        paths.resume_dir / "checkpoints",
        check=lambda checkpoint: check_compatible(checkpoint, facts_of(plan, state)),
        on_skip=lambda text: state.log.note(text, IncidentKind.AT_START),
        ranks=ranks,
    )
    if begun is None:
        raise EnvironmentFaultError(
            f"--resume: {paths.resume_dir / 'checkpoints'} holds no checkpoint; start again without --resume"
        )
    return begun


def _continue_from(
    state: RunState, checkpoint: CheckpointFolder, scaler: LossScaler | None, *, num_coded_anew: int
) -> None:
    if num_coded_anew:
        state.log.note(
            f"8-bit optimizer state lies in other blocks here than in the checkpoint: {num_coded_anew:,} blocks of "
            f"{BLOCK_ELEMENTS} values were coded anew, each value off by at most half a step of its code"
        )
    if scaler is not None and checkpoint.facts.loss_scaler is not None:
        scaler.restore(checkpoint.facts.loss_scaler.scale, checkpoint.facts.loss_scaler.growth_tracker)
    state.step = state.resumed_from_step = checkpoint.facts.step
    state.tokens_seen, state.targets_seen = checkpoint.facts.tokens_seen, checkpoint.facts.num_targets
    state.evaluations.extend(checkpoint.facts.evaluations)
    state.spikes = checkpoint.facts.spikes
    state.checkpoint = f"checkpoints/{checkpoint.path.name}"
