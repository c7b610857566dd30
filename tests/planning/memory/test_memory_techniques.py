"""The closed form against the allocator: peaks of a steady step of a tiny model on this CPU, by profiler events."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from estimate_factory import config, configuration, cpu, shape_of
from msgspec.structs import replace
from rank_factory import rank_plan
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from shardwise.launch.probe.host import read_host
from shardwise.trainer.planning.memory import estimate_memory, grouped
from shardwise.trainer.runtime.loop.memory_profile import MemoryProfile
from shardwise.trainer.runtime.models.build import build_trainable
from shardwise.trainer.runtime.optimizers import build_optimizer, set_learning_rate, unwrapped, updates_in_backward
from shardwise.trainer.runtime.precision.mixed_precision import install_precision
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.job.sections import GaloreJob, LoraJob
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import MemoryEstimate
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision

FIELDS = config(2048, 128, 352, 4, 4, 2, is_tied=True, head_dim=32)
LORA, GALORE = LoraJob(rank=8), GaloreJob(rank=16)
DORA = LoraJob(rank=8, dora=True)  # holds more than its adapters alone: what leaving it saves is compared
LAYERWISE = GaloreJob(rank=16, layerwise=True)
CHUNK_TOKENS = 128
TOLERANCE = 0.02
SAVING_TOLERANCE = 0.10
FULL, EAGER = Checkpointing.FULL, LossHead.EAGER

Choices = Mapping[str, Any]
LARGE: Choices = {"micro_batch": 4, "seq_len": 128}  # activations are most of it
RECOMPUTED: Choices = {**LARGE, "checkpointing": FULL, "loss": EAGER}  # its peak is in the loss, where all is kept
SMALL: Choices = {"micro_batch": 1, "seq_len": 64}  # states are


class Technique(NamedTuple):
    """What is chosen, beside what it is measured against."""

    name: str
    with_it: Choices
    without: Choices


def against(base: Choices, *, without: Choices | None = None, **choices: Any) -> Technique:
    name = " ".join(str(getattr(value, "name", value)).lower() for value in choices.values())
    return Technique(name, {**base, **choices}, {**base, **(without or {})})


TECHNIQUES = [
    against(LARGE, checkpointing=FULL),
    against(LARGE, checkpointing=Checkpointing.SELECTIVE),
    against(LARGE, checkpointing=Checkpointing.ATTENTION),
    against(LARGE, checkpointing=Checkpointing.EVERY_N, checkpoint_every_n=2),
    against(LARGE, checkpointing=Checkpointing.EVERY_N, checkpoint_every_n=4),
    against(LARGE, checkpointing=Checkpointing.SELECTIVE, precision=Precision.BF16_MIXED,
            without={"precision": Precision.BF16_MIXED}),
    against(LARGE, loss=LossHead.CHUNKED, without={"loss": EAGER}),
    against(LARGE, precision=Precision.BF16_MIXED),
    against(LARGE, activation_offload=True, loss=EAGER, without={"loss": EAGER}),
    against(RECOMPUTED, activation_offload=True, without={}),
    against(SMALL, precision=Precision.BF16),
    against(SMALL, method=Method.LORA),
    against(LARGE, method=Method.LORA, checkpointing=FULL, without={"checkpointing": FULL}),
    against(LARGE, method=Method.LORA, precision=Precision.BF16_MIXED, without={"precision": Precision.BF16_MIXED}),
    against(LARGE, method=Method.LORA, lora=LORA, without={"method": Method.LORA, "lora": DORA}),
    against({**LARGE, "checkpointing": FULL}, method=Method.LORA, lora=LORA,
            without={"method": Method.LORA, "lora": DORA}),
    against(LARGE, method=Method.LORA, lora=LORA, precision=Precision.BF16_MIXED,
            without={"method": Method.LORA, "lora": DORA, "precision": Precision.BF16_MIXED}),
    against(SMALL, optimizer=Optimizer.LION, without={"optimizer": Optimizer.ADAMW}),
    against(SMALL, optimizer=Optimizer.ADAFACTOR),
    against(SMALL, optimizer=Optimizer.MUON),
    against(SMALL, optimizer=Optimizer.LOMO),
    against(SMALL, optimizer=Optimizer.ADALOMO),
    against(SMALL, optimizer_in_backward=True),
    against(SMALL, method=Method.GALORE, optimizer=Optimizer.ADAMW, galore=GALORE),
    against(SMALL, method=Method.GALORE, optimizer=Optimizer.ADAFACTOR, galore=GALORE),
    against(SMALL, method=Method.GALORE, optimizer=Optimizer.ADAMW, galore=LAYERWISE),
]  # fmt: skip
# On a CPU bitsandbytes updates 8-bit state through fp32 copies of a tensor: the state itself is what can be compared.
EIGHT_BIT = [Optimizer.ADAMW_8BIT, Optimizer.LION_8BIT, Optimizer.LAMB_8BIT, Optimizer.ADEMAMIX_8BIT]


FOREACH, MIXED, BF16 = {"optimizer": Optimizer.ADAMW}, Precision.BF16_MIXED, Precision.BF16
UNTIED, ONE_ROW = {"tie_word_embeddings": False}, {"micro_batch": 1, "seq_len": 32}
# Rows in 16 bit: a CPU without bf16 takes twenty times as long for a product.
SHORT: Choices = {"seq_len": 64, **FOREACH}
BLOCKS: Choices = {**SHORT, "checkpointing": FULL, "micro_batch": 8}
DDP: Choices = {"sharding": Sharding.DDP, "checkpointing": FULL}
PLAIN: list[Choices] = [  # of `defaults`
    FOREACH, {**FOREACH, "micro_batch": 16, "checkpointing": FULL}, {**FOREACH, "loss": EAGER},
    {**FOREACH, "loss": EAGER, "checkpointing": FULL, "micro_batch": 8, "fields": UNTIED},
    {**FOREACH, "checkpointing": FULL, "loss_chunk_tokens": 256, "micro_batch": 8},
    {"fields": UNTIED, "checkpointing": FULL, "accumulation": 2}, {**ONE_ROW, "accumulation": 2},
    {**ONE_ROW, "loss": EAGER}, {**SHORT, "micro_batch": 1}, {**SHORT, "precision": MIXED},
    {**BLOCKS, "precision": MIXED},
    {**SHORT, "precision": MIXED, "checkpointing": FULL, "loss": EAGER, "fields": UNTIED},
    {**BLOCKS, "precision": MIXED, "accumulation": 2, "loss_chunk_tokens": 256},
    {**ONE_ROW, "precision": MIXED, "fields": UNTIED}, {**BLOCKS, "precision": BF16},
    {**BLOCKS, "precision": BF16, "micro_batch": 16, "loss_chunk_tokens": 32},  # in a block: few logits
    {**SHORT, "precision": BF16, "loss": EAGER},
    *({**BLOCKS, "precision": each, "loss": LossHead.FUSED} for each in (Precision.FP32, MIXED, BF16)),
    {**FOREACH, "attention": Attention.EAGER, "checkpointing": FULL},
    {"fields": {"model_type": "qwen2"}},
    {**SHORT, "precision": MIXED, "fields": {"model_type": "qwen3"}},
    {**DDP, **FOREACH, "micro_batch": 8},
    {"sharding": Sharding.DDP, **ONE_ROW},
    {**DDP, **SHORT, "precision": MIXED, "accumulation": 2, "fields": UNTIED},
]  # fmt: skip


class Bytes(NamedTuple):
    peak: int
    steady: int
    parts: dict[str, int]


def defaults(choices: Choices) -> dict[str, Any]:
    return {
        "precision": Precision.FP32, "optimizer": Optimizer.ADAMW_FUSED, "method": Method.FULL, "lora": LORA,
        "checkpointing": Checkpointing.NONE, "loss": LossHead.CHUNKED, "galore": GALORE, "sharding": Sharding.NONE,
        "loss_chunk_tokens": CHUNK_TOKENS, "fields": {}, "micro_batch": 4, "seq_len": 128, "accumulation": 1, **choices,
    }  # fmt: skip


def measured(choices: Choices) -> Bytes:
    """A steady step; what activation offload copied to host RAM is not on the device."""
    chosen = defaults(choices)
    optimizer, galore = chosen.pop("optimizer"), chosen.pop("galore")
    lora, seq_len, is_ddp = chosen.pop("lora"), chosen["seq_len"], chosen.pop("sharding") is Sharding.DDP
    plan = rank_plan(Path("nowhere"), model_config={**FIELDS, **chosen.pop("fields")}, **chosen)
    candidate = replace(plan.chosen, strategy=replace(plan.chosen.strategy, optimizer=optimizer))
    job = replace(plan.job, train=replace(plan.job.train, lora=lora, galore=galore))
    fields = {**plan.model_config, "max_position_embeddings": seq_len}
    plan = replace(plan, job=job, model_config=fields, candidates=(candidate,))
    model, installed = build_trainable(plan)
    install_precision(model, installed, candidate, DeviceKind.CPU)
    built = build_optimizer(
        optimizer, model, lr=1e-4, weight_decay=0.1, galore=galore if candidate.method is Method.GALORE else None,
        in_backward=candidate.optimizer_in_backward,
    )  # fmt: skip
    wrapped: Any = DistributedDataParallel(model, gradient_as_bucket_view=True) if is_ddp else model

    def step() -> None:
        set_learning_rate(unwrapped(built), 1e-4)
        for index in range(candidate.accumulation):
            ids = torch.randint(0, FIELDS["vocab_size"], (candidate.micro_batch, seq_len))
            is_mixed, waits = candidate.strategy.precision is MIXED, index < candidate.accumulation - 1
            with wrapped.no_sync() if is_ddp and waits else nullcontext():
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_mixed):
                    loss = wrapped(input_ids=ids, labels=ids.clone())
                loss.backward()
            del ids, loss
        if not updates_in_backward(built):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            built.step()
            built.zero_grad(set_to_none=True)

    step()
    if is_ddp:
        step()  # it orders its buckets anew after the first
    profile = MemoryProfile(wrapped, built, torch.device("cpu"))
    with profile.step():
        step()
    figures = profile.figures()
    moved = 0 if installed.offload is None else installed.offload.moved_bytes
    return Bytes(figures.peak_allocated_bytes - moved, figures.steady_allocated_bytes, figures.parts)


def estimate(choices: Choices) -> MemoryEstimate:
    chosen = defaults(choices)
    if chosen["loss"] is not LossHead.CHUNKED:
        chosen["loss_chunk_tokens"] = None
    shape = shape_of({**FIELDS, **chosen.pop("fields")})
    num_ranks = 1 if chosen["sharding"] is Sharding.NONE else 2
    return estimate_memory(shape, configuration(**chosen, num_ranks=num_ranks), cpu(flags=read_host().cpu_flags))


def predicted(choices: Choices) -> Bytes:
    found = estimate(choices)
    return Bytes(found.peak_allocated_bytes, found.steady_allocated_bytes, grouped(found.parts))


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    """DDP's buckets are as large in it as in any."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def name_of(choices: Choices) -> str:
    return " ".join(str(value) for value in choices.values())


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("choices", PLAIN, ids=name_of)
def test_what_a_plain_step_holds_is_what_was_predicted(choices):
    expected, seen = predicted(choices), measured(choices)
    assert expected.peak == pytest.approx(seen.peak, rel=TOLERANCE)
    assert expected.steady == pytest.approx(seen.steady, rel=0.001)
    for part in ("weights", "optimizer_state"):
        assert expected.parts[part] == pytest.approx(seen.parts[part], rel=0.001)
    # Gradients and activations together: the profiler sees a gradient when it is accumulated, not when it is made.
    transient = [each.parts["gradients"] + each.parts["activations"] for each in (expected, seen)]
    assert transient[0] == pytest.approx(transient[1], rel=0.03)


