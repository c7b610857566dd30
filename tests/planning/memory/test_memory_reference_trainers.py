"""Other trainers are the same formulas with another row of recipe values; each value moves the bytes that it is of."""

import pytest
from estimate_factory import LLAMA_8B, MISTRAL_7B, configuration, gpu
from msgspec.structs import replace

from shardwise.trainer.planning.configuration import SHARDWISE, PolicyChoices
from shardwise.trainer.planning.memory import OVERHEADS, Line, estimate_memory
from shardwise.trainer.planning.policy.reference_trainers import REFERENCE_TRAINERS, reference_of
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Checkpointing, LossHead, Method, Precision
from shardwise.trainer.spec.units import GIB

FULL = Checkpointing.FULL


def test_a_stack_without_a_row_answers_as_ours() -> None:
    chosen = configuration(Sharding.FSDP, num_ranks=8, checkpointing=FULL)
    ours = estimate_memory(LLAMA_8B, chosen, gpu())
    assert estimate_memory(LLAMA_8B, replace(chosen, reference="an unknown trainer"), gpu()) == ours
    assert reference_of("an unknown trainer") is REFERENCE_TRAINERS[SHARDWISE]


LORA = configuration(
    method=Method.LORA, precision=Precision.BF16, checkpointing=FULL, seq_len=4096, micro_batch=4,
    reference="hf-trainer",
)  # fmt: skip
SHARDED = configuration(Sharding.FSDP, num_ranks=8, checkpointing=FULL, accumulation=4)
FROZEN = replace(SHARDED, method=Method.LORA, accumulation=1)
ADAMW = configuration(Sharding.FSDP, num_ranks=4, checkpointing=FULL, optimizer=Optimizer.ADAMW)
ZERO2 = configuration(
    Sharding.ZERO2, num_ranks=8, checkpointing=FULL, optimizer=Optimizer.ADAMW, reference="hf-trainer"
)
STEADY, P, M = "steady_allocated_bytes", LLAMA_8B.num_parameters, MISTRAL_7B.num_parameters
ADAPTERS = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
# A setting, the value that another trainer has of it, an event or what stays, and the bytes that it has more.
DIFFERENCES = {
    # As a k-bit preparation that casts norms to fp32 keeps it, to the byte as measured:
    # 2 h L more a token, and cosines and sines.
    "an fp32 residual stream": (MISTRAL_7B, LORA, {"policy": PolicyChoices(residual_bytes=4)}, "forward_end",
        2 * 4096 * 32 * 4 * 4096 + 2 * 2 * 4096 * 128),
    "adapters in 16 bit": (MISTRAL_7B, LORA, {"policy": PolicyChoices(adapter_bytes=2)}, STEADY, -(12 - 6) * ADAPTERS),
    "reducing every micro batch": (LLAMA_8B, SHARDED, {"policy": PolicyChoices(reduces_every_micro_batch=True)},
        "forward_end", 4 * P // 8 - 4 * P),
    "FSDP1 keeps sharded gradients": (MISTRAL_7B, ADAMW, {"reference": "hf-trainer"}, STEADY, M * 4 // 4),
    "AdamW of DeepSpeed takes no square roots of all moments at once": (LLAMA_8B, ZERO2, {"reference": "deepspeed"},
        "optimizer_step", pytest.approx(-4 * P / 8, rel=0.01)),
    "frozen weights in fp32": (MISTRAL_7B, FROZEN, {"reference": "prime-rl"}, STEADY,
        pytest.approx(M * 2 / 8, rel=1e-3)),
}  # fmt: skip


@pytest.mark.parametrize(("shape", "chosen", "other", "counter", "more"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_what_another_trainer_does_moves_the_bytes_that_it_is_of(shape, chosen, other, counter, more) -> None:
    found = [estimate_memory(shape, each, gpu()) for each in (chosen, replace(chosen, **other))]
    ours, theirs = ({STEADY: each.steady_allocated_bytes, **each.events}[counter] for each in found)
    assert theirs - ours == more


def test_frozen_blocks_under_fsdp1_are_retained_until_the_backward_ends() -> None:
    """2 h L of inputs and 2 h (L - 2) of their gradients, where one boundary would do."""
    chosen = replace(LORA, strategy=replace(LORA.strategy, sharding=Sharding.FSDP), num_ranks=4, ranks_per_node=4)
    found = estimate_memory(MISTRAL_7B, chosen, gpu())
    boundary = 2 * 4096 * 4 * 4096
    assert found.peak_event == "block_backward_bottom"
    assert (found.parts["activations"], found.parts["retained_gradients"]) == (32 * boundary, 30 * boundary)


def test_an_overhead_can_be_replaced() -> None:
    chosen = configuration(Sharding.FSDP, num_ranks=8, checkpointing=FULL)
    more = Line(low=GIB, likely=2 * GIB, high=3 * GIB, source="measured here")
    tables = (OVERHEADS, replace(OVERHEADS, communicator_bytes=more))
    before, after = (estimate_memory(LLAMA_8B, chosen, gpu(), table).device_bytes for table in tables)
    assert after - before == 2 * GIB - OVERHEADS.communicator_bytes.likely


@pytest.mark.parametrize("name", ["trl", "axolotl", "llama-factory"])
def test_a_subclass_of_transformers_trainer_holds_what_the_trainer_holds(name: str) -> None:
    ours, trainer, subclass = (
        estimate_memory(LLAMA_8B, configuration(loss=LossHead.EAGER, reference=reference), gpu()).peak_allocated_bytes
        for reference in (SHARDWISE, "hf-trainer", name)
    )
    assert subclass == trainer != ours


def test_logits_in_slices_have_no_gradient_of_all_at_once() -> None:
    chosen = configuration(Sharding.FSDP, num_ranks=8, checkpointing=FULL, loss=LossHead.CHUNKED, seq_len=16384)
    found = estimate_memory(LLAMA_8B, replace(chosen, reference="prime-rl"), gpu())
    assert "head_backward" not in found.events
    whole = estimate_memory(LLAMA_8B, replace(chosen, loss=LossHead.EAGER, reference="prime-rl"), gpu())
    assert whole.events["loss_backward"] - found.events["loss_backward"] > 15 * 16384 * LLAMA_8B.vocab_size


def test_segments_that_expand_are_shared_by_all_but_the_streams_of_fsdp() -> None:
    """Alone, a step reserves its peak and 7 % of what is not held for good; FSDP frees gradients on a stream apart."""
    alone = estimate_memory(LLAMA_8B, configuration(checkpointing=FULL), gpu())
    transients = alone.peak_allocated_bytes - alone.steady_allocated_bytes
    assert alone.peak_reserved_bytes == pytest.approx(alone.peak_allocated_bytes + 0.07 * transients, rel=0.02)
    chosen = configuration(Sharding.FSDP, num_ranks=2, checkpointing=FULL, loss=LossHead.EAGER, seq_len=16384)
    sharded = estimate_memory(LLAMA_8B, chosen, gpu("2xH200"))
    gradients = 4 * LLAMA_8B.num_parameters // 2  # freed before the loss, and of no use to its logits
    assert sharded.peak_event == "loss_backward"
    assert sharded.peak_reserved_bytes > sharded.peak_allocated_bytes + gradients
