"""Piece `path`: a step's time is split as it was spent, floors are counted by hand, and gaps are told as they are."""

import gzip
import io
import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace
from on_gpu import path, path_ceilings, path_table
from on_gpu.bench import Bench, job_of
from on_gpu.case import Case
from on_gpu.goals import Standing
from on_gpu.models import model_config
from on_gpu.path_floors import Ceilings, Rates, StepWork, bytes_of, floors, product_shapes
from on_gpu.path_ops import BACKWARD, norms_of, ops_of
from on_gpu.path_trace import Breakdown, Group, breakdown, read_trace
from on_gpu.prediction_peaks import ROWS_NAME, plan_stated
from planning_factory import machine

from launch.console import Console
from launch.supervisor import StopRequest
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.model_shape import read_model_shape
from trainer.spec.units import GIB

CALL_S = 540.0  # the minutes of a call of the benchmark
SMALL, LARGE = path.CASES
LIBRARIES = ("torch", "accelerate", "transformers", "bitsandbytes", "liger-kernel", "flash-attn")
WORK = StepWork(
    seq_len=4,
    micro_batch=2,
    accumulation=1,
    checkpointing="none",
    element_bytes=2,
    weight_bytes=100,
    gradient_bytes=100,
    state_bytes=200,
)
SHAPE = read_model_shape(model_config("llama-3.2-1b", is_tiny=True))
LAYERS, HIDDEN, QUERY, KV, FFN, VOCAB = 2, 64, 64, 32, 128, 512


# The steps.


def names_of(done: dict) -> dict[str, float]:
    return {step.name: step.expected_s for step in path.steps(SimpleNamespace(), done)}


def test_every_step_has_a_name_of_its_own_and_ends_within_a_call():
    done = {f"{case.name}: profile": {"work": {}} for case in path.CASES}
    steps = [(step.name, step.expected_s) for step in path.steps(SimpleNamespace(), done)]
    assert len(steps) == 2 * len(path.CASES) == len(dict(steps))
    assert all(expected_s < CALL_S for _, expected_s in steps)
    assert path.TIMEOUT_S < CALL_S


def test_ceilings_wait_for_their_profile_and_are_not_measured_where_it_failed():
    assert names_of({})[f"{SMALL.name}: ceilings"] == math.inf
    names = names_of({f"{SMALL.name}: profile": {"error": "EnvironmentFaultError: no room"}})
    assert f"{SMALL.name}: ceilings" not in names and f"{LARGE.name}: ceilings" in names


@pytest.mark.parametrize("case", path.CASES, ids=lambda case: case.name)
def test_every_case_is_planned_as_it_was_given_and_fits_the_card(case: Case, tmp_path: Path):
    hardware = machine("1xH200", ram_bytes=128 * GIB, libraries=LIBRARIES)
    job = job_of(case, model=case.model, rows=ROWS_NAME, seq_len=case.seq_len)
    chosen = plan_stated(job, hardware, tmp_path, num_rows=32).chosen
    assert chosen.memory.fits
    assert (chosen.micro_batch, chosen.accumulation, chosen.seq_len) == (case.micro_batch, 1, case.seq_len)
    assert {
        "pin.precision": chosen.strategy.precision,
        "pin.optimizer": chosen.strategy.optimizer,
        "pin.sharding": chosen.strategy.sharding,
        "train.method": chosen.method,
        "pin.checkpointing": chosen.checkpointing,
    } == case.settings


def test_what_is_wanted_is_wanted_of_a_case():
    assert set(path_table.WANTED_MFU) <= {case.name for case in path.CASES}


def run_here(code: str) -> str:
    return path._run([sys.executable, "-c", code], SimpleNamespace(environment=dict(os.environ)))


def test_what_fails_is_told_in_its_last_line():
    assert run_here("print('first')") == "first\n"
    for code, said in (("print('first'); sys.exit('  no   room\\n')", "no room"), ("sys.exit(3)", "it said nothing")):
        with pytest.raises(EnvironmentFaultError) as raised:
            run_here(f"import sys; {code}")
        assert str(raised.value) == said


