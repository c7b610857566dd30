"""State of one rank in bytes, worked out by hand: every sharding, offload, optimizer and method for one model.

Llama-3.1-8B: P parameters, L of them in the linear layers of its 32 blocks, A in adapters of rank 16 on all of those.
A row says what each rank of N holds on the device, pinned and pageable in host RAM, and on NVMe. An expression that
is wrong in the code and wrong here in the same way is what the dry runs are for.
"""

from typing import Any, NamedTuple

import pytest
from estimate_factory import CUBLAS_BYTES, LLAMA_8B, configuration, cpu, gpu
from msgspec.structs import replace

from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.device import Device
from shardwise.trainer.planning.engines.engine import States
from shardwise.trainer.planning.memory import estimate_memory
from shardwise.trainer.planning.memory.states import model_states
from shardwise.trainer.planning.policy.precision_policy import dims_of, policy_of
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.job.sections import GaloreJob, LoraJob
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Checkpointing, Method, Precision, Quant

P, L, V, H, F, KV = 8_030_261_248, 6_979_321_856, 128_256, 4096, 14_336, 1024
A = 32 * 16 * (2 * (H + H) + 2 * (H + KV) + 3 * (H + F))
M = 32 * (2 * H + 2 * KV + 2 * F + H)  # rows of those, each with a magnitude under DoRA
NORMS = 65 * H
FULL, LORA, QLORA, GALORE = Method.FULL, Method.LORA, Method.QLORA, Method.GALORE
BF16, FP32 = Precision.BF16, Precision.FP32
CPU_ADAM = Optimizer.DEEPSPEED_CPU_ADAM
A100S = gpu()


class Row(NamedTuple):
    chosen: dict[str, Any]
    weights: float
    gradients: float
    optimizer_state: float
    master_weights: float = 0
    quant_state: float = 0
    adapters: float = 0
    managed: float = 0
    pinned: float = 0
    pageable: float = 0
    nvme: float = 0


def at(sharding: Sharding = Sharding.NONE, num_ranks: int = 1, **more: Any) -> dict[str, Any]:
    return {"sharding": sharding, "num_ranks": num_ranks, **more}


def offloaded(sharding: Sharding, offload: Offload) -> dict[str, Any]:
    return at(sharding, 8, offload=offload, optimizer=CPU_ADAM)


HOST_STATE = (4 + 8 + 4 + 2) * P / 8  # masters, moments, gradients in fp32 and in 16 bit
SWAP = 5 * 400 * 2**20 + 4 * P / 8  # buffers on the way to NVMe, and gradients
MOMENTS = 2 * (1 + 4 / 256)  # two 8-bit states with an fp32 scale for each 256
NF4 = L / 2 + 2 * (P - L)
GALORE_MOMENTS = 32 * 128 * 2 * (4 * H + 3 * F) + 2 * (P - L)
GALORE_PROJECTORS = 32 * 128 * (2 * H + 2 * KV + 3 * H)
ROWS_AND_COLUMNS = 32 * (4 * H + 2 * (H + KV) + 3 * (H + F) + 2 * H) + 2 * (V + H) + H

