"""The closed form against dry runs of our own runtime: peak and steady bytes, for every architecture that is claimed.

The rows of tests/golden/dry_run.jsonl are what one rank allocates on a device that is not there, without cuBLAS. For
ZeRO all but its buckets in the backward is exact. Left out is one moment of tied heads, where a dry run counts a table
that a device does not hold (`test_memory_techniques` has that moment by the allocator of a real one).
"""

from statistics import median

import closed_forms
import msgspec
import pytest
from closed_forms import answer_of, predicted
from dry_run_factory import GoldenRow, read_golden
from msgspec.structs import replace

from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.model import readers
from shardwise.trainer.spec.model.readers import admitted_types, read_model_shape, supported_model_types
from shardwise.trainer.spec.strategy import Checkpointing

TOLERANCE = 0.01
STEADY_TOLERANCE = 0.002


FURTHER = {  # of admitted types, from 1 to 2 %
    "gemma2 of 8 blocks eager lora r16 bf16-mixed chunked b4 s2048",
    "glm4 of 8 blocks lora r16 bf16-mixed chunked b8 s2048 ckpt-full",
    "gpt_bigcode of 8 blocks lora r16 bf16-mixed chunked b8 s2048 ckpt-full",
    "granite of 8 blocks lora r16 bf16-mixed chunked b8 s2048 ckpt-full",
    "olmo2 of 8 blocks fsdp n8 bf16-mixed chunked b4 s2048 ckpt-full",
    "phi of 8 blocks bf16-mixed chunked b8 s2048 ckpt-full",
}


def is_claimed(row: GoldenRow) -> bool:
    """A type that its closed form plans, but for the few runs in which the form is from 1 to 2 % off."""
    return row.request.model_config["model_type"] in admitted_types() and row.name not in FURTHER


ALL_ROWS = [
    row for row in read_golden(closed_forms.GOLDEN) if row.request.model_config["model_type"] in supported_model_types()
]
ROWS = [
    row
    for row in ALL_ROWS
    if row.result is not None
    and is_claimed(row)
    and not closed_forms.sums_tied_tables_at_the_peak(row)
    and not row.request.sharding.uses_deepspeed
]
ZERO_ROWS = [row for row in ALL_ROWS if row.request.sharding.uses_deepspeed]


def test_types_within_2_percent_of_every_dry_run_are_planned_by_their_closed_form() -> None:
    """The table of the package is that of `make golden`, and each type was run in the five ways that differ most."""
    found = closed_forms.furthest(ALL_ROWS)
    assert msgspec.json.decode(closed_forms.TABLE.read_bytes()) == found == readers.furthest_forms()
    assert set(found) == set(supported_model_types())
    assert set(admitted_types()) == {name for name, error in found.items() if error <= readers.ADMITTED_SHARE}
    runs = [row.request for row in ALL_ROWS if not row.request.sharding.uses_deepspeed]
    ways = {
        (run.model_config["model_type"], run.sharding.uses_fsdp, run.method.freezes_base, run.checkpointing)
        for run in runs
    }
    for name in found:
        for way in (
            (False, False, Checkpointing.NONE), (False, False, Checkpointing.FULL), (True, False, Checkpointing.FULL),
            (False, True, Checkpointing.NONE), (False, True, Checkpointing.FULL),
        ):  # fmt: skip
            assert (name, *way) in ways, f"{name} has no dry run of {way}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_closed_form_is_what_a_dry_run_allocates(row: GoldenRow) -> None:
    (found, workspace), answer = predicted(row), answer_of(row)
    assert found.peak_allocated_bytes - workspace == pytest.approx(answer.peak_allocated_bytes, rel=TOLERANCE)
    steady = found.steady_allocated_bytes - workspace
    assert steady == pytest.approx(answer.steady_allocated_bytes, rel=STEADY_TOLERANCE)
    assert found.events["load"] == pytest.approx(answer.events["load"], rel=TOLERANCE)
    if row.request.activation_offload or row.request.embedding_on_host:
        num_ranks = min(row.request.num_ranks, row.request.ranks_per_node)
        assert found.pinned_bytes // num_ranks == pytest.approx(answer.pinned_host_bytes, rel=TOLERANCE)


def kept_whole_bytes(row: GoldenRow) -> int:
    """Of the largest tensor's gradient, what lies beyond the partition that begins with it."""
    request, shape = row.request, read_model_shape(row.request.model_config)
    if request.method.freezes_base or request.sharding is Sharding.ZERO3:  # its gradients are copied into a buffer
        return 0
    table = shape.vocab_size * shape.hidden_size
    return request.precision.compute_bytes * max(0, table - shape.num_parameters // request.num_ranks)


@pytest.mark.parametrize("row", ZERO_ROWS, ids=lambda row: row.name)
def test_the_closed_form_of_zero_is_what_deepspeed_allocates(row: GoldenRow) -> None:
    (found, workspace), answer = predicted(row), answer_of(row)
    steady = found.steady_allocated_bytes - workspace
    assert steady == pytest.approx(answer.steady_allocated_bytes, rel=0.004)
    events = {name: num_bytes - workspace for name, num_bytes in found.events.items()}
    assert events["forward_end"] == pytest.approx(answer.events["forward_end"], rel=0.03)
    update = events["optimizer_step"] + kept_whole_bytes(row)
    assert update == pytest.approx(answer.events["optimizer_step"], rel=0.01)
    assert found.peak_allocated_bytes - workspace == pytest.approx(answer.peak_allocated_bytes, rel=0.1)


def test_many_configurations_are_claimed_and_half_are_far_closer_than_the_claim() -> None:
    requests, of_zero = [row.request for row in ROWS], [row.request for row in ZERO_ROWS]
    assert len(requests) >= 60
    assert len({request.model_config["model_type"] for request in requests}) >= 8
    assert {8, 64, 512} <= {request.num_ranks for request in requests if request.sharding is Sharding.FSDP}
    assert {request.sharding for request in of_zero} == {each for each in Sharding if each.uses_deepspeed}
    for found, axes in (
        (requests, ("method", "precision", "checkpointing", "loss", "accumulation", "rows_per_example")),
        (of_zero, ("method", "precision", "num_ranks", "accumulation", "loss", "optimizer")),
    ):
        assert all(len({getattr(request, axis) for request in found}) >= 2 for axis in axes)
    pairs = [(predicted(row), answer_of(row).peak_allocated_bytes) for row in ROWS]
    errors = [abs((found.peak_allocated_bytes - workspace) / seen - 1) for (found, workspace), seen in pairs]
    assert median(errors) <= 0.0005


def test_a_frozen_base_has_its_peak_in_forward_if_two_blocks_are_gathered_ahead() -> None:
    """The dry run of these 512 tokens, with four gathered blocks: an upper bound of it, within 2 %."""
    rows = {row.name: row.request for row in ALL_ROWS}
    mistral = rows["mistral-7b-v0.3 fsdp n64 bf16-mixed chunked b2 s4096 ckpt-full"].model_config
    adapted = rows["llama-3.1-8b fsdp n8 lora bf16-mixed chunked b2 s2048 ckpt-full"]
    request = replace(adapted, model_config=mistral, micro_batch=1, seq_len=512, prefetch_two_blocks=True)
    found, workspace = predicted(GoldenRow(name="two blocks", request=request))
    assert 1 <= (found.peak_allocated_bytes - workspace) / 3_823_520_256 < 1.02