def test_what_takes_too_long_is_told_without_its_command(monkeypatch):
    monkeypatch.setattr(path, "TIMEOUT_S", 0.2)
    with pytest.raises(EnvironmentFaultError) as raised:
        run_here("import time; time.sleep(60)")
    assert str(raised.value) == "not done within 0 s"


# A trace.


def event(name: str, begin: float, took: float, *, category: str = "cpu_op", thread: int = 1, **more) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": took, "tid": thread, "args": more}


def operator(name: str, begin: float, took: float, number: int, **more) -> dict:
    return event(name, begin, took, **{"External id": number}, **more)


def kernel(name: str, begin: float, took: float, number: int | None = None, **more) -> dict:
    linked = {} if number is None else {"External id": number}
    return event(name, begin, took, category=more.pop("category", "kernel"), thread=7, **linked, **more)


def microseconds(found: Breakdown) -> dict[str, float]:
    return {group: round(seconds * 1e6, 3) for group, seconds in found.seconds.items()}


def launched(name: str, *around: str, by: str = "some_kernel") -> dict[str, float]:
    """The groups of one kernel of 1 µs that was started by an operator within others, the outermost first."""
    nest = [operator(each, place, 100 - 2 * place, place + 1) for place, each in enumerate((*around, name))]
    return microseconds(breakdown([*nest, kernel(by, 200, 1, len(nest))]))


@pytest.mark.parametrize(
    ("group", "name", "around", "by"),
    [
        (Group.PRODUCTS, "aten::mm", ("aten::linear", "aten::matmul"), "nvjet_tst_128x256_64x4_2x1_v_bz_TNT"),
        (Group.PRODUCTS, "aten::mm", ("ChunkedLoss",), "nvjet_tst"),
        (Group.PRODUCTS, "aten::mm", (f"{BACKWARD}MmBackward0", "MmBackward0"), "splitKreduce_kernel"),
        (Group.ATTENTION, "aten::_flash_attention_forward", ("aten::scaled_dot_product_attention",), "flash_fwd"),
        (Group.ATTENTION, "flash_attn::_flash_attn_backward", (), "void flash::flash_bwd_kernel<...>"),
        (Group.ATTENTION, "aten::_cudnn_attention_forward", (), "cudnn_generated_sdpa_sm90_flash_fprop_wgmma_f16"),
        (Group.LOSS, "aten::copy_", ("aten::cross_entropy_loss", "aten::to"), "void at::native::unrolled<...>"),
        (Group.LOSS, "aten::exp_", ("ChunkedLossBackward",), "void at::native::vectorized<...>"),
        (Group.NORM, "aten::_fused_rms_norm", (), "layer_norm_kernel"),
        (Group.NORM, "aten::mul", (f"{BACKWARD}PowBackward0", "PowBackward0"), "vectorized"),
        (Group.OPTIMIZER, "aten::_fused_adamw_", ("Optimizer.step#AdamW.step",), "multi_tensor_apply_kernel"),
        (Group.OPTIMIZER, "aten::_foreach_norm", (), "lpnorm_cleanup"),
        (Group.EMBEDDING, "aten::embedding_dense_backward", (f"{BACKWARD}EmbeddingBackward0",), "compute_grad_weight"),
        (Group.COPIES, "aten::copy_", ("aten::contiguous",), "void at::native::elementwise<...>"),
        (Group.ELEMENTWISE, "aten::silu", (), "void at::native::vectorized<...>"),
    ],
)
def test_a_kernel_belongs_where_its_operator_does(group: Group, name: str, around: tuple[str, ...], by: str):
    assert launched(name, *around, by=by) == {group: 1.0}


def test_a_kernel_that_names_no_operator_is_put_down_to_the_call_that_launched_it():
    launch = event("cudaLaunchKernel", 1, 1, category="cuda_runtime", correlation=9, **{"External id": 4})
    found = breakdown(
        [operator("aten::silu", 0, 5, 4), launch, kernel("k", 10, 3, correlation=9), kernel("nvjet", 20, 2)]
    )
    assert microseconds(found) == {Group.ELEMENTWISE: 3.0, Group.PRODUCTS: 2.0}


def test_copies_between_host_and_device_are_copies_whoever_asks():
    found = breakdown([operator("aten::embedding", 0, 5, 4), kernel("Memcpy HtoD", 10, 3, 4, category="gpu_memcpy")])
    assert microseconds(found) == {Group.COPIES: 3.0}