ROWS: dict[str, Row] = {
    # sharding
    "none": Row(at(), 4 * P, 4 * P, 8 * P),
    "none bf16": Row(at(precision=BF16), 2 * P, 2 * P, 4 * P),
    "none fp32": Row(at(precision=FP32), 4 * P, 4 * P, 8 * P),
    "ddp": Row(at(Sharding.DDP, 8), 4 * P, 4 * P, 8 * P),
    "zero1": Row(at(Sharding.ZERO1, 8), 2 * P, 2 * P, 8 * P / 8, 4 * P / 8),
    "zero2": Row(at(Sharding.ZERO2, 8), 2 * P, 2 * P / 8, 8 * P / 8, 4 * P / 8),
    "zero3": Row(at(Sharding.ZERO3, 8), 2 * P / 8, 2 * P / 8, 8 * P / 8, 4 * P / 8),
    "zero3 bf16": Row(at(Sharding.ZERO3, 4, precision=BF16), 2 * P / 4, 2 * P / 4, 4 * P / 4, 2 * P / 4),
    "fsdp": Row(at(Sharding.FSDP, 8), 4 * P / 8, 4 * P / 8, 8 * P / 8),
    "fsdp bf16": Row(at(Sharding.FSDP, 8, precision=BF16), 2 * P / 8, 2 * P / 8, 4 * P / 8),
    "fsdp_grad_op": Row(at(Sharding.FSDP_GRAD_OP, 8), 4 * P / 8, 4 * P / 8, 8 * P / 8),
    "hsdp in nodes of 8": Row(at(Sharding.HSDP, 64), 4 * P / 8, 4 * P / 8, 8 * P / 8),
    "hsdp in groups of 2": Row(at(Sharding.HSDP, 64, shard_group=2), 4 * P / 2, 4 * P / 2, 8 * P / 2),
    # offload
    "zero1 optimizer": Row(offloaded(Sharding.ZERO1, Offload.OPTIMIZER), 2 * P, 2 * P, 0, pinned=HOST_STATE),
    "zero2 optimizer": Row(offloaded(Sharding.ZERO2, Offload.OPTIMIZER), 2 * P, 0, 0, pinned=HOST_STATE),
    "zero3 optimizer": Row(offloaded(Sharding.ZERO3, Offload.OPTIMIZER), 2 * P / 8, 0, 0, pinned=HOST_STATE),
    "zero3 optimizer+params": Row(offloaded(Sharding.ZERO3, Offload.OPTIMIZER_PARAMS), 0, 0, 0,
        pinned=HOST_STATE + 2 * P / 8),
    "zero3 nvme_optimizer": Row(offloaded(Sharding.ZERO3, Offload.NVME_OPTIMIZER), 2 * P / 8, 0, 0, pinned=SWAP,
        nvme=(4 + 8 + 4) * P / 8),
    "zero3 nvme_all": Row(offloaded(Sharding.ZERO3, Offload.NVME_ALL), 0, 0, 0, pinned=SWAP,
        nvme=(4 + 8 + 4 + 2) * P / 8),
    "fsdp optimizer+params": Row(at(Sharding.FSDP, 8, offload=Offload.OPTIMIZER_PARAMS), 0, 0, 0,
        pinned=(4 + 4) * P / 8, pageable=8 * P / 8),
    # optimizers
    "adamw": Row(at(optimizer=Optimizer.ADAMW), 4 * P, 4 * P, 8 * P),
    "adamw_fused": Row(at(optimizer=Optimizer.ADAMW_FUSED), 4 * P, 4 * P, 8 * P),
    "adamw_8bit": Row(at(optimizer=Optimizer.ADAMW_8BIT), 4 * P, 4 * P, MOMENTS * P),
    "adamw_8bit under fsdp": Row(
        at(Sharding.FSDP, 8, optimizer=Optimizer.ADAMW_8BIT),
        *(4 * P / 8, 4 * P / 8, (MOMENTS * (P - NORMS) + 8 * NORMS) / 8),  # a shard of a norm has 512 elements
    ),
    "hf-trainer keeps the embedding's moments in fp32": Row(at(optimizer=Optimizer.ADAMW_8BIT, reference="hf-trainer"),
        4 * P, 4 * P, MOMENTS * (P - V * H) + 8 * V * H),
    "paged_adamw": Row(at(optimizer=Optimizer.PAGED_ADAMW), 4 * P, 4 * P, 8 * NORMS, managed=8 * (P - NORMS)),
    "paged_adamw_8bit": Row(at(optimizer=Optimizer.PAGED_ADAMW_8BIT), 4 * P, 4 * P, MOMENTS * NORMS,
        managed=MOMENTS * (P - NORMS)),
    "lion": Row(at(optimizer=Optimizer.LION), 4 * P, 4 * P, 4 * P),
    "lion_8bit": Row(at(optimizer=Optimizer.LION_8BIT), 4 * P, 4 * P, MOMENTS * P / 2),
    "lamb_8bit": Row(at(optimizer=Optimizer.LAMB_8BIT), 4 * P, 4 * P, MOMENTS * P),
    "ademamix_8bit": Row(at(optimizer=Optimizer.ADEMAMIX_8BIT), 4 * P, 4 * P, MOMENTS * P * 3 / 2),
    "adafactor": Row(at(optimizer=Optimizer.ADAFACTOR), 4 * P, 4 * P, 4 * ROWS_AND_COLUMNS),
    "adalomo": Row(at(optimizer=Optimizer.ADALOMO), 4 * P, 4 * P, 4 * ROWS_AND_COLUMNS),
    "muon": Row(at(optimizer=Optimizer.MUON), 4 * P, 4 * P, 4 * L + 8 * (P - L)),
    "lomo": Row(at(optimizer=Optimizer.LOMO), 4 * P, 4 * P, 0),
    "sgd": Row(at(optimizer=Optimizer.SGD), 4 * P, 4 * P, 0),
    # methods
    "lora": Row(at(method=LORA), 2 * P, 4 * A, 8 * A, adapters=4 * A),
    "dora": Row(at(method=LORA, lora=LoraJob(dora=True)), 2 * P, 4 * (A + M), 8 * (A + M), adapters=4 * (A + M)),
    "lora bf16": Row(at(method=LORA, precision=BF16), 2 * P, 2 * A, 4 * A, adapters=2 * A),
    "lora zero3": Row(at(Sharding.ZERO3, 8, method=LORA), 2 * P / 8, 2 * A / 8, 8 * A / 8, 4 * A / 8, 0, 2 * A / 8),
    "lora fsdp": Row(at(Sharding.FSDP, 8, method=LORA), 2 * P / 8, 4 * A / 8, 8 * A / 8, adapters=4 * A / 8),
    "qlora nf4": Row(at(method=QLORA, quant=Quant.NF4), NF4, 4 * A, 8 * A, quant_state=4 / 64 * L, adapters=4 * A),
    "qlora nf4-dq": Row(at(method=QLORA), NF4, 4 * A, 8 * A, quant_state=(1 / 64 + 4 / 16384) * L, adapters=4 * A),
    "qlora fsdp keeps its scales on every rank": Row(
        at(Sharding.FSDP, 8, method=QLORA),
        *(NF4 / 8, 4 * A / 8, 8 * A / 8),
        quant_state=(1 / 64 + 4 / 16384) * L,
        adapters=4 * A / 8,
    ),
    "galore": Row(at(method=GALORE, galore=GaloreJob(rank=128)), 4 * P, 4 * P,
        4 * (GALORE_MOMENTS + GALORE_PROJECTORS)),
    "galore 8-bit": Row(
        at(method=GALORE, galore=GaloreJob(rank=128), optimizer=Optimizer.ADAMW_8BIT),
        *(4 * P, 4 * P),
        optimizer_state=GALORE_MOMENTS + 4 * GALORE_PROJECTORS,
    ),
}  # fmt: skip


