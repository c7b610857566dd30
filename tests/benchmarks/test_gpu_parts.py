"""The parts of the GPU benchmark: their cases are what they are named for, and verdicts and figures are right."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from cuda_stand_in import H100, Machine, machine_environment, needs_no_cuda
from on_gpu import engines, fp8, headline, peer_files, peers, predicted, small_cards
from on_gpu.bench import job_of
from on_gpu.case import Case, CaseResult, Outcome, RowKind, result_of, row_of
from on_gpu.models import model_config
from on_gpu.peaks import ROWS_NAME, plan_stated
from planning_factory import machine

from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Figures, MemoryFigures, SpeedFigures
from shardwise.trainer.spec.units import GIB

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIBRARIES = (
    "torch", "accelerate", "transformers", "deepspeed", "peft", "bitsandbytes", "galore-torch", "lion-pytorch",
    "transformer-engine", "torchao", "flash-attn", "liger-kernel", "triton",
)  # fmt: skip
CARD = machine("1xH100-SXM5-80GB", ram_bytes=128 * GIB, libraries=LIBRARIES)
H200 = machine("1xH200-SXM5-141GB", ram_bytes=128 * GIB, libraries=LIBRARIES)
ENGINE_CASES = tuple(each.case for each in engines.CASES)
FP8_CASES = (fp8.case_of(fp8.BASE), *(fp8.case_of("fp8", recipe) for recipe in fp8.RECIPES))
PLANNED = tuple(  # without recipes that only Blackwell has, and pairs, whose plan needs the rows
    case for case in (*ENGINE_CASES, *predicted.CASES, *FP8_CASES)
    if not case.name.endswith(("mxfp8", "nvfp4")) and case.rows is not RowKind.PAIRS
)  # fmt: skip


def planned(case: Case, folder: Path, card: Hardware = CARD) -> Plan:
    config = model_config(case.model, is_tiny=False)
    model = case.model if case.model != ENGINE_CASES[0].model else "llama-3.2-1b"
    job = job_of(case, model=model, rows=ROWS_NAME, seq_len=case.seq_len)
    num_rows = max(32, case.sequences_per_step)
    return plan_stated(job, card, folder, num_rows=num_rows, model_config=config, vram_bytes=case.vram_bytes)


def pins_of(plan: Plan) -> dict[str, str]:
    chosen, axes = plan.chosen, ("precision", "optimizer", "sharding", "offload")
    found = {name: getattr(chosen.strategy, name) for name in axes}
    for name in ("checkpointing", "loss", "attention", "compile", "activation_offload", "optimizer_in_backward"):
        found[name] = getattr(chosen, name)
    return {"train.method": str(chosen.method), **{f"pin.{key}": str(each).lower() for key, each in found.items()}}


@pytest.mark.parametrize("cases", [ENGINE_CASES, predicted.CASES, small_cards.CASES, headline.CASES])
def test_every_case_has_a_name_and_settings_of_its_own(cases: tuple[Case, ...]):
    assert len({case.name for case in cases}) == len(cases)
    settings = {json.dumps([case.model, case.seq_len, case.micro_batch, case.settings, case.engine, case.rows,
                            case.vram_bytes]) for case in cases}  # fmt: skip
    assert len(settings) == len(cases)


@pytest.mark.parametrize("case", PLANNED, ids=lambda case: case.name)
def test_a_case_is_planned_as_it_is_named_and_fits_an_h100(case: Case, tmp_path: Path):
    plan = planned(case, tmp_path)
    pins = pins_of(plan)
    assert {key: value for key, value in case.settings.items() if key in pins}.items() <= pins.items()
    assert (plan.chosen.micro_batch, plan.chosen.seq_len) == (case.micro_batch, case.seq_len)
    assert plan.chosen.memory.fits
    assert plan.chosen.memory.host_bytes + plan.chosen.memory.pinned_bytes < 0.9 * 128 * GIB


@pytest.mark.parametrize("case", small_cards.CASES, ids=lambda case: case.name)
def test_a_small_card_holds_its_job(case: Case, tmp_path: Path):
    assert planned(case, tmp_path).chosen.memory.need_bytes <= (case.vram_bytes or 0)


@pytest.mark.parametrize("case", headline.CASES, ids=lambda case: case.name)
def test_the_cases_of_8b_fit_an_h200_and_128_gib_of_ram(case: Case, tmp_path: Path):
    plan = planned(case, tmp_path, H200)
    pins, memory = pins_of(plan), plan.chosen.memory
    assert {key: value for key, value in case.settings.items() if key in pins}.items() <= pins.items()
    assert memory.need_bytes <= (case.vram_bytes or memory.usable_bytes)
    assert memory.host_bytes + memory.pinned_bytes < 0.9 * 128 * GIB
    if case is headline.FULL:
        chosen = plan.chosen
        assert (chosen.compile, chosen.strategy.precision, chosen.strategy.sharding) == (True, "bf16", "none")
        tokens = case.seq_len * case.sequences_per_step
        assert tokens == 262_144 and case.num_steps * chosen.speed.step_s < headline.FULL_S / 2


def result(**facts) -> CaseResult:
    return CaseResult(**{"name": "a", "outcome": Outcome.RAN, "losses": (3.0, 2.0)} | facts)


def figures(peak: int | None = None, tokens_per_s: float | None = None) -> Figures:
    speed = SpeedFigures(tokens_per_s_per_gpu=tokens_per_s)
    return Figures(memory=MemoryFigures(peak_allocated_bytes=peak, device_bytes=peak), speed=speed)


def test_a_row_gives_its_result_back():
    one = result(predicted=figures(10, 3.0), measured=figures(20, 2.0), facts={"a": "b"}, need_bytes=5)
    assert result_of(row_of(one)) == one
    assert (one.peak_error, one.speed_error) == (-0.5, 0.5)
    assert one.peak_difference == 1.0 and one.speed_difference == pytest.approx(-1 / 3)
    assert result_of({"outcome": "failed"}) is None


@pytest.mark.parametrize(
    ("facts", "losses", "verdict"),
    [
        ({"optimizer_state": "uint8 x 7"}, (3.0, 2.0), "as planned"),
        ({"optimizer_state": "float32"}, (3.0, 2.0), "optimizer_state: float32"),
        ({}, (3.0, 2.0), "optimizer_state: not reported"),
        ({"optimizer_state": "uint8"}, (3.0, 3.5), "loss 3.00 -> 3.50"),
    ],
)
def test_an_engine_case_is_as_planned_or_says_what_differs(facts, losses, verdict):
    case = next(each for each in engines.CASES if each.case.name == "optimizer adamw_8bit")
    assert engines.judge(case, row_of(result(facts=facts, losses=losses))) == {"verdict": verdict}


@pytest.mark.parametrize(
    ("share", "outcome", "is_right"),
    [
        (1.0, Outcome.RAN, True), (1.0, Outcome.OUT_OF_MEMORY, False), (predicted.LESS, Outcome.RAN, False),
        (predicted.LESS, Outcome.OUT_OF_MEMORY, True),
    ],
)  # fmt: skip
def test_a_cap_is_right_if_the_prediction_runs_and_less_dies(share: float, outcome: Outcome, is_right: bool):
    row = predicted.judge_cap(share, row_of(result(outcome=outcome, need_bytes=1000)))
    assert row["cap_bytes"] == 1000 * share
    assert row["verdict"].endswith("as predicted") is is_right
    assert predicted.caps_summary({"a": row}) == f"{int(is_right)} of 1 caps as predicted"


def test_errors_are_of_what_ran_and_tables_have_every_case():
    rows = {
        name: row_of(result(name=f"m {name} x", predicted=figures(110), measured=figures(100), peak_event="step"))
        for name in ("full", "lora")
    }
    rows["out"] = row_of(result(outcome=Outcome.OUT_OF_MEMORY, measured=figures(1)))
    rows["broken"] = {"outcome": "failed", "error": "OSError: x"}
    assert "2 of 4 ran, peak off by 10.0% (median)" in predicted.summary(rows)
    assert "| peak | all | 2 | 10.0% |" in predicted.table(rows)
    capped = {str(device): row_of(result(usable_bytes=10, measured=figures(device))) for device in (9, 11)}
    capped = {name: row | small_cards.judge(row) for name, row in capped.items()}
    assert small_cards.summary(capped) == "1 of 2 jobs ran within their cap"
    ratios = {
        name: row_of(result(measured=figures(1, rate))) for name, rate in (("bf16-mixed", 100.0), ("fp8 x", 130.0))
    }
    ratios[f"{fp8.GAIN} x"] = {"outcome": "ran", "speedup": 1.5}
    assert fp8.summary(ratios) == "fp8 x: 1.30 x bf16-mixed" and "| 1.30x | 1.50x |" in fp8.table(ratios)
    failed = {"broken": rows["broken"] | {"contest": "c", "trainer": "t"}}
    assert all("OSError: x" in part.table(failed) for part in (engines, peers, fp8, small_cards))


def peer_job(number: int, folder: Path, *, is_cuda: bool = True) -> peer_files.PeerJob:
    contest, rows = peers.CONTESTS[number], folder / "rows.jsonl"
    return peer_files.PeerJob(contest, contest.seq_len, folder / "model", rows, rows, folder, is_cuda=is_cuda)


SCRIPTS = (
    peer_files.trl_script,
    peer_files.best_trl_script,
    peer_files.unsloth_script,
    peer_files.best_unsloth_script,
    peer_files.accelerate_script,
)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("write", SCRIPTS, ids=lambda write: write.__name__)
def test_a_script_is_python_that_uses_what_it_imports(write, number: int, tmp_path: Path):
    job = peer_job(number, tmp_path)
    tree, method, is_unsloth = ast.parse(write(job)), job.contest.method, "unsloth" in write.__name__
    names = {alias.name for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert names <= used
    if not is_unsloth:
        assert ("LoraConfig" in used) is (method != "full") and ("BitsAndBytesConfig" in used) is (method == "qlora")
    settings = yaml.safe_load(peer_files.pinned_job(peer_job(0, tmp_path)))
    pins = settings["pin"]
    assert (settings["train"]["method"], pins["micro_batch"], pins["compile"]) == ("lora", 4, False)
    assert pins["loss"] == "chunked"


def test_figures_of_a_trainer_leave_the_slow_first_steps_out():
    lines = [{"step": step, "seconds": each, "loss": 2.0} for step, each in enumerate((None, 9.0, 1.0, 1.0, 1.0), 1)]
    found = peers.figures([*lines, {"step": 5, "loss": 1.5}], tokens=100)
    assert found["tokens_per_s"] == 100 and found["losses"]["5"] == 1.5
    rows = {
        name: {"contest": "8B", "trainer": name, "outcome": "ran", "tokens_per_s": rate, "losses": {"9": 2, "10": 1.5}}
        for name, rate in ((peers.PINNED, 100.0), ("TRL SFTTrainer", 80.0))
    }
    assert peers.summary(rows) == "8B: 1.25 x TRL SFTTrainer"
    assert "| 0.80x |" in peers.table(rows) and "| 1.5000 |" in peers.table(rows)


def rehearse(
    out: Path, *parts: str, peers: Path | None = None, environment: Mapping[str, str] | None = None
) -> tuple[str, dict[str, dict[str, dict]]]:
    """(output, rows by part and step) of the steps that match any of `parts`."""
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--tiny", "--minutes", "60", "--together", "2"]
    command += ["--out", str(out), "--only", "|".join(parts)]
    command += ["--peers", str(peers)] if peers is not None else []
    done = subprocess.run(
        command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (retained,) = (path for path in out.glob("*.json") if not path.name.startswith("steps"))
    return done.stdout, json.loads(retained.read_text())["parts"]


def test_a_rehearsal_runs_and_the_next_call_has_nothing_to_do(tmp_path: Path):
    """One step that has a meaning without a card; `python benchmarks/gpu.py` without a GPU runs all of them."""
    (first, _), (second, parts) = (rehearse(tmp_path, "engines: packed rows$") for _ in range(2))
    assert "1 steps done, 0 left" in first and "0 steps done, 0 left" in second
    assert parts["engines"]["packed rows"]["verdict"] == "as planned"


@pytest.mark.long
@pytest.mark.products
def test_a_rehearsal_of_every_part_that_needs_no_card(tmp_path: Path):
    wanted = (
        "predicted: .*full .*none eager 8x2048", "fp8: blocks of torchao_tensorwise",
        "8B, LoRA: (.*same settings|plain Accelerate)",
    )  # fmt: skip
    _, parts = rehearse(tmp_path, *wanted)
    assert [row["outcome"] for row in parts["predicted"].values()] == ["ran"]
    assert [row["outcome"] for row in parts["fp8"].values()] == ["refused"]
    ours, theirs = (row["losses"]["1"] for row in parts["peers"].values())
    assert ours == pytest.approx(theirs, abs=2e-2)
    assert next(tmp_path.glob("calibration-*.jsonl")).read_text().count("\n") == 1


@pytest.mark.long
@pytest.mark.products
@pytest.mark.skipif("SHARDWISE_PEERS" not in os.environ, reason="SHARDWISE_PEERS: the folder given to gpu.py --peers")
def test_unsloth_and_axolotl_train_on_the_rows_and_to_the_losses_of_trl(tmp_path: Path):
    """The environments of `benchmarks/offline_wheels.py`. Liger's kernels and Axolotl's own need a card."""
    _, parts = rehearse(tmp_path, "8B, .*(Unsloth|Axolotl$|TRL SFTTrainer$)", peers=Path(os.environ["SHARDWISE_PEERS"]))
    for contest in peers.CONTESTS:
        rows = {name.partition(": ")[2]: row for name, row in parts["peers"].items() if row["contest"] == contest.name}
        assert {row["outcome"] for row in rows.values()} == {"ran"}, rows
        losses = {name: row["losses"]["1"] for name, row in rows.items()}
        assert losses == pytest.approx(dict.fromkeys(losses, losses["TRL SFTTrainer"]), abs=2e-2)


@pytest.mark.long
@pytest.mark.products
@needs_no_cuda
def test_on_a_card_runs_are_side_by_side_and_caps_are_kept(tmp_path: Path):
    """Tiny models on a stand-in for an H100."""
    card = machine_environment(Machine(cards=(H100,)), tmp_path / "machine")
    wanted = ("engines: (dpo|qlora)$", f"caps: .*{predicted.CAPPED[2].name}, as predicted", "8 GiB: 1B")
    output, parts = rehearse(tmp_path / "out", *wanted, environment=card)
    assert "4 steps done, 0 left" in output
    assert {name: row["verdict"] for name, row in parts["engines"].items()} == dict.fromkeys(
        ("dpo", "qlora"), "as planned"
    )
    assert all(row["result"].get("is_shared") for row in parts["engines"].values())
    assert [row["verdict"] for row in parts["caps"].values()] == ["ran, as predicted"]
    assert [row["verdict"] for row in parts["small cards"].values()] == ["ran within the cap"]