def test_time_at_once_is_busy_once_and_communication_behind_computation_is_not_exposed():
    collective = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
    found = breakdown([kernel("a", 0, 10), kernel("b", 5, 10), kernel(collective, 12, 8)])
    assert found.is_device and found.num_started == 3
    assert microseconds(found) == {Group.ELEMENTWISE: 20.0}
    assert found.busy_s == pytest.approx(20e-6) and found.exposed_communication_s == pytest.approx(5e-6)


def test_waits_of_the_step_count_and_not_that_of_the_profiler_after_it():
    def wait(name: str, begin: float) -> dict:
        return event(name, begin, 1, category="cuda_runtime")

    step = [operator("aten::_local_scalar_dense", 0, 50, 1), kernel("k", 5, 1, 1)]
    waits = [wait("cudaStreamSynchronize", 10), wait("cudaLaunchKernel", 20), wait("cudaDeviceSynchronize", 60)]
    assert breakdown([*step, *waits]).num_waits == 1


def test_operators_of_a_cpu_count_without_what_they_call():
    linear = [operator("aten::linear", 0, 10, 1), operator("aten::mm", 2, 6, 2)]
    asks = [operator("aten::item", 20, 4, 3), operator("aten::_local_scalar_dense", 21, 2, 4)]
    steps = [event("Optimizer.step#AdamW.step", 30, 10, category="user_annotation")]
    steps += [operator("aten::_local_scalar_dense", 31, 2, 5)]
    found = breakdown([*linear, *asks, *steps])
    assert not found.is_device
    assert microseconds(found) == {Group.PRODUCTS: 10.0, Group.ELEMENTWISE: 4.0, Group.OPTIMIZER: 2.0}
    assert found.num_waits == 1 and found.num_started == 3
    assert found.top[Group.PRODUCTS] == pytest.approx({"aten::mm": 6e-6, "aten::linear": 4e-6})


NORM = ("aten::to", "aten::pow", "aten::mean", "aten::add", "aten::rsqrt", "aten::mul", "aten::to", "aten::mul")


def chain(begin: float, *, first: int = 0, thread: int = 1) -> list[dict]:
    """A norm as transformers writes it, and a product with something else behind it."""
    names = (*NORM, "aten::mul")
    return [
        event(name, begin + place, 1, thread=thread, **{"Sequence number": first + place})
        for place, name in enumerate(names)
    ]


def norm_time(*events: dict) -> float:
    return microseconds(breakdown(events)).get(Group.NORM, 0.0)


def test_a_norm_is_its_chain_up_to_the_product_with_the_weight():
    assert norm_time(*chain(0)) == len(NORM)
    without_root = [each for each in chain(0) if each["name"] != "aten::rsqrt"]
    assert norm_time(*without_root) == 0.0


def gradient(node: str, begin: float, sequence: int, *inside: dict) -> list[dict]:
    whole = {"Sequence number": sequence}
    return [
        event(f"{BACKWARD}{node}", begin, 50, thread=2, **whole),
        event(node, begin, 40, thread=2, **whole),
        *inside,
    ]


def test_gradients_of_a_norm_are_told_by_autograds_numbers():
    forward = chain(0, first=10)
    of_norm = gradient("MulBackward0", 100, 15, event("aten::mul", 101, 3, thread=2))
    of_other = gradient("MulBackward0", 200, 18, event("aten::mul", 201, 5, thread=2))
    assert norm_time(*forward, *of_norm, *of_other) == len(NORM) + 3


def test_the_gradient_of_the_residual_is_no_part_of_the_norm_whose_it_is_added_to():
    node = gradient("ToCopyBackward0", 100, 10, event("aten::to", 101, 3, thread=2))
    added = event("aten::add_", 142, 5, thread=2)  # not in the node itself
    assert norm_time(*chain(0, first=10), *node, added) == len(NORM) + 3