def chosen_of(row: Row) -> Configuration:
    fields = {"lora": LoraJob(rank=16), **row.chosen}
    chosen: Configuration = configuration(fields.pop("sharding"), **fields)
    return chosen


def states(chosen: Configuration, device: Device = A100S) -> States:
    dims = dims_of(LLAMA_8B)
    return model_states(chosen, policy_of(chosen, device, dims), dims)


@pytest.mark.parametrize("name", ROWS)
def test_state_of_one_rank(name: str) -> None:
    row = ROWS[name]
    found = states(chosen_of(row))
    for part in Row._fields[1:]:
        assert getattr(found, part) == pytest.approx(getattr(row, part), abs=3), part


def test_a_base_that_is_stored_in_4_bit_counts_as_its_files_have_it() -> None:
    packed = L - 1_000_000
    shape, chosen = replace(LLAMA_8B, quant=Quant.NF4, packed_linears=packed), configuration(method=QLORA)
    found = model_states(chosen, policy_of(chosen, A100S, dims_of(shape)), dims_of(shape))
    assert found.weights == pytest.approx(packed / 2 + 2 * (P - packed), abs=3)
    assert found.quant_state == pytest.approx(4 / 64 * packed, abs=3)


def test_every_member_of_each_axis_has_a_row() -> None:
    chosen = [chosen_of(row) for row in ROWS.values()]
    assert {each.strategy.sharding for each in chosen} == set(Sharding)
    assert {each.strategy.offload for each in chosen} == set(Offload)
    assert {each.strategy.optimizer for each in chosen} == set(Optimizer)
    assert {each.method for each in chosen} == set(Method)


