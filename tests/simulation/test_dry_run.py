"""Models on a CUDA device that is not there, in every engine that has a dry run; and the file of known dry runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from dry_run_factory import GoldenResult, GoldenRow, read_golden, run_dry
from estimate_factory import config
from msgspec.structs import replace

from shardwise.trainer.simulation.build import build_on_meta
from shardwise.trainer.simulation.dry_run import zero_config
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.messages.worker_requests import SimulationRequest
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Checkpointing, LossHead, Method, Precision, Quant

VOCAB, HIDDEN, FFN, LAYERS = 4096, 256, 512, 2
LLAMA = config(VOCAB, HIDDEN, FFN, LAYERS, 8, 4)
BASE = SimulationRequest(model_config=LLAMA, micro_batch=2, seq_len=512, loss=LossHead.CHUNKED)
BLOCK = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * FFN + 2 * HIDDEN
PARAMETERS = LAYERS * BLOCK + 2 * VOCAB * HIDDEN + HIDDEN
GPT2 = {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4}
FOUR_LAYERS = {**LLAMA, "num_hidden_layers": 4}
ROUNDING = 512  # bytes a tensor may be larger by
BF16, FULL = Precision.BF16, Checkpointing.FULL


def fsdp(num_ranks: int, **changes: Any) -> SimulationRequest:
    return replace(BASE, sharding=Sharding.FSDP, num_ranks=num_ranks, **changes)


LLAMA_4 = {  # it moves its ids to the device of the table
    **config(VOCAB, HIDDEN, FFN, 2, 8, 4, model_type="llama4_text"), "intermediate_size_mlp": FFN, "head_dim": 16,
    "num_local_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0,
}  # fmt: skip
REQUESTS = {
    "none": BASE,
    "bf16": replace(BASE, precision=BF16),
    "fused": replace(BASE, optimizer=Optimizer.ADAMW_FUSED),
    "accumulating": replace(BASE, accumulation=2),
    "eager loss": replace(BASE, loss=LossHead.EAGER, model_config={**LLAMA, "num_hidden_layers": 3}),
    "ddp": replace(BASE, sharding=Sharding.DDP, num_ranks=4),
    "lora": replace(BASE, method=Method.LORA, lora=LoraJob(rank=8)),
    "lora bf16": replace(BASE, method=Method.LORA, lora=LoraJob(rank=8), precision=BF16),
    "lora of two": replace(BASE, method=Method.LORA, lora=LoraJob(rank=8, targets=("q_proj", "v_proj"))),
    "qlora": replace(BASE, method=Method.QLORA, lora=LoraJob(rank=8)),
    "dora": replace(BASE, method=Method.LORA, lora=LoraJob(rank=8, dora=True)),
    "fsdp 2": fsdp(2, checkpointing=FULL),
    "fsdp 8": fsdp(8, checkpointing=FULL),
    "fsdp accumulating": fsdp(8, checkpointing=FULL, accumulation=2),
    "hsdp": replace(fsdp(16, checkpointing=FULL), sharding=Sharding.HSDP, ranks_per_node=8),
    "hsdp in groups": replace(fsdp(16, checkpointing=FULL), sharding=Sharding.HSDP, shard_group=2),
    "rows": replace(BASE, micro_batch=4),
    "pairs": replace(BASE, rows_per_example=2),
    "pairs lora": replace(BASE, rows_per_example=2, method=Method.LORA, lora=LoraJob(rank=8)),
    "rows lora": replace(BASE, micro_batch=4, method=Method.LORA, lora=LoraJob(rank=8)),
    "pairs fsdp lora": fsdp(8, rows_per_example=2, method=Method.LORA, lora=LoraJob(rank=8), checkpointing=FULL),
    "rows fsdp lora": fsdp(8, micro_batch=4, method=Method.LORA, lora=LoraJob(rank=8), checkpointing=FULL),
    "pairs gpt2": replace(BASE, rows_per_example=2, model_config=GPT2),
    "rows gpt2": replace(BASE, micro_batch=4, model_config=GPT2),
    "packed": replace(BASE, document_tokens=128),
    "four layers": replace(BASE, model_config=FOUR_LAYERS),
    **{
        f"{name}{' table on host' * is_there}": replace(
            BASE, method=Method.LORA, precision=BF16, model_config=fields, embedding_on_host=is_there
        )
        for name, fields in (("llama", LLAMA), ("llama4", LLAMA_4))
        for is_there in (False, True)
    },
    "offloaded": replace(BASE, model_config=FOUR_LAYERS, activation_offload=True),
    "offloaded full": replace(BASE, model_config=FOUR_LAYERS, activation_offload=True, checkpointing=FULL),
    "mixture": replace(BASE,
        model_config={**config(VOCAB, HIDDEN, FFN, 2, 8, 4, model_type="mixtral"), "num_local_experts": 4}),
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GoldenResult]:
    return run_dry(tmp_path_factory.mktemp("dry-runs"), REQUESTS)


@pytest.mark.parametrize("name", REQUESTS)
def test_the_parts_sum_to_the_peak_which_is_the_largest_event(results: dict[str, GoldenResult], name: str) -> None:
    result = results[name]
    assert sum(result.parts.values()) == result.peak_allocated_bytes
    assert result.peak_allocated_bytes == max(num for event, num in result.events.items() if event != "load")
    assert result.events[result.peak_event] == result.peak_allocated_bytes
    assert result.peak_allocated_bytes <= result.min_capacity_bytes <= result.peak_reserved_bytes


@pytest.mark.parametrize("sharding", [Sharding.ZERO2, Sharding.ZERO3])
def test_a_dry_run_leaves_no_auto_to_deepspeed_which_would_drop_it(sharding: Sharding) -> None:
    model, _ = build_on_meta(BASE)
    assert '"auto"' not in json.dumps(zero_config(replace(BASE, sharding=sharding, num_ranks=8), model))


def test_every_event_of_a_step_is_seen_in_order(results: dict[str, GoldenResult]) -> None:
    assert list(results["eager loss"].events) == [
        "load", "forward_end", "loss_backward", "head_backward", "norm_backward", "block_backward_top",
        "block_backward_middle", "block_backward_bottom", "gradients_complete", "clip", "optimizer_step",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "bytes_each"),
    [("none", 4 * 3), ("bf16", 2 * 3), ("fused", 4 * 3), ("ddp", 4 * 4)],  # DDP keeps its buckets
)
def test_between_steps_there_are_weights_and_two_moments(results, name, bytes_each):
    result = results[name]
    assert result.num_parameters == PARAMETERS
    slack = 6 * 40 * ROUNDING  # step counters, too
    assert 0 <= result.steady_allocated_bytes - bytes_each * PARAMETERS < slack


def test_accumulation_carries_the_gradients_into_the_next_forward(results: dict[str, GoldenResult]) -> None:
    """Whole ones in fp32, also of FSDP without synchronisation."""
    for once, twice, rel in (("none", "accumulating", 0.01), ("fsdp 8", "fsdp accumulating", 0.02)):
        more = results[twice].events["forward_end"] - results[once].events["forward_end"]
        assert more == pytest.approx(4 * PARAMETERS, rel=rel)
    assert results["accumulating"].events["optimizer_step"] == results["none"].events["optimizer_step"]


def test_adapters_are_fp32_except_where_all_is_bf16(results: dict[str, GoldenResult]) -> None:
    linears = [(HIDDEN, HIDDEN)] * 2 + [(HIDDEN, HIDDEN // 2)] * 2 + [(HIDDEN, FFN)] * 2 + [(FFN, HIDDEN)]
    trained = LAYERS * 8 * sum(inputs + outputs for inputs, outputs in linears)
    assert {results[name].num_trained_parameters for name in ("lora", "lora bf16", "qlora")} == {trained}
    of_two = LAYERS * 8 * (2 * HIDDEN + HIDDEN + HIDDEN // 2)
    assert results["lora of two"].num_trained_parameters == of_two
    difference = results["lora"].steady_allocated_bytes - results["lora bf16"].steady_allocated_bytes
    assert difference == pytest.approx(3 * 2 * trained, rel=0.02)


def test_dora_trains_a_magnitude_a_row_and_measures_every_weight(results: dict[str, GoldenResult]) -> None:
    rows = LAYERS * (2 * HIDDEN + 2 * (HIDDEN // 2) + 2 * FFN + HIDDEN)
    assert results["dora"].num_trained_parameters - results["lora"].num_trained_parameters == rows
    held = results["dora"].events["forward_end"] - results["lora"].events["forward_end"]
    assert held > 2 * 2 * rows // LAYERS * 1024, "the products of layers and adapters, of each of 1024 tokens"


def test_nf4_holds_half_a_byte_a_weight_and_its_scales(results: dict[str, GoldenResult]) -> None:
    linear = LAYERS * (BLOCK - 2 * HIDDEN)
    saved = results["lora"].events["load"] - results["qlora"].events["load"]
    scales = linear / 64 + 4 * linear / 64 / 256
    tables = LAYERS * 7 * (2 + 3) * ROUNDING
    assert 0 <= 2 * linear - linear / 2 - scales - saved < tables


@pytest.mark.parametrize(
    ("quant", "bytes_each", "others"), [(Quant.NF4, 4, 0), (Quant.NF4_DQ, 1 + 4 / 256, 4 * 256)], ids=["nf4", "nf4-dq"]
)
def test_a_scale_has_four_bytes_or_doubly_quantised_one_and_its_share_of_another(quant, bytes_each, others):
    model, _ = build_on_meta(replace(BASE, method=Method.QLORA, quant=quant))
    layer = model.get_submodule("model.layers.0.mlp.up_proj.base_layer")
    scales = {name: buffer.nbytes for name, buffer in layer.named_buffers() if "scale" in name and name != "mean_scale"}
    assert sum(scales.values()) == HIDDEN * FFN / 64 * bytes_each + others


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_fsdp_divides_what_lasts_by_the_ranks_and_cuts_a_model_before_it_has_memory(results, num_ranks):
    found = results[f"fsdp {num_ranks}"]
    assert 0 <= found.steady_allocated_bytes - 12 * PARAMETERS / num_ranks < 8 * 40 * ROUNDING
    assert 0 <= found.events["load"] - 4 * PARAMETERS / num_ranks <= 80 * ROUNDING


@pytest.mark.parametrize(("name", "shards"), [("hsdp", 8), ("hsdp in groups", 2)])
def test_hsdp_divides_by_the_ranks_of_a_group_only(results: dict[str, GoldenResult], name: str, shards: int) -> None:
    full = results[f"fsdp {shards}"].steady_allocated_bytes
    assert results[name].steady_allocated_bytes == pytest.approx(full, rel=0.001)


def test_packed_rows_hold_positions_and_cosines_of_their_own(results: dict[str, GoldenResult]) -> None:
    tokens, positions = 2 * 512, 512
    more = results["packed"].events["loss_backward"] - results["none"].events["loss_backward"]
    cosines = 2 * 4 * (tokens - positions) * (HIDDEN // 8)
    assert more == pytest.approx(8 * tokens + cosines, abs=40 * ROUNDING)
    assert results["packed"].steady_allocated_bytes == results["none"].steady_allocated_bytes


def test_activations_in_host_ram_are_there_and_not_on_the_device(results: dict[str, GoldenResult]) -> None:
    plain, moved = results["four layers"], results["offloaded"]
    saved = plain.events["norm_backward"] - moved.events["norm_backward"]
    assert 0 < moved.pinned_host_bytes < 1.1 * saved
    assert saved < 1.1 * moved.pinned_host_bytes
    assert plain.pinned_host_bytes == 0
    boundary = 4 * 2 * 512 * HIDDEN  # the input of a block in fp32
    assert results["offloaded full"].pinned_host_bytes == 3 * boundary


@pytest.mark.parametrize("model", ["llama", "llama4"])
def test_a_table_in_host_ram_is_not_on_the_device_and_the_rows_of_a_micro_batch_are_pinned(results, model: str) -> None:
    plain, moved = results[model], results[f"{model} table on host"]
    assert plain.steady_allocated_bytes - moved.steady_allocated_bytes == 2 * VOCAB * HIDDEN
    assert plain.peak_allocated_bytes - moved.peak_allocated_bytes == 2 * VOCAB * HIDDEN
    assert (plain.pinned_host_bytes, moved.pinned_host_bytes) == (0, 2 * 2 * 512 * HIDDEN)


@pytest.mark.parametrize("method", ["", " lora"])
def test_pairs_need_what_as_many_rows_need_and_their_sums(results: dict[str, GoldenResult], method: str) -> None:
    """Of every token its loss or its weight; the reference of adapters has left nothing behind."""
    pairs, rows = results[f"pairs{method}"], results[f"rows{method}"]
    num_tokens = 4 * 512
    assert pairs.steady_allocated_bytes == rows.steady_allocated_bytes
    assert list(pairs.events) == list(rows.events)
    for event, num_bytes in pairs.events.items():
        assert 0 <= num_bytes - rows.events[event] <= 4 * num_tokens + 40 * ROUNDING, event


def test_the_reference_leaves_the_head_gathered_and_no_buffer_of_it(results: dict[str, GoldenResult]) -> None:
    """When the forward ends a block's buffer is there, which is smaller here than the head's."""
    pairs, rows = results["pairs fsdp lora"], results["rows fsdp lora"]
    head, block = 2 * (VOCAB * HIDDEN + HIDDEN), 2 * BLOCK
    saved = rows.events["forward_end"] - pairs.events["forward_end"]
    adapters = 2 * 8 * (2 * 2 * HIDDEN + 2 * (HIDDEN + HIDDEN // 2) + 3 * (HIDDEN + FFN))
    assert saved == pytest.approx(head - block - adapters, rel=0.05)


def test_pairs_keep_no_masks_of_dropout(results: dict[str, GoldenResult]) -> None:
    masks = 4 * 512 * HIDDEN * (2 * LAYERS + 1)  # a byte an element: after attention, the MLP and the embedding
    saved = results["rows gpt2"].events["norm_backward"] - results["pairs gpt2"].events["norm_backward"]
    assert saved == pytest.approx(masks, rel=0.1)


GOLDEN = Path(__file__).parents[1] / "golden" / "dry_run.jsonl"
ROWS = {row.name: row for row in read_golden(GOLDEN)}
AGAIN = (  # small models that take some seconds each, in this order in one process
    "pythia-1b zero3 n8 bf16-mixed chunked b4 s2048 ckpt-full adamw_fused",
    "gpt2 bf16 eager b8 s1024 ckpt-full adamw_fused",  # after ZeRO-3, whose patches of torch must be gone
)
MORE = (
    "qwen2.5-0.5b lora r8-q_proj+v_proj bf16-mixed chunked b4 s1024",
    "qwen2.5-0.5b bf16-mixed chunked b4 s2048 offload",
    "pythia-1b bf16-mixed chunked b4 s2048",
    "pythia-1b zero2 n8 fp32 chunked b1 s1024 ckpt-full",
    "pythia-1b zero3 n8 bf16-mixed chunked b4 s2048 ckpt-full adamw_fused",  # another stage in the same process
)


def result_of(row: GoldenRow) -> GoldenResult:
    assert row.result is not None, f"{row.name} has no result: make golden"
    return row.result


def test_names_are_unique_and_every_row_has_a_result() -> None:
    assert len(read_golden(GOLDEN)) == len(ROWS) >= 70
    assert {row.request.sharding for row in ROWS.values()} == set(Sharding)
    for result in map(result_of, ROWS.values()):
        assert sum(result.parts.values()) == result.peak_allocated_bytes


@pytest.mark.parametrize("names", [AGAIN, pytest.param(MORE, marks=[pytest.mark.long, pytest.mark.products])])
def test_known_dry_runs_come_out_again(names: tuple[str, ...], tmp_path: Path) -> None:
    """To the byte: nothing in them depends on the machine."""
    for name, found in run_dry(tmp_path, {name: ROWS[name].request for name in names}).items():
        assert found == replace(result_of(ROWS[name]), versions=found.versions), name