def test_what_runs_again_in_a_backward_makes_a_norm_of_nothing_beside_it():
    again = chain(102, first=90, thread=2)
    inside = [*again, event("aten::cat", 120, 2, thread=2), event("aten::mm", 130, 4, thread=2)]
    events = [*chain(0, first=10), *gradient("MmBackward0", 100, 40, *inside)]
    norms = norms_of(ops_of(events))
    assert 40 not in norms.sequences and 14 in norms.sequences
    found = microseconds(breakdown(events))
    assert (found[Group.NORM], found[Group.COPIES], found[Group.PRODUCTS]) == (2 * len(NORM), 2.0, 4.0)


def test_the_step_that_the_product_writes_is_read(tmp_path: Path):
    file = tmp_path / "trace.json.gz"
    metadata = {"ph": "M", "name": "process_name", "args": {}}
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": [metadata, operator("aten::mm", 0, 4, 1)]}).encode()))
    assert microseconds(read_trace(file)) == {Group.PRODUCTS: 4.0}


# Floors.


def ceilings(rate: float = 1e6, **more) -> Ceilings:
    every = {each.name: Rates(forward=rate, backward=rate) for each in product_shapes(SHAPE, WORK.tokens)}
    return replace(Ceilings(products=every), **more)


def test_products_are_those_of_the_layers_and_the_head():
    counts = {(each.inputs, each.outputs): count for each, count in product_shapes(SHAPE, WORK.tokens).items()}
    assert counts == {
        (HIDDEN, QUERY): 2 * LAYERS,  # queries, and what attention gives
        (HIDDEN, KV): 2 * LAYERS,
        (HIDDEN, FFN): 2 * LAYERS,
        (FFN, HIDDEN): LAYERS,
        (HIDDEN, VOCAB): 1,
    }


def test_products_and_attention_are_counted_by_hand():
    once = 2 * WORK.tokens
    blocks = once * LAYERS * (2 * HIDDEN * QUERY + 2 * HIDDEN * KV + 3 * HIDDEN * FFN)
    head = once * HIDDEN * VOCAB
    attention = LAYERS * once * WORK.seq_len * QUERY  # causal
    for checkpointing, again in (("none", 0), ("full", 1)):
        work = replace(WORK, checkpointing=checkpointing)
        found = floors(SHAPE, work, ceilings(attention=Rates(forward=2e6, backward=1e6)))
        assert found[Group.PRODUCTS] == pytest.approx(((3 + again) * blocks + 3 * head) / 1e6)
        assert found[Group.ATTENTION] == pytest.approx(attention * ((1 + again) / 2e6 + 2.5 / 1e6))


def test_gradients_are_held_to_the_rate_of_gradients():
    slow = {name: Rates(forward=1e6, backward=0.5e6) for name in ceilings().products}
    even, uneven = (floors(SHAPE, WORK, each)[Group.PRODUCTS] for each in (ceilings(), Ceilings(products=slow)))
    assert uneven == pytest.approx(even * 5 / 3)


def test_bytes_that_cannot_be_saved_are_counted_by_hand():
    found = bytes_of(SHAPE, WORK)
    normed = LAYERS * 2 * HIDDEN + HIDDEN
    assert found[Group.NORM] == 2 * 2 * WORK.tokens * 3 * normed
    assert found[Group.LOSS] == 3 * 2 * WORK.tokens * VOCAB
    assert found[Group.EMBEDDING] == 2 * (3 * WORK.tokens * HIDDEN + VOCAB * HIDDEN)
    assert found[Group.OPTIMIZER] == 2 * (100 + 100 + 200)
    elements = 3 * 2 * HIDDEN + 2 * (QUERY + KV) + 2 * (QUERY + KV) + 3 * FFN
    assert found[Group.ELEMENTWISE] == 2 * WORK.tokens * 3 * LAYERS * elements


def test_more_micro_batches_take_longer_but_for_the_optimizer():
    work, known = replace(WORK, accumulation=3), ceilings(attention=Rates(forward=1, backward=1), copy_bytes_per_s=1.0)
    once, thrice = (floors(SHAPE, each, known) for each in (WORK, work))
    assert {group for group in once if thrice[group] == pytest.approx(3 * once[group]) and once[group]} == {
        Group.PRODUCTS, Group.ATTENTION, Group.NORM, Group.ELEMENTWISE, Group.LOSS, Group.EMBEDDING
    }  # fmt: skip
    assert thrice[Group.OPTIMIZER] == once[Group.OPTIMIZER]