# What a step needs beside the states: (setting, bytes)
STEP_TEMPORARIES: list[tuple[dict[str, Any], int]] = [
    ({"optimizer": Optimizer.ADAMW}, 4 * P),  # foreach: the square roots of all second moments
    ({"optimizer": Optimizer.ADAMW, "sharding": Sharding.FSDP, "num_ranks": 4}, 4 * P // 4),
    ({"optimizer": Optimizer.ADAMW_FUSED}, 0),
    ({"optimizer": Optimizer.ADAMW_8BIT}, 0),
    ({"optimizer": Optimizer.LION}, 2 * 4 * V * H),  # the moment's copy, and the update made of it
    ({"optimizer": Optimizer.ADAFACTOR}, 2 * 4 * V * H),  # the update and its square
    ({"optimizer": Optimizer.MUON}, 4 * (P - L)),  # foreach AdamW's, of all that is no matrix of a block
    ({"optimizer": Optimizer.LAMB_8BIT}, 4 * V * H),  # the scratch tensor
    # galore_torch: two copies of what it does not project, a head of its own, beside one of the embedding
    ({"method": GALORE}, 3 * 4 * V * H),
    # a new projector, where the kernel needs no copies: gradient, its copy, both sets of vectors of one fp32 matrix
    ({"method": GALORE, "optimizer": Optimizer.ADAMW_8BIT}, 4 * (3 * F * H + H * H)),
]


@pytest.mark.parametrize(("chosen", "num_bytes"), STEP_TEMPORARIES)
def test_temporaries_of_an_optimizer_step(chosen: dict[str, Any], num_bytes: int) -> None:
    assert states(configuration(**chosen)).optimizer_temporaries == num_bytes


@pytest.mark.parametrize(
    ("optimizer", "precision", "copies"),
    [(Optimizer.PAGED_ADAMW, FP32, 3), (Optimizer.PAGED_ADAMW, BF16, 4), (Optimizer.ADAMW_8BIT, FP32, 5)],
)
def test_without_a_kernel_state_goes_through_fp32_copies_of_one_tensor(optimizer, precision, copies):
    chosen = configuration(optimizer=optimizer, precision=precision)
    on_cpu, on_gpu = states(chosen, cpu()), states(chosen)
    assert [each.optimizer_temporaries for each in (on_cpu, on_gpu)] == [copies * 4 * V * H, 0]
    assert on_cpu.optimizer_state == on_gpu.optimizer_state + on_gpu.managed  # nothing is paged there


def test_galore_around_adafactor_keeps_rows_and_columns_of_what_is_projected() -> None:
    r = 128
    chosen = configuration(method=GALORE, galore=GaloreJob(rank=r), optimizer=Optimizer.ADAFACTOR)
    factors = 32 * (4 * (r + H) + 3 * (r + F) + 2 * H) + 2 * (V + H) + H
    assert states(chosen).optimizer_state == 4 * (factors + GALORE_PROJECTORS)
    in_16_bit = states(replace(chosen, strategy=replace(chosen.strategy, precision=BF16)))
    assert in_16_bit.optimizer_state == 4 * (factors + GALORE_PROJECTORS)  # projectors of fp32 gradients
    assert in_16_bit.optimizer_temporaries == 5 * 4 * V * H  # of the head, beside one of the embedding's


def test_adapters_on_nothing_have_no_state() -> None:
    """As of a model whose layers none of the job's names is of; the plan then refuses it in words."""
    found = states(configuration(**at(Sharding.ZERO3, 8, method=LORA, lora=LoraJob(targets=("nothing",)))))
    assert (found.optimizer_state, found.master_weights, found.optimizer_temporaries) == (0, 0, 0)


# Above what stays between steps: (row, bytes). DeepSpeed keeps the gradients of its partition, copies them into a flat
# tensor, and that into one of the masters' type: 2 + 2 + 4 bytes for bf16-mixed (0.19.8: `step` of stage_1_and_2.py,
# `_prepare_fp32_grad_for_sub_group` of stage3.py; test_memory_against_dry_run has both run). ZeRO-3 does so with one
# sub-group after the other, of as many elements as have four buffers of the masters' type in 2000 MiB.
SUB_GROUP = 2000 * 2**20 / (4 * 4)
OPTIMIZER_STEPS = [
    ("ddp", 0),  # gradients are the buckets, which stay
    ("zero1", (2 + 2 + 4) * P / 8),
    ("zero2", (2 + 2 + 4) * P / 8),
    ("zero3", (2 + 4) * SUB_GROUP),  # gradients are a buffer that stays
    ("zero3 bf16", 8 * V * H / 4),  # the norm of a rank's piece of a table, in fp64: more than copies of a sub-group
    ("lora zero3", (2 + 4) * A / 8),
    ("zero2 optimizer", 0),  # on the host
    ("fsdp", 4 * P / 8),
    ("fsdp bf16", 2 * P / 8),
]


@pytest.mark.parametrize(("name", "num_bytes"), OPTIMIZER_STEPS)
def test_what_the_optimizers_step_holds_above_what_stays(name: str, num_bytes: float) -> None:
    found = estimate_memory(LLAMA_8B, chosen_of(ROWS[name]), gpu())
    assert found.events["optimizer_step"] - found.steady_allocated_bytes == pytest.approx(num_bytes, abs=3)


def test_the_copies_of_the_gradients_are_in_the_peak_where_that_is_the_optimizers_step() -> None:
    chosen = chosen_of(Row({**ROWS["zero2"].chosen, "seq_len": 256, "checkpointing": Checkpointing.FULL}, 0, 0, 0))
    found = estimate_memory(LLAMA_8B, chosen, gpu())
    assert found.peak_event == "optimizer_step"
    assert found.peak_allocated_bytes == pytest.approx((2 + (8 + 4 + 2 + 2 + 4) / 8) * P + CUBLAS_BYTES, abs=3)


@pytest.mark.parametrize(
    "more",
    [
        {"optimizer": Optimizer.LOMO},
        {"optimizer": Optimizer.ADALOMO},
        {"optimizer_in_backward": True},
        {"method": GALORE, "galore": GaloreJob(layerwise=True)},
    ],
)
def test_updates_inside_the_backward_leave_no_gradients_to_a_step(more: dict[str, Any]) -> None:
    plain, inside = (estimate_memory(LLAMA_8B, configuration(**each), gpu()) for each in ({}, more))
    assert "optimizer_step" in plain.events
    assert "optimizer_step" not in inside.events
    assert inside.events["gradients_complete"] - inside.steady_allocated_bytes < 4 * P / 4
