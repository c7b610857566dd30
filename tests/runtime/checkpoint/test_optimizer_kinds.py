"""State of every optimizer goes through a checkpoint bit for bit, in one process."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.trainer.runtime.checkpoint import CheckpointFolder, Ranks, check_compatible, import_state, import_weights
from shardwise.trainer.runtime.checkpoint.load import check_read_back
from shardwise.trainer.runtime.optimizers import build_optimizer, state_facts, unwrapped
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import InputProblemsError
from shardwise.trainer.spec.job.sections import GaloreJob
from shardwise.trainer.spec.optimizers import Optimizer

GALORE = {
    f"galore-{projection}-{inner}": (inner, GaloreJob(rank=8, update_gap=3, projection=projection))
    for projection in ("std", "reverse_std", "right", "left", "full")
    for inner in (Optimizer.ADAMW, Optimizer.ADAFACTOR)
}
KINDS = {each.value: (each, None) for each in Optimizer if each is not Optimizer.DEEPSPEED_CPU_ADAM} | GALORE | {
    "in the backward pass": (Optimizer.ADAMW, None),
    "layer by layer": (Optimizer.ADAMW, GaloreJob(rank=8, update_gap=3, layerwise=True)),
}  # fmt: skip

# Projections differ in what is saved, not in how: one of them stands for all but in the comparison in fp32.
FEW_KINDS = [kind for kind in KINDS if kind not in GALORE or kind == "galore-std-adamw"]
RUNS = [(torch.float32, kind) for kind in KINDS] + [(torch.bfloat16, kind) for kind in FEW_KINDS]


@pytest.fixture(scope="module")
def build_model(tiny) -> Callable[..., nn.Module]:
    """Matrices from 4,096 elements on, which bitsandbytes keeps in 8 bit, and others; the last block of most is cut."""
    return partial(tiny.build_model, hidden_size=66, intermediate_size=101)


def build(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    optimizer, galore = KINDS[kind]
    in_backward = kind == "in the backward pass"
    return build_optimizer(optimizer, model, lr=3e-3, weight_decay=0.1, galore=galore, in_backward=in_backward)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, start: int, stop: int) -> list[float]:
    losses = []
    for step in range(start, stop):
        rows = torch.randint(0, 127, (4, 16), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(root: Path, model: nn.Module, built: object, tiny, step: int, **changed: Any) -> None:
    folder = tiny.save(root, model, built, step, facts=tiny.build_facts(step, **changed))
    check_read_back(folder, model=model, optimizer=built, sharding=Sharding.NONE, ranks=Ranks.alone())


def resume(model: nn.Module, checkpoint: CheckpointFolder, kind: str) -> tuple[nn.Module, Any, int]:
    import_weights(model, checkpoint)
    optimizer = build(model, kind)
    return model, optimizer, import_state(model, optimizer, checkpoint, sharding=Sharding.NONE)


@pytest.mark.parametrize(("dtype", "kind"), RUNS, ids=str)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(dtype, kind, build_model, tiny, newest, tmp_path):
    """Five steps, five more; projectors are made anew in between, every third step.

    Going back to what was saved, the optimizer that is there continues likewise.
    """
    model = build_model().to(dtype)
    optimizer = build(model, kind)
    train(model, optimizer, start=0, stop=5)
    save(tmp_path, model, optimizer, tiny, 5)
    saved_digest, retained = tiny.digest(model, optimizer), copy.deepcopy(state_facts(unwrapped(optimizer)))
    uninterrupted = train(model, optimizer, start=5, stop=10)
    resumed_model, resumed, num_coded_anew = resume(build_model(seed=9).to(dtype), newest(tmp_path), kind)
    assert num_coded_anew == 0
    assert tiny.digest(resumed_model, resumed) == saved_digest
    facts = state_facts(unwrapped(resumed))
    names = ("optimizer_state", "optimizer_state_bytes", "projectors")
    assert {name: facts.get(name) for name in names} == {name: retained.get(name) for name in names}
    assert train(resumed_model, resumed, start=5, stop=10) == uninterrupted
    assert tiny.digest(resumed_model, resumed) == tiny.digest(model, optimizer)
    import_weights(model, newest(tmp_path))
    import_state(model, optimizer, newest(tmp_path), sharding=Sharding.NONE)
    assert tiny.digest(model, optimizer) == saved_digest
    assert train(model, optimizer, start=5, stop=10) == uninterrupted


@pytest.mark.parametrize(
    ("saved", "wanted"), [("adamw", "paged_adamw"), ("paged_adamw", "adamw_fused"), ("adamw_8bit", "paged_adamw_8bit")]
)
def test_optimizers_whose_state_is_the_same_go_on_from_each_other(saved, wanted, build_model, tiny, newest, tmp_path):
    model = build_model()
    optimizer = build(model, saved)
    train(model, optimizer, start=0, stop=3)
    save(tmp_path, model, optimizer, tiny, 3, optimizer=Optimizer(saved))
    uninterrupted = train(model, optimizer, start=3, stop=6)
    check_compatible(newest(tmp_path), tiny.build_facts(3, optimizer=Optimizer(wanted)))
    resumed_model, resumed, num_coded_anew = resume(build_model(seed=9), newest(tmp_path), wanted)
    assert num_coded_anew == 0
    losses = train(resumed_model, resumed, start=3, stop=6)
    assert losses == pytest.approx(uninterrupted, abs=1e-6)


@pytest.mark.parametrize("kind", ["adamw_8bit", "lion_8bit"])
def test_a_moment_in_8_bit_fills_one_in_fp32_with_the_values_of_its_codes(kind, build_model, tiny, newest, tmp_path):
    """As where another number of ranks cuts a parameter into shards too small for 8 bit."""
    from bitsandbytes.functional import dequantize_blockwise

    model = build_model()
    optimizer = build(model, kind)
    train(model, optimizer, start=0, stop=3)
    save(tmp_path, model, optimizer, tiny, 3, optimizer=Optimizer(kind))
    in_fp32: Any = build(model, kind)
    in_fp32.args.min_8bit_size = 10**9
    import_state(model, in_fp32, newest(tmp_path), sharding=Sharding.NONE)
    coded = {each: state for each, state in optimizer.state.items() if state["state1"].dtype is torch.uint8}
    assert len(coded) > 2
    for parameter, state in coded.items():
        values = dequantize_blockwise(state["state1"], absmax=state["absmax1"], code=state["qmap1"], blocksize=256)
        assert in_fp32.state[parameter]["state1"].dtype is torch.float32
        assert torch.equal(in_fp32.state[parameter]["state1"], values)


def test_another_rank_of_galore_is_another_kind_of_training(tiny, trained, newest, tmp_path):
    tiny.save(tmp_path, *trained, 2, facts=tiny.build_facts(2, galore=GaloreJob(rank=8)))
    checkpoint = newest(tmp_path)
    check_compatible(checkpoint, tiny.build_facts(2, galore=GaloreJob(rank=8, update_gap=50)))
    for other, kind in ((GaloreJob(rank=4), "galore of rank 4"), (None, "all weights")):
        with pytest.raises(InputProblemsError, match=f"it has galore of rank 8, .* this job {kind}"):
            check_compatible(checkpoint, tiny.build_facts(2, galore=other))
