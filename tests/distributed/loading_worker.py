"""One rank that builds the engines of several plans, and looks at the weights they start from or at what they held.

    rank_launch.py NUM_RANKS loading_worker.py PLAN.json:KIND [...]

Each kind leaves `KIND-RANK.json` beside the plan. Bytes are anonymous ones above the level before.

    start   the parameters, buffers and scales of packed weights whose bits are not those of a model that one process
            builds as a whole, how many there are, whether ranks loaded their shards alone, and whether the optimizer
            has each trained parameter once
    peak    bytes at the peak of loading and at its end
    save    the most bytes while a checkpoint is saved after one step, and while it is loaded into an engine that was
            built anew, above what that engine holds after it
"""

import json
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch
from msgspec.structs import replace
from rank_process import Peak, assert_as_planned, attempt, end_group
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.trainer.runtime.checkpoint import Save, find_checkpoint, import_state
from shardwise.trainer.runtime.engines import engine_of, running_engine
from shardwise.trainer.runtime.engines.accelerator import build_accelerator
from shardwise.trainer.runtime.engines.sharded_loading import loads_by_tensor
from shardwise.trainer.runtime.loop.course import train
from shardwise.trainer.runtime.loop.session import build_session, facts_of
from shardwise.trainer.runtime.models.build import build_meta_model, build_model, plain_model
from shardwise.trainer.runtime.optimizers import unwrapped
from shardwise.trainer.runtime.run.state import ReportWriter, RunPaths, RunState, run_paths
from shardwise.trainer.runtime.run.types import compute_type
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.plan import Plan

RANK = int(os.environ["RANK"])


def main(arguments: list[str]) -> None:
    for argument in arguments:
        name, _, kind = argument.partition(":")
        path, plan = Path(name), codec.read(Path(name), Plan)
        paths = run_paths(path, started_at=datetime.now(UTC))
        if kind == "save":
            with attempt():
                state = RunState()
                train(plan, paths, ReportWriter(paths, rank=RANK), state, lambda: False)
            assert_as_planned(state)
        with attempt():
            look = {"start": look_at_start, "save": measure_saving}.get(kind)
            seen = measure_peak(path, plan) if look is None else look(plan, paths)
            path.with_name(f"{kind}-{RANK}.json").write_text(json.dumps(seen))
    end_group()


def look_at_start(plan: Plan, paths: RunPaths) -> dict[str, object]:
    session = build_session(plan, paths, ReportWriter(paths, rank=RANK), RunState())
    model, engine = plain_model(session.model), running_engine(session.model)
    whole = {name: tensor.detach() for name, tensor in named_tensors(build_model(plan))}
    seen = dict(gathered(model))
    if plan.chosen.strategy.sharding is Sharding.ZERO3:  # which holds its weights in the computing type
        dtype = compute_type(plan.chosen.strategy.precision)
        whole |= {name: whole[name].to(dtype) for name, _ in model.named_parameters()}
    updated = [id(each) for group in unwrapped(session.optimizer).param_groups for each in group["params"]]
    trained = [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    return {
        "differing": [name for name in whole if name not in seen or not equal(seen[name], whole[name])],
        "surplus": sorted(seen.keys() - whole.keys()),
        "num_tensors": len(seen),
        "loads_by_tensor": loads_by_tensor(plan),
        "is_updated": engine.updates_in_last_backward or sorted(updated) == sorted(trained),
    }


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit: packed weights may look like numbers that are none."""
    bits = [tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, layer in model.named_modules():
        state = getattr(layer, "quant_state", None)
        if state is not None:
            yield from ((f"{path}.{name}", scales) for name, scales in state.as_dict(packed=True).items())


def gathered(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    is_partitioned = hasattr(next(model.parameters()), "ds_id")
    for name, tensor in named_tensors(model):
        with GatheredParameters([tensor], enabled=is_partitioned):
            yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def measure_peak(path: Path, plan: Plan) -> dict[str, int]:
    engine = engine_of(plan.chosen.strategy.sharding)
    accelerator = build_accelerator(plan, ds_config=engine.read_config(path.parent))
    with Peak() as peak:
        retained = load(plan, accelerator)
    del retained
    return {"peak": max(peak.highest, peak.at_end), "end": peak.at_end}


def load(plan: Plan, accelerator) -> object:
    meta_model, _ = build_meta_model(plan)
    engine = engine_of(plan.chosen.strategy.sharding)
    engine.load_shards(meta_model, accelerator)
    engine.cut_loaded(meta_model, accelerator, plan.chosen.strategy.precision)
    return meta_model.model


def measure_saving(plan: Plan, paths: RunPaths) -> dict[str, int]:
    sharding, state = plan.chosen.strategy.sharding, RunState()
    session = build_session(plan, paths, ReportWriter(paths, rank=RANK), state)
    checkpoint = find_checkpoint(paths.run_dir / "checkpoints", on_skip=print, ranks=session.ranks)
    assert checkpoint is not None
    with Peak() as loading:
        import_state(session.model, session.optimizer, checkpoint, sharding=sharding)
    with Peak() as saving:
        Save(
            paths.run_dir / "again", model=session.model, optimizer=session.optimizer, sharding=sharding,
            facts=replace(facts_of(plan, state), step=1), ranks=session.ranks, keep=1,
        ).run()  # fmt: skip
    return {"loading": loading.highest - loading.at_end, "kept": loading.at_end, "saving": saving.highest}


if __name__ == "__main__":
    main(sys.argv[1:])
