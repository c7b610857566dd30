"""A miniature of every causal type of transformers: planned, trained as plain PyTorch trains it, exported, reloaded."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from attempt_runs import losses_of, run_attempt
from outcome_file import FINDING
from rank_factory import write_attempt, write_packed_rows, write_rows
from zoo import USED, config_of, types
from zoo_outcome import NOT_TRAINED, newest_outcome, read_zoo
from zoo_runs import loaded, logits_of, plain_losses, plain_model, saved_model, shape_by_plan, write_miniature, zoo_plan

from shardwise.trainer.runtime.export.run import export_run
from shardwise.trainer.simulation.describe import describe
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.messages.worker_requests import ExportRequest
from shardwise.trainer.spec.model.shape import DescriptionRequest, ModelShape
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method

pytestmark = [  # of PEFT: it asks, and it makes the pattern that it then does not match
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]
FIRST, LATER = 1e-5, 1e-4  # relative differences of the loss before the first update and after it
SAME, MERGED = 1e-4, 1e-3  # of the standard deviation of the logits: what was saved, and its export, also a merged one
ALIKE = 0.1  # likewise, from the plain loop: an update makes whole steps of gradients that are rounding
THINNED = ("gpt_oss", "lfm2")  # experts, windows in some blocks and sinks; layers with a state
LEAST_TRAINED = 0.95
LORA = LoraJob(rank=4, alpha=8.0)
ON_RANKS = {"FSDP2": Sharding.FSDP, "ZeRO-3": Sharding.ZERO3}
ADAPTERS = {"LoRA": Method.LORA, "QLoRA": Method.QLORA}
NUM_RANKS = 2


def cases(names: tuple[str, ...], thinned: tuple[str, ...] = THINNED) -> list[Any]:
    marks = {True: [pytest.mark.zoo], False: [pytest.mark.zoo, pytest.mark.long]}
    return [pytest.param(each, marks=marks[each in thinned]) for each in names]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    folder = tmp_path_factory.mktemp("rows")
    return {False: write_rows(folder / "padded", shortest=16), True: write_packed_rows(folder / "packed")}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def check(plan: Plan, run_dir: Path) -> None:
    """The run went as the plain loop, and transformers loads its export with the logits of what it trained."""
    model = plain_model(plan, run_dir / "export")
    found, expected = losses_of(run_dir), plain_losses(plan, model)
    assert len(found) == len(expected) == plan.schedule.num_steps
    assert found[0] == pytest.approx(expected[0], rel=FIRST)
    assert found == pytest.approx(expected, rel=LATER)
    export, tolerance = run_dir / "export", SAME
    if plan.chosen.method.freezes_base:
        export, tolerance = run_dir.with_name("merged"), MERGED
        export_run(ExportRequest(run_dir=str(run_dir), out=str(export), merge=True))
    logits, saved, plain = (logits_of(each) for each in (loaded(export, plan), saved_model(plan, run_dir), model))
    torch.testing.assert_close(logits, saved, rtol=0, atol=tolerance * float(saved.std()))
    assert (logits - plain).std() < ALIKE * plain.std()


@pytest.fixture
def base(name: str, tmp_path: Path) -> Path:
    return write_miniature(name, tmp_path / "base")


@pytest.fixture
def shape(name: str) -> ModelShape:
    return describe(DescriptionRequest(model_config=config_of(name).to_dict(), origin=name))


@pytest.mark.parametrize("name", cases(USED, thinned=()))
def test_a_type_in_use_trains_alike_on_ranks(name, base, shape, rows, tmp_path, start_ranks, record_property):
    plans = {
        way: zoo_plan(base, shape, rows[False], sharding, num_ranks=NUM_RANKS) for way, sharding in ON_RANKS.items()
    }
    paths = [str(write_attempt(tmp_path / way, plan)) for way, plan in plans.items()]
    start_ranks([str(Path(__file__).with_name("engine_worker.py")), *paths], NUM_RANKS)
    for way, plan in plans.items():
        check(plan, tmp_path / way)
        record_property(FINDING, (way, name))


@pytest.mark.parametrize("name", cases(USED))
def test_a_type_in_use_trains_adapters_like_peft(name, base, shape, rows, tmp_path, record_property):
    """The merged export has the logits of the adapters on their base."""
    for way, method in ADAPTERS.items():
        plan = zoo_plan(base, shape, rows[False], method=method, train={"lora": LORA})
        run_attempt(tmp_path / way / "run", plan)
        check(plan, tmp_path / way / "run")
        record_property(FINDING, (way, name))


@pytest.mark.parametrize("name", cases(USED))
def test_a_type_in_use_learns_packed_rows_like_their_documents(name, base, shape, rows, tmp_path, record_property):
    if shape.packing_obstacle is None:
        plan = zoo_plan(base, shape, rows[True])
        run_attempt(tmp_path / "run", plan)
        check(plan, tmp_path / "run")
        record_property(FINDING, ("packed rows", name))


@pytest.mark.parametrize("name", cases(types()))
def test_a_type_is_planned_trained_like_plain_pytorch_and_exported(name, rows, tmp_path, record_property):
    base = write_miniature(name, tmp_path / "base")
    try:
        shape = shape_by_plan(base, tmp_path)
    except InputError as error:
        reason = re.sub(r"^\S+ cannot be trained: ", "", str(error).removeprefix(f"{base / 'config.json'}: "))
        record_property(FINDING, (f"{NOT_TRAINED}{reason}", name))
        return
    plan = zoo_plan(base, shape, rows[False])
    run_attempt(tmp_path / "run", plan)
    check(plan, tmp_path / "run")
    obstacle = shape.packing_obstacle
    record_property(FINDING, ("packed" if obstacle is None else f"not packed: {obstacle}", name))


def test_the_committed_outcome_is_of_every_type_and_most_types_train():
    found = read_zoo(newest_outcome())
    assert tuple(found) == types()
    assert sum(each.trains for each in found.values()) >= LEAST_TRAINED * len(found)
    assert [name for name in USED if not found[name].trains] == []
