"""Piece `prediction`: its cases are what they say, errors and verdicts are counted right, and nothing is called met.

The cases are planned for a stated H200, so that none of them is refused on the day that a card is there.
"""

import io
import itertools
import os
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from on_gpu import prediction
from on_gpu.bench import Bench, job_of
from on_gpu.case import Case, CaseResult, Outcome
from on_gpu.goals import Goal, Standing, at_least, at_most, goals_table
from on_gpu.prediction_answers import NOT_YET, SEVERAL_GPUS, answers
from on_gpu.prediction_caps import MOST_RUNS, RESOLUTION, ROUNDING_BYTES, CapRow, next_cap
from on_gpu.prediction_cases import ALLOCATED, CAPPED, CASES, FIRST, LOADED, is_edge
from on_gpu.prediction_goals import goals, scatter, verdicts
from on_gpu.prediction_peaks import ROWS_NAME, Peak, plan_again, plan_stated, portable_hardware, read_peaks, write_peaks
from on_gpu.prediction_rows import (
    ALLOCATOR,
    DEVICE,
    FIGURES,
    PEAK,
    PROBE,
    TOKENS,
    CaseRow,
    case_rows,
    row_of,
    without_paths,
)
from on_gpu.prediction_runs import peaks_of, run_case
from on_gpu.prediction_tables import configuration, tables
from on_gpu.provenance import provenance_table
from planning_factory import machine

from launch.console import Console
from launch.supervisor import StopRequest
from trainer.spec.hardware import Disk, Holder, NetworkInterface
from trainer.spec.plan import Plan
from trainer.spec.report import Figures, MemoryFigures, SpeedFigures
from trainer.spec.strategy import LossHead, Method, Precision
from trainer.spec.units import GIB, MIB

LIBRARIES = (
    "torch", "accelerate", "transformers", "deepspeed", "peft", "bitsandbytes", "galore-torch", "transformer-engine",
    "torchao", "flash-attn", "liger-kernel",
)  # fmt: skip
HOST_BYTES = 128 * GIB


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    folder = tmp_path_factory.mktemp("stated")
    hardware = machine("1xH200", ram_bytes=HOST_BYTES, libraries=LIBRARIES)
    return {case.name: plan_stated(stated(case), hardware, folder, num_rows=32) for case in CASES}


def stated(case: Case) -> dict[str, str]:
    return job_of(case, model=case.model, rows=ROWS_NAME, seq_len=case.seq_len)


# The cases.


def test_there_are_enough_cases_each_under_a_name_of_its_own():
    assert len(FIRST) == 20 and len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
    settings = [(case.model, case.seq_len, case.micro_batch, tuple(case.settings.items())) for case in CASES]
    assert len(set(settings)) == len(CASES)


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("train.method", {*Method}),
        ("pin.precision", {Precision.FP32, Precision.BF16_MIXED, Precision.BF16, Precision.FP8}),
        ("pin.loss", {*LossHead}),
        ("pin.checkpointing", {"none", "selective", "full"}),
        ("pin.optimizer", {"adamw", "adamw_fused", "adamw_8bit", "paged_adamw_8bit", "adafactor"}),
        ("pin.offload", {"none", "optimizer", "optimizer+params"}),
        ("pin.sharding", {"none", "zero2", "zero3"}),
    ],
)
def test_the_first_twenty_stand_for_every_kind(key: str, wanted: set[str]):
    assert wanted <= {case.settings[key] for case in FIRST}


def test_the_first_twenty_have_every_model_and_the_ends_of_the_lengths():
    assert {case.model for case in FIRST} == {case.model for case in CASES}
    assert {min(case.seq_len for case in CASES), max(case.seq_len for case in CASES)} == {512, 32768}
    assert {512, 32768} <= {case.seq_len for case in FIRST}


