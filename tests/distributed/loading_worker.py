"""One rank that builds the engines of several plans, and looks at the weights they start from or at what they held.

    torchrun ... loading_worker.py PLAN.json[:start|:peak|:whole|:onto] [...]

`:start` leaves `start-RANK.json` beside a plan: the parameters, buffers and scales of packed weights whose bits are not
those of a model that one process builds as a whole, how many there are, whether ranks loaded their shards alone, and
whether the optimizer has each trained parameter once.
`:peak` leaves `peak-RANK.json`: the anonymous bytes above the level before loading, at the peak and at the end.
`:whole` does that for a model that every rank builds as a whole, as ZeRO-1 and ZeRO-2 have it.
`:onto` does that for one whose tensors go to its device one by one, which is the CPU here.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import torch
from rank_process import Peak, attempt, end_group
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.trainer.runtime.engines import engine_of, running_engine
from shardwise.trainer.runtime.engines.accelerator import build_accelerator
from shardwise.trainer.runtime.engines.sharded_loading import load_onto, loads_by_tensor
from shardwise.trainer.runtime.loop.session import build_session
from shardwise.trainer.runtime.models.build import build_meta_model, build_model, plain_model
from shardwise.trainer.runtime.optimizers import unwrapped
from shardwise.trainer.runtime.run.state import ReportWriter, RunState, run_paths
from shardwise.trainer.runtime.run.types import compute_type
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.plan import Plan


def main(arguments: list[str]) -> None:
    rank = int(os.environ["RANK"])
    for argument in arguments:
        name, _, kind = argument.partition(":")
        path, plan = Path(name), codec.read(Path(name), Plan)
        with attempt():
            if kind == "start":
                path.with_name(f"start-{rank}.json").write_text(json.dumps(look_at_start(path, plan, rank)))
            else:
                measured = measure_peak(path, plan, kind)
                path.with_name(f"peak-{rank}.json").write_text(json.dumps(measured))
    end_group()


def look_at_start(path: Path, plan: Plan, rank: int) -> dict[str, object]:
    paths = run_paths(path, started_at=datetime.now(UTC))
    session = build_session(plan, paths, ReportWriter(paths, rank=rank), RunState())
    model, engine = plain_model(session.model), running_engine(session.model)
    whole = {name: tensor.detach() for name, tensor in named_tensors(build_model(plan))}
    seen = dict(gathered(model))
    if plan.chosen.strategy.sharding is Sharding.ZERO3:  # which holds its weights in the computing type
        dtype = compute_type(plan.chosen.strategy.precision)
        whole |= {name: whole[name].to(dtype) for name, _ in model.named_parameters()}
    return {
        "differing": [name for name in whole if name not in seen or not equal(seen[name], whole[name])],
        "surplus": sorted(seen.keys() - whole.keys()),
        "num_tensors": len(seen),
        "loads_by_tensor": loads_by_tensor(plan),
        "is_updated": engine.updates_in_last_backward or updated(session.optimizer) == trained(model),
    }


def updated(optimizer: object) -> list[int]:
    return sorted(id(parameter) for group in unwrapped(optimizer).param_groups for parameter in group["params"])


def trained(model: nn.Module) -> list[int]:
    return sorted(id(parameter) for parameter in model.parameters() if parameter.requires_grad)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit: packed weights may look like numbers that are none."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, layer in model.named_modules():
        state = getattr(layer, "quant_state", None)
        if state is not None:
            yield from ((f"{path}.{name}", scales) for name, scales in state.as_dict(packed=True).items())


def gathered(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model as a whole, on every rank."""
    for name, tensor in named_tensors(model):
        with gathering(tensor, model):
            yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gathering(tensor: torch.Tensor, model: nn.Module):
    if not hasattr(next(model.parameters()), "ds_id"):
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    return GatheredParameters([tensor])


def measure_peak(path: Path, plan: Plan, kind: str) -> dict[str, int]:
    engine = engine_of(plan.chosen.strategy.sharding)
    accelerator = build_accelerator(plan, ds_config=engine.read_config(path.parent))
    with Peak() as peak:
        retained = load(plan, accelerator, kind)
    del retained
    return {"peak": max(peak.highest, peak.at_end), "end": peak.at_end}


def load(plan: Plan, accelerator, kind: str) -> object:
    if kind == "whole":
        return build_model(plan)
    meta_model, _ = build_meta_model(plan)
    if kind == "onto":
        load_onto(torch.device("cpu"), meta_model)
        return meta_model.model
    engine = engine_of(plan.chosen.strategy.sharding)
    engine.load_shards(meta_model, accelerator)
    engine.cut_loaded(meta_model, accelerator, plan.chosen.strategy.precision)
    return meta_model.model


if __name__ == "__main__":
    main(sys.argv[1:])