def test_a_group_without_a_ceiling_has_no_floor():
    known = ceilings()
    name = next(iter(known.products))
    missing = replace(known, products={each: rates for each, rates in known.products.items() if each != name})
    assert set(floors(SHAPE, WORK, missing)) == {Group.COPIES, Group.IDLE, Group.COMMUNICATION}


# Tables and goals.


def profile(case: Case = LARGE, *, is_device: bool = True, **more) -> dict:
    seconds = {Group.PRODUCTS: 1.0, Group.NORM: 0.2, Group.ATTENTION: 0.3, Group.LOSS: 0.1, Group.OPTIMIZER: 0.05}
    top = {Group.NORM: {"void at::native::(anonymous namespace)::reduce_kernel<512, 1>(int)": 0.2}}
    return {
        "case": case.name,
        "model": case.model,
        "settings": {"precision": "bf16", "loss": "chunked"},
        "seq_len": case.seq_len,
        "micro_batch": case.micro_batch,
        "accumulation": 1,
        "device": "Some H200",
        "is_rehearsal": not is_device,
        "is_device": is_device,
        "command": "shardwise profile job.yaml --steps 10",
        "step_s": 2.0,
        "whole_s": 2.0,
        "seconds": {str(group): took for group, took in seconds.items()} | {Group.IDLE: 0.35},
        "top": top,
        "num_waits": 3,
        "num_started": 1000,
        "peak_bytes": 70 * GIB,
        "ceilings": f"{case.name}: ceilings",
        "tokens_per_s": 8192.0,
        "peak_flops_per_s": 989e12,
        "mfu": 0.5,
    } | more


def measured(**more) -> dict:
    rates = Ceilings(
        products={"8 x 2 x 4": Rates(forward=700e12, backward=600e12)},
        attention=Rates(forward=500e12, backward=400e12),
        start_s=5e-6,
        copy_bytes_per_s=4e12,
        notes=("device_to_host_bytes_per_s: no room",),
    )
    known = {Group.PRODUCTS: 0.9, Group.NORM: 0.05, Group.ATTENTION: 0.31, Group.LOSS: 0.09, Group.IDLE: 0.0}
    return {"rates": msgspec.to_builtins(rates), "floors": {str(group): took for group, took in known.items()}} | more


def rows(case: Case = LARGE, **more) -> dict:
    return {f"{case.name}: profile": profile(case, **more), f"{case.name}: ceilings": measured()}


def test_improvements_are_those_furthest_above_their_floor():
    both = rows()
    lines = path_table.lines_of(both[f"{LARGE.name}: profile"], both)
    assert [line.group for line in lines][:2] == [Group.PRODUCTS, Group.IDLE]
    best = path_table.improvements(lines)
    assert [line.group for line in best] == [Group.IDLE, Group.NORM, Group.PRODUCTS]
    assert [line.gap_s for line in best] == pytest.approx([0.35, 0.15, 0.1])


def test_every_group_can_be_improved_in_words():
    for group in Group:
        row = profile(seconds={str(group): 1.0}, top={})
        known = measured(floors={str(group): 0.5})
        text = path_table.tables({"a": row, f"{LARGE.name}: ceilings": known})["path"]
        assert f"1. {group}: 500 ms of a step, 25.0%; " in text


def test_a_table_tells_shares_floors_and_gaps():
    text = path_table.tables(rows())["path"]
    assert "| norms | 200 ms | 10.0% | 50 ms | 150 ms | `at::native::reduce_kernel` 200 ms |" in text
    assert "| attention | 300 ms | 15.0% | 310 ms | -10 ms | - |" in text
    assert "| optimizer and clipping | 50 ms | 2.5% | - | - | - |" in text
    assert "`shardwise profile job.yaml --steps 10`" in text and "MFU 50.0% of 989 TFLOP/s" in text
    assert "The host waited for the device 3 times." in text and "rehearsal" not in text
    assert "starts 1,000 kernels and copies; at 5 µs" in text and "5 ms, 0.2% of a step" in text
    assert "8 x 2 x 4 700 / 600." in text and "Causal attention: 500 / 400." in text
    assert "within the device 4000." in text and "Not measured: device_to_host_bytes_per_s: no room." in text


