"""Every difference between what was planned and what runs is named, with both values."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from accelerate.state import AcceleratorState, GradientState
from rank_factory import rank_plan

from trainer.runtime.accelerator import build_accelerator
from trainer.runtime.engagement import check_engagement
from trainer.runtime.model import build_model
from trainer.runtime.optimizers import build_optimizer
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.plan import Candidate
from trainer.spec.strategy import Attention, Checkpointing, LossHead, Optimizer, Precision, Sharding


@pytest.fixture(scope="module")
def built() -> Iterator[tuple]:
    """A model that runs in one process: no engine, fp32, foreach AdamW, sdpa, the chunked head, accumulation 2."""
    plan = rank_plan(Path("nowhere"), accumulation=2)
    accelerator = build_accelerator(plan, ds_config=None)
    model = build_model(plan)
    optimizer = build_optimizer(Optimizer.ADAMW, model, lr=1.0, weight_decay=0.1)
    yield (*accelerator.prepare(model, optimizer), accelerator, plan.chosen)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def changed(chosen: Candidate, change: dict[str, object]) -> Candidate:
    strategy = {name: value for name, value in change.items() if name in chosen.strategy.__struct_fields__}
    candidate = {name: value for name, value in change.items() if name not in strategy}
    return msgspec.structs.replace(chosen, strategy=msgspec.structs.replace(chosen.strategy, **strategy), **candidate)


def test_what_runs_as_planned_is_reported(built):
    model, optimizer, accelerator, chosen = built
    engaged = check_engagement(accelerator, model, optimizer, chosen)
    assert (engaged.engine_class, engaged.optimizer_class) == ("LlamaForCausalLM", "AdamW")
    assert (engaged.precision, engaged.loss, engaged.attention, engaged.accumulation) == ("fp32", "chunked", "sdpa", 2)
    assert (engaged.sharded_parameters, engaged.partition_elements, engaged.backend) == (0, None, None)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"num_ranks": 2}, "ranks: the plan says 2, 1 runs"),
        ({"sharding": Sharding.DDP}, "sharding: the plan says ddp, none runs"),
        ({"sharding": Sharding.FSDP}, "weights are sharded: the plan says True, False runs"),
        ({"sharding": Sharding.ZERO2}, "this rank owns a share of the state: the plan says True, False runs"),
        ({"precision": Precision.BF16_MIXED}, "precision: the plan says bf16-mixed, fp32 runs"),
        ({"precision": Precision.BF16}, "precision: the plan says bf16, fp32 runs"),
        ({"optimizer": Optimizer.SGD}, "optimizer: the plan says SGD, AdamW runs"),
        ({"optimizer": Optimizer.ADAMW_FUSED}, "fused optimizer: the plan says True, False runs"),
        ({"optimizer": Optimizer.DEEPSPEED_CPU_ADAM}, "decoupled weight decay: the plan says True, None runs"),
        ({"accumulation": 4}, "accumulation: the plan says 4, 2 runs"),
        ({"attention": Attention.EAGER}, "attention: the plan says eager, sdpa runs"),
        ({"loss": LossHead.EAGER}, "loss head: the plan says eager, chunked runs"),
        ({"checkpointing": Checkpointing.FULL}, "blocks are recomputed: the plan says True, False runs"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_each_difference_stops_the_run_with_both_values(built, change, line):
    model, optimizer, accelerator, chosen = built
    with pytest.raises(EnvironmentFaultError) as raised:
        check_engagement(accelerator, model, optimizer, changed(chosen, change))
    assert line in str(raised.value).splitlines()