def test_what_is_run_again_was_run_before():
    assert {case.name for case in (*CAPPED, *ALLOCATED, *LOADED)} <= {case.name for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_plan_of_a_case_is_the_case(case: Case, plans: dict[str, Plan]):
    chosen, settings = plans[case.name].chosen, case.settings
    pinned = {
        "train.method": chosen.method,
        "pin.precision": chosen.strategy.precision,
        "pin.optimizer": chosen.strategy.optimizer,
        "pin.sharding": chosen.strategy.sharding,
        "pin.offload": chosen.strategy.offload,
        "pin.checkpointing": chosen.checkpointing,
        "pin.loss": chosen.loss,
        "pin.attention": chosen.attention,
        "pin.compile": str(chosen.compile).lower(),
        "pin.activation_offload": str(chosen.activation_offload).lower(),
        "pin.optimizer_in_backward": str(chosen.optimizer_in_backward).lower(),
    }
    assert pinned | {"allow": settings["allow"]} == settings
    assert (chosen.micro_batch, chosen.accumulation, chosen.seq_len) == (case.micro_batch, 1, case.seq_len)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_only_cases_at_the_edge_are_near_the_card(case: Case, plans: dict[str, Plan]):
    memory = plans[case.name].chosen.memory
    share = memory.need_bytes / memory.usable_bytes
    assert (0.9 if is_edge(case) else 0.0) < share < (1.1 if is_edge(case) else 0.95)
    assert memory.host_bytes + memory.pinned_bytes < 0.9 * HOST_BYTES


def test_the_edge_is_tried_from_both_sides(plans: dict[str, Plan]):
    fits = [plans[case.name].chosen.memory.fits for case in CASES if is_edge(case)]
    assert min(fits.count(True), fits.count(False)) >= 4


# Errors, verdicts and goals.


def figures(peak: float, *, device: float | None = None, tokens_per_s: float = 1000.0) -> Figures:
    """Of a device with a peak of so many GiB."""
    memory = MemoryFigures(
        steady_allocated_bytes=round(peak * GIB / 2),
        peak_allocated_bytes=round(peak * GIB),
        peak_reserved_bytes=None if device is None else round((peak + 0.1) * GIB),
        device_bytes=None if device is None else round(device * GIB),
    )
    return Figures(memory=memory, speed=SpeedFigures(step_s=1.0, tokens_per_s_per_gpu=tokens_per_s))


def row(number: int = 0, *, predicted: float = 10.0, measured: float = 10.0, **facts) -> CaseRow:
    case = CASES[number]
    outcome = facts.pop("outcome", Outcome.RAN)
    device = facts.pop("device_gib", None)
    result = CaseResult(
        case=case,
        outcome=outcome,
        reason=facts.pop("reason", None),
        predicted=figures(predicted, device=None if device is None else predicted + 1),
        measured=figures(measured, device=device),
        need_bytes=facts.pop("need_bytes", 11 * GIB),
        usable_bytes=facts.pop("usable_bytes", 20 * GIB),
    )
    return CaseRow(
        **{
            "outcome": outcome,
            "result": result,
            "is_rehearsal": False,
            "device": "Some H200",
            "versions": {"torch": "1"},
            "job": stated(case),
            "num_rows": 32,
            "hardware": machine("1xH200", libraries=LIBRARIES),
            "context_bytes": GIB // 2,
        }
        | facts
    )


def rows_of(*values: CaseRow) -> dict:
    return {value.name: row_of(value) for value in values}


def test_errors_are_shares_of_what_was_measured():
    found = [row(number, predicted=10 + number / 10, measured=10) for number in range(5)]
    spread = scatter(found, PEAK)
    assert spread is not None and spread.num_cases == 5
    assert (spread.median, spread.p95, spread.worst) == pytest.approx((0.02, 0.038, 0.04))
    assert spread.worst_name == found[4].name
    assert scatter([row(predicted=9, measured=10)], PEAK).worst == pytest.approx(-0.1)


def test_what_a_device_does_not_count_has_no_error():
    assert scatter([row(), row(1)], DEVICE) is None
    assert scatter([row(outcome=Outcome.OUT_OF_MEMORY), row(1, outcome=Outcome.REFUSED)], PEAK) is None
    assert all(scatter([row(device_gib=11)], figure) is not None for figure in FIGURES)


def cap(cap_gib: float, outcome: Outcome = Outcome.RAN, *, name: str = CASES[0].name) -> CapRow:
    return CapRow(
        outcome=outcome,
        name=name,
        is_rehearsal=False,
        cap_bytes=round(cap_gib * GIB),
        context_bytes=GIB // 2,
        need_bytes=11 * GIB,
        peak_bytes=10 * GIB,
    )


def test_what_a_cpu_offloads_stays_where_it_was_and_is_held_to_nothing():
    offloaded = CASES.index(next(case for case in CASES if case.settings["pin.offload"] == "optimizer"))
    on_gpu, on_cpu = (row(offloaded, predicted=1.0, is_rehearsal=flag) for flag in (False, True))
    assert PEAK.error(on_gpu) == pytest.approx(-0.9)
    assert PEAK.error(on_cpu) is None and TOKENS.error(on_cpu) is not None
    table = tables({on_cpu.name: row_of(on_cpu)})["prediction"]
    assert "1 GiB / 10 GiB |" in table
    assert [peak.name for peak in peaks_of({each.name: row_of(each) for each in (on_cpu, row(0))})] == [row(0).name]


def test_a_verdict_is_wrong_in_two_ways():
    cases = [
        row(0),
        row(1, outcome=Outcome.OUT_OF_MEMORY),
        row(2, need_bytes=21 * GIB),
        row(3, need_bytes=21 * GIB, outcome=Outcome.OUT_OF_MEMORY),
        row(4, outcome=Outcome.FAILED),
    ]
    capped = {CASES[0].name: [cap(10.6), cap(10.4), cap(10.2, Outcome.OUT_OF_MEMORY), cap(10.5, Outcome.REFUSED)]}
    found = verdicts(cases, capped)
    assert (found.num_fitted, found.num_refused) == (2, 2)
    assert found.ran_out == (CASES[1].name,)
    assert found.would_run == (CASES[2].name, f"{CASES[0].name}, on 10.9 GiB")
    rehearsed = {CASES[0].name: [replace(each, is_rehearsal=True) for each in capped[CASES[0].name]]}
    assert verdicts(cases, rehearsed).would_run == (CASES[2].name,)


def standings(rows: dict) -> list[Standing]:
    return [goal.standing for goal in goals(rows)]


def test_goals_are_met_by_what_was_measured_and_by_nothing_else():
    good = [row(number, device_gib=11.0) for number in range(len(CASES))]
    assert set(standings(rows_of(*good))) == {Standing.MET}
    assert set(standings({})) == {Standing.NOT_MEASURED}
    bad = [row(number, predicted=11, device_gib=13.1, need_bytes=12 * GIB) for number in range(3)]
    bad += [row(3, outcome=Outcome.OUT_OF_MEMORY)]
    bad = [
        replace(each, result=replace(each.result, predicted=figures(11, device=12, tokens_per_s=1100))) for each in bad
    ]
    assert set(standings(rows_of(*bad))) == {Standing.NOT_MET}


def test_a_goal_that_is_not_met_says_why_and_what_next():
    broken = row(1, outcome=Outcome.REFUSED, reason="needs transformer-engine, which is not installed")
    found = goals(rows_of(row(), broken) | {"another": {"error": "ValueError: no such thing"}})
    (enough,) = (goal for goal in found if "configurations" in goal.name)
    assert enough.standing is Standing.NOT_MET and enough.figure == "1"
    assert "1 x needs transformer-engine" in enough.reason and "no such thing" in enough.reason
    assert all(goal.next_step for goal in found)


def test_the_table_of_goals_counts_them_and_a_rehearsal_judges_none():
    judged = {
        "a": [Goal("one", "at most 3%", "1%", at_most(0.01, 0.03)), Goal("two", "all", "none", at_least(0, 1), "r")]
    }
    table = goals_table({**judged, "b": [Goal("three", "none")]}, is_rehearsal=False)
    assert (
        "Of 3 goals: 1 met, 1 not met, 1 not measured." in table and "| two | all | none | **not met** | r |" in table
    )
    rehearsed = goals_table(judged, is_rehearsal=True)
    assert "0 met, 0 not met, 2 not measured" in rehearsed and "1% (rehearsal)" in rehearsed
    assert goals_table({}, is_rehearsal=False) == "Nothing was run yet.\n"


# The smallest card.


@pytest.mark.parametrize("smallest_gib", [10.05, 10.3, 10.49, 11.2, 12.0])
def test_caps_close_in_on_the_smallest_that_runs(smallest_gib: float):
    known, tried = row(), []
    while len(tried) < MOST_RUNS and (wanted := next_cap(known, tried)) is not None:
        runs = wanted >= smallest_gib * GIB
        tried.append(cap(wanted / GIB, Outcome.RAN if runs else Outcome.OUT_OF_MEMORY))
    assert tried[0].cap_bytes + tried[0].context_bytes == pytest.approx(known.result.need_bytes + ROUNDING_BYTES, abs=2)
    assert tried[0].said_fits
    smallest = min(each.cap_bytes for each in tried if each.has_run)
    resolution = 2 * RESOLUTION if smallest_gib < 11 else 0.06  # beyond what was asked for it is a step of a tenth
    assert smallest_gib * GIB <= smallest <= (1 + resolution) * smallest_gib * GIB
    if len(tried) < MOST_RUNS:
        assert next_cap(known, tried) is None


def test_no_cap_is_below_the_peak_that_was_measured():
    known = row(measured=10.0, need_bytes=9 * GIB)
    assert next_cap(known, []) == 10 * GIB + ROUNDING_BYTES
    assert next_cap(replace(known, result=replace(known.result, need_bytes=None)), []) is None


def test_a_card_is_looked_for_once_its_case_has_run(tmp_path: Path):
    bench = tiny_bench(tmp_path)
    ran = row(CASES.index(CAPPED[0]), need_bytes=11 * GIB)
    names = [step.name for step in prediction.steps(bench, rows_of(ran))]
    assert [name for name in names if "smallest card" in name] == [f"smallest card 1: {ran.name}"]
    capped = row_of(cap(10.6, name=ran.name))
    names = [step.name for step in prediction.steps(bench, rows_of(ran) | {f"smallest card 1: {ran.name}": capped})]
    assert f"smallest card 2: {ran.name}" in names


def test_the_cases_come_first_and_the_cards_last(tmp_path: Path):
    names = [step.name for step in prediction.steps(tiny_bench(tmp_path), rows_of(row(CASES.index(CAPPED[0]))))]
    assert names[:20] == [case.name for case in FIRST]
    assert names[-1].startswith("smallest card") and len(set(names)) == len(names)
    assert {case.name for case in CASES} <= set(names)


# What is shown.


def test_the_tables_say_what_was_measured_where():
    rows = rows_of(
        row(0, predicted=10.1, device_gib=11.0),
        row(1, predicted=12, device_gib=11.0),
        row(2, outcome=Outcome.REFUSED, reason="no FP8 here"),
        row(3, outcome=Outcome.OUT_OF_MEMORY),
    )
    text = tables(rows | {"other": {"error": "ValueError: no such thing"}, "c": row_of(cap(10.6))})["prediction"]
    for words in ("Measured on Some H200", "2 ran", "12 GiB / 10 GiB, +20.0%", "no FP8 here", "no such thing", "0.991"):
        assert words in text
    assert text.index("+20.0%") < text.index("10.1 GiB / 10 GiB, +1.0%"), "the largest errors come first"
    assert f"ran out: {CASES[3].name}" in text
    assert "rehearsal" not in text.lower()


def test_a_rehearsal_is_called_one_and_shows_no_device_bytes():
    text = tables(rows_of(row(0, is_rehearsal=True, device="some CPU")))["prediction"]
    assert "**A rehearsal on a CPU** (some CPU)" in text
    assert "| device | all | 0 | - | - | - | not counted by this device |" in text
    assert tables({}) == {"prediction": "Nothing was run yet.\n"}


def test_a_configuration_names_what_a_case_pins():
    offloaded = next(case for case in CASES if case.settings["pin.offload"] == "optimizer")
    words = configuration(row(CASES.index(offloaded)))
    assert words.startswith("full, bf16-mixed, deepspeed_cpu_adam") and "offload optimizer" in words
    assert "sdpa" not in words and "false" not in words


def test_every_open_question_is_answered_or_said_to_be_open():
    text = answers({})
    assert text.count(SEVERAL_GPUS) == 4
    assert text.count(NOT_YET) == text.count("\n| ") - 2 - 4, "every other line is open"


def test_bytes_a_logit_are_the_slope_over_the_vocabulary():
    peaks = [
        {"forward": 8 * 1000 + 77, "backward": 12 * 1000 + 99},
        {"forward": 8 * 500 + 77, "backward": 12 * 500 + 99},
    ]
    probe = {"kind": PROBE, "variants": {"eager": {"peaks": peaks}, "fused_linear": {"reason": "needs a GPU"}}}
    probe |= {"tokens": 10, "vocabularies": [100, 50], "predicted": {"eager": peaks, "fused_linear": "is for GPUs"}}
    text = answers({"probe: loss": probe})
    assert "`eager`, bytes a logit in the forward, in the backward | 8.00, 12.00 | 8.00, 12.00 |" in text
    assert "needs a GPU | is for GPUs |" in text


def test_answers_are_read_off_the_cases_of_a_card():
    plain = row(0, device_gib=11.0)
    fragmented = replace(plain, kind=ALLOCATOR, result=replace(plain.result, measured=figures(9, device=11.0)))
    stages = [("tensors", 0), ("a product", 32), ("a product with a bias", 32), ("a backward", 64)]
    context = {
        "kind": PROBE,
        "stages": [{"stage": name, "used": GIB, "allocated": mib * MIB, "reserved": 64 * MIB} for name, mib in stages],
        "predicted": {"cublas_handle": 32 * MIB, "used_before": 0},
    }
    text = answers({"a": row_of(plain), "b": row_of(fragmented), "probe: context": context})
    assert "1.010, 1.011" in text, "reserved / allocated"
    assert "32.0 MiB, 32.0 MiB, 64.0 MiB | 32.0 MiB a thread" in text
    assert "device bytes beside what is reserved, over all cases | 922 MiB to 922 MiB" in text


def test_where_the_figures_are_from_is_told(tmp_path: Path):
    table = provenance_table(tiny_bench(tmp_path), {"prediction": {"a": {}, "b": {"error": "no"}}})
    assert "a rehearsal with tiny models" in table and "2 done, 1 of them with an error" in table
    assert "torch" in table and "`make bench-gpu`" in table


# What is kept.


def test_what_is_kept_names_no_place_of_the_machine(tmp_path: Path):
    hardware = machine("1xH200", libraries=LIBRARIES)
    host = replace(
        hardware.host,
        disks=(Disk(path="/scratch/me", filesystem="ext4", total_bytes=1, free_bytes=1),),
        interfaces=(NetworkInterface(name="eth0", address="10.1.2.3", speed_bytes_per_s=None),),
    )
    held = replace(hardware.gpus[0], uuid="GPU-123", holders=(Holder(pid=1, name="/opt/x", memory_bytes=1),))
    text = msgspec.json.encode(portable_hardware(replace(hardware, host=host, gpus=(held,), notes=("/opt",)))).decode()
    assert not [words for words in ("/scratch", "10.1.2.3", "GPU-123", "/opt") if words in text]
    assert without_paths(f"{tmp_path}/rows/a.jsonl, {tmp_path}", tmp_path) == "rows/a.jsonl, ."


def test_peaks_are_kept_of_what_ran_and_replace_those_of_the_same_device(tmp_path: Path):
    ran, out = row(0), row(1, outcome=Outcome.OUT_OF_MEMORY)
    refused = replace(row(2, outcome=Outcome.REFUSED), hardware=None)
    peaks = peaks_of(rows_of(ran, out, refused))
    assert [peak.name for peak in peaks] == [ran.name, out.name]
    older = tmp_path / "card-2026-01-02.jsonl"
    other = tmp_path / "card-2-2026-01-02.jsonl"
    for path in (older, other):
        path.touch()
    kept = write_peaks(tmp_path, "card", "2026-02-03", peaks)
    assert kept is not None and read_peaks(kept) == peaks
    assert sorted(tmp_path.iterdir()) == [other, kept]
    assert write_peaks(tmp_path, "card", "2026-02-04", ()) is None


@pytest.mark.parametrize("case", [FIRST[0], FIRST[4]], ids=lambda case: case.name)
def test_a_kept_peak_is_predicted_again_as_it_was(case: Case, plans: dict[str, Plan], tmp_path: Path):
    memory = plans[case.name].chosen.memory
    peak = Peak(
        name=case.name,
        outcome=Outcome.RAN,
        job=stated(case),
        num_rows=32,
        hardware=plans[case.name].hardware,
        versions={},
        measured=MemoryFigures(),
    )
    assert plan_again(peak, tmp_path).chosen.memory == memory


# The whole of it, in a rehearsal.


def tiny_bench(folder: Path) -> Bench:
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state")}
    console = Console(io.StringIO())
    return Bench(folder / "work", is_tiny=True, console=console, stop=StopRequest(), environment=environment)


def test_a_case_runs_and_is_predicted_again_from_what_is_kept_of_it(tmp_path: Path):
    bench = tiny_bench(tmp_path)
    ran = run_case(bench, FIRST[0])
    assert ran.outcome is Outcome.RAN, ran.result.reason
    assert case_rows({ran.name: row_of(ran)}) == (ran,)
    assert abs(PEAK.error(ran) or 1) < 0.05 and TOKENS.measured(ran)
    (peak,) = peaks_of({ran.name: row_of(ran)})
    again = plan_again(peak, tmp_path).chosen.memory
    assert again.events == ran.events
    assert again.peak_allocated_bytes == ran.result.predicted.memory.peak_allocated_bytes
    text = msgspec.json.encode(peak).decode()
    assert str(tmp_path) not in text and "/tmp" not in text
    assert next_cap(ran, []) is not None
    assert len(list(itertools.islice(prediction.steps(bench, {ran.name: row_of(ran)}), 100))) > len(CASES)