def test_a_table_of_a_rehearsal_says_so():
    for is_device in (False, True):  # a tiny model on a GPU is one too
        text = path_table.tables(rows(is_device=is_device, is_rehearsal=True, mfu=None))["path"]
        assert "A rehearsal with a tiny model" in text and "MFU" not in text


def test_a_profile_without_ceilings_stands_alone():
    text = path_table.tables({f"{LARGE.name}: profile": profile()})["path"]
    assert "| matrix products | 1e+03 ms | 50.0% | - | - | - |" in text and "Its ceilings are not measured." in text
    assert "What would gain most" not in text


def test_what_failed_is_told_and_nothing_is_nothing():
    assert path_table.tables({}) == {}
    failed = {f"{SMALL.name}: profile": {"error": "EnvironmentFaultError: no\n  room."}}
    assert path_table.tables(failed)["path"] == f"\n{SMALL.name}: profile: EnvironmentFaultError: no room.\n\n"
    both = failed | rows()
    assert "no room." in path_table.tables(both)["path"] and f"### {LARGE.name}" in path_table.tables(both)["path"]


@pytest.mark.parametrize(
    ("mfu", "standing"), [(0.58, Standing.MET), (0.579, Standing.NOT_MET), (None, Standing.NOT_MEASURED)]
)
def test_the_goal_is_judged_by_what_was_measured(mfu: float | None, standing: Standing):
    (goal,) = path.PIECE.goals(rows(mfu=mfu))
    assert goal.standing is standing
    assert goal.reason == "idle between kernels is 350 ms above its floor" and "pin.compile" in goal.next_step


def test_a_goal_stays_where_its_profile_failed_or_is_missing():
    name = f"{LARGE.name}: profile"
    for done, reason in (({}, "not profiled yet"), ({name: {"error": "Fault: no\nroom"}}, "Fault: no room")):
        (goal,) = path.PIECE.goals(rows(SMALL) | done)
        assert (goal.standing, goal.figure, goal.reason) == (Standing.NOT_MEASURED, None, reason)
        assert goal.next_step


# For real, in the smallest form.


def test_ceilings_are_measured_and_what_cannot_be_had_is_a_note():
    shapes = tuple(product_shapes(SHAPE, 8))
    wanted = path_ceilings.Wanted(
        device="cpu",
        dtype="float32",
        shapes=(*shapes, replace(shapes[0], tokens=2**45)),  # which no memory holds
        attention=(1, 2, 16, 16),
        budget_s=0.0,
    )
    found = path_ceilings.measure(wanted)
    assert set(found.products) == {shape.name for shape in shapes}
    assert found.attention and found.start_s and found.copy_bytes_per_s
    assert found.host_to_device_bytes_per_s is None
    (note,) = found.notes
    assert note.startswith(f"{2**45} x ")
    assert set(floors(SHAPE, replace(WORK, seq_len=8, micro_batch=1), found)) == set(Group)


def tiny_bench(folder: Path) -> Bench:
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state")}
    console = Console(io.StringIO())
    return Bench(folder / "work", is_tiny=True, console=console, stop=StopRequest(), environment=environment)


@pytest.mark.long
def test_the_product_profiles_a_case_and_its_whole_time_is_in_the_groups(tmp_path: Path):
    row = path.run_profile(tiny_bench(tmp_path), LARGE)
    assert row["is_rehearsal"] and not row["is_device"] and row["num_waits"] == 0
    assert sum(row["seconds"].values()) == pytest.approx(row["whole_s"], rel=0.05)
    assert {Group.PRODUCTS, Group.ATTENTION, Group.NORM, Group.LOSS, Group.OPTIMIZER, Group.EMBEDDING} <= set(
        row["seconds"]
    )
    assert row["settings"]["checkpointing"] == "full" and {"attention", "loss", "compile"} <= set(row["settings"])
    work = msgspec.convert(row["work"], StepWork)
    assert (work.tokens, work.gradient_bytes) == (4 * 64, work.weight_bytes)
    assert work.state_bytes == pytest.approx(2 * work.weight_bytes, rel=0.01)  # two moments, in one type with weights
    assert not list((tmp_path / "work").glob("run*")), "nothing of it is kept"
    assert f"### {LARGE.name}" in path_table.tables({"a": json.loads(json.dumps(row))})["path"]
