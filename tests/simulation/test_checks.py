"""Each precaution of the dry run taken away once: the run raises instead of returning wrong bytes."""

import json
from pathlib import Path

import pytest
from estimate_factory import config
from msgspec.structs import replace
from programs import printed_by

from shardwise.trainer.simulation.checks import check_supported
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.messages.worker_requests import SimulationRequest
from shardwise.trainer.spec.strategy import Attention, Method, Precision

SUPPORTED = SimulationRequest(model_config=config(64, 16, 32, 1, 2, 1))


@pytest.fixture(scope="module")
def reported() -> dict[str, str]:
    results: dict[str, str] = json.loads(printed_by(Path(__file__).with_name("broken_worker.py")))
    return results


@pytest.mark.parametrize(
    ("what", "fact"),
    [
        ("nothing", "matrix products in torch.bfloat16\nattention: flash"),
        ("masks", "a mask was built for 4 attention calls"),  # the runtime's own step declares that no row is packed
        ("sums", "bytes after the second step"),  # and its own sums take what a forward made
        ("silu", "4 sigmoids in a backward"),
        ("attention", "scaled_dot_product_attention"),
        ("autocast", "torch.float32, torch.bfloat16"),
    ],
)
def test_a_precaution_that_is_missing_is_noticed(reported: dict[str, str], what: str, fact: str) -> None:
    assert fact in reported[what]
    is_refused = reported[what].startswith("ShardwiseError: ")
    assert is_refused == (what != "nothing")


@pytest.mark.parametrize(
    ("request_", "fact"),
    [
        (replace(SUPPORTED, sharding=Sharding.ZERO3, precision=Precision.FP16_MIXED, num_ranks=8), "fp16-mixed under"),
        (replace(SUPPORTED, method=Method.QLORA, sharding=Sharding.ZERO2, num_ranks=8), "qlora under zero2"),
        (replace(SUPPORTED, method=Method.GALORE), "galore"),
        (replace(SUPPORTED, precision=Precision.FP8), "fp8"),
        (replace(SUPPORTED, attention=Attention.FLASH), "sdpa"),
        (replace(SUPPORTED, method=Method.QLORA, sharding=Sharding.FSDP, num_ranks=8), "qlora under fsdp"),
        (replace(SUPPORTED, device_kind=DeviceKind.CPU, sharding=Sharding.DDP, num_ranks=2), "ddp on CPU"),
        (replace(SUPPORTED, num_ranks=2), "the request has 2"),
        (replace(SUPPORTED, sharding=Sharding.FSDP), "the request has 1"),
        (replace(SUPPORTED, sharding=Sharding.HSDP, num_ranks=12), "12 ranks, 8 in a group"),
    ],
)
def test_what_has_no_dry_run_is_refused(request_: SimulationRequest, fact: str) -> None:
    check_supported(SUPPORTED)
    with pytest.raises(InputError, match=fact):
        check_supported(request_)
