"""The dry run from outside: a value in, a value or one line of an error out."""

import pytest
from engine_plan_factory import TINY_LLAMA, engine_plan
from msgspec.structs import replace

from shardwise.launch.plan.dry_run import describe_simulation, simulate, simulation_request
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.job.sections import Job, LoraJob, TrainJob
from shardwise.trainer.spec.messages.simulation import LiveGroup, Simulation, SimulationRequest
from shardwise.trainer.spec.plan import MemoryEstimate
from shardwise.trainer.spec.strategy import Attention, Checkpointing, Method, Precision, Sharding
from shardwise.trainer.spec.units import GIB, MIB

TINY = SimulationRequest(model_config=TINY_LLAMA, seq_len=64)


def test_a_request_goes_out_and_its_answer_comes_back() -> None:
    simulation = simulate(TINY)
    assert sum(simulation.parts.values()) == simulation.peak_allocated_bytes
    assert sum(group.num_bytes for group in simulation.live) == simulation.peak_allocated_bytes
    assert "attention: flash" in simulation.checks
    assert simulation.versions["torch"]


def test_a_config_that_is_wrong_is_one_line() -> None:
    with pytest.raises(InputError, match=r"llama.*65.*4") as raised:
        simulate(replace(TINY, model_config={**TINY_LLAMA, "hidden_size": 65}))
    assert "\n" not in str(raised.value)


def test_the_request_is_what_the_candidate_says() -> None:
    plan = engine_plan(
        Sharding.FSDP,
        num_ranks=8,
        precision=Precision.BF16_MIXED,
        kind=DeviceKind.CUDA,
        job=Job(train=TrainJob(lora=LoraJob(rank=4))),
        method=Method.LORA,
        checkpointing=Checkpointing.FULL,
        attention=Attention.FLASH,
    )
    request = simulation_request(plan)
    assert request.attention is Attention.SDPA  # flash-attn has no dry run
    assert (request.lora.rank, request.method) == (4, Method.LORA)
    assert (request.sharding, request.num_ranks) == (Sharding.FSDP, 8)
    assert (request.micro_batch, request.accumulation, request.seq_len) == (4, 2, 128)
    assert request.model_config == plan.model_config
    assert request.device_name == "NVIDIA H100"


def predicted() -> MemoryEstimate:
    return MemoryEstimate(
        parts={"weights": 2 * GIB, "activations": GIB, "logits": GIB, "workspace": 64 * MIB},
        peak_event="loss_backward",
        events={"load": 2 * GIB, "loss_backward": 4 * GIB + 64 * MIB, "block_backward_top": 3 * GIB + 64 * MIB},
        steady_allocated_bytes=2 * GIB + 64 * MIB,
        peak_allocated_bytes=4 * GIB + 64 * MIB,
        peak_reserved_bytes=5 * GIB + 64 * MIB,
        device_bytes=6 * GIB,
        low_bytes=4 * GIB,
        high_bytes=6 * GIB,
        need_bytes=6 * GIB,
        usable_bytes=8 * GIB,
    )


def simulated() -> Simulation:
    return Simulation(
        steady_allocated_bytes=2 * GIB,
        peak_allocated_bytes=5 * GIB,
        peak_event="loss_backward",
        events={
            "load": 2 * GIB,
            "loss_backward": 5 * GIB,
            "block_backward_top": 2 * GIB,
            "block_backward_middle": 4 * GIB,
            "gradients_complete": GIB,
        },
        parts={"weights": 2 * GIB, "activations": 2 * GIB, "temporaries": GIB},
        live=(LiveGroup(kind="weights", module="", operation="empty", num_tensors=1, num_bytes=2 * GIB),),
        peak_reserved_bytes=10 * GIB,
        expandable_reserved_bytes=6 * GIB,
        min_capacity_bytes=5 * GIB,
        checks=("attention: flash",),
        num_parameters=1,
        num_trained_parameters=1,
        seconds=1.0,
        versions={},
    )


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("load", ["2 GiB", "2 GiB", "+0.00%"]),
        ("loss_backward", ["4 GiB", "5 GiB", "-20.00%"]),
        ("block_backward_top", ["3 GiB", "4 GiB", "-25.00%"]),  # the blocks between count with the last
        ("gradients_complete", ["-", "1 GiB", "-"]),
        ("peak", ["4 GiB", "5 GiB", "-20.00%"]),
        ("between steps", ["2 GiB", "2 GiB", "+0.00%"]),
        ("reserved", ["5 GiB", "6 GiB", "-16.67%"]),
        ("  weights", ["2 GiB", "2 GiB", "+0.00%"]),
        ("  activations", ["2 GiB", "3 GiB", "-33.33%"]),
    ],
)
def test_predicted_stands_beside_simulated(name: str, columns: list[str]) -> None:
    """Without the workspaces of the matrix library, which the dry run does not see."""
    lines = {line[:24].rstrip(): line[24:] for line in describe_simulation(simulated(), predicted())}
    width = 12
    assert [lines[name][start : start + width].strip() for start in range(0, 3 * width, width)] == columns