def test_plain_steps_reach_every_kind_of_peak():
    assert {estimate(choices).peak_event for choices in PLAIN} >= {
        "forward_end", "loss_backward", "head_backward", "block_backward_bottom", "gradients_complete",
        "optimizer_step",
    }  # fmt: skip


@pytest.fixture(scope="module")
def measure():
    """Each step is measured once, whatever is compared with it."""
    seen: dict[str, Bytes] = {}

    def once(choices: Choices) -> Bytes:
        key = repr(sorted(choices.items()))
        if key not in seen:
            seen[key] = measured(choices)
        return seen[key]

    return once


# bitsandbytes says that it finds no compiled 4-bit product; none is used.
@pytest.mark.filterwarnings("ignore:.*kernels.*:UserWarning")
@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_a_technique_saves_what_was_predicted(technique, measure):
    with_it, without = measure(technique.with_it), measure(technique.without)
    expected, expected_without = predicted(technique.with_it), predicted(technique.without)
    saving = without.peak - with_it.peak
    assert saving > 0.02 * without.peak
    assert expected_without.peak - expected.peak == pytest.approx(saving, rel=SAVING_TOLERANCE)
    assert expected.peak == pytest.approx(with_it.peak, rel=TOLERANCE)
    assert expected_without.peak == pytest.approx(without.peak, rel=TOLERANCE)


@pytest.mark.filterwarnings("ignore:.*kernels.*:UserWarning")
@pytest.mark.parametrize("optimizer", EIGHT_BIT)
def test_8_bit_state_is_as_small_as_predicted(optimizer, measure):
    with_it, without = {**SMALL, "optimizer": optimizer}, SMALL
    saving = measure(without).steady - measure(with_it).steady
    assert saving > 0.4 * measure(without).steady
    assert predicted(without).steady - predicted(with_it).steady == pytest.approx(saving, rel=0.005)
    assert predicted(with_it).peak == pytest.approx(measure(with_it).peak, rel=TOLERANCE)
