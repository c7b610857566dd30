"""`shardwise train` has FP8 timed before it takes a plan, where a job allows it: here by a torch that finds no GPU."""

from pathlib import Path

import pytest
from fake_torch import FakeTorch
from gpu_machines import RTX_4090, lay_out_gpus, machine_with
from planning_factory import fp8_gain_of
from workplace_factory import Workplace

from shardwise.launch.plan.fp8 import key_of, store_fp8_gain
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Precision

pytestmark = pytest.mark.cold  # another torch stands in the place of the installed one
LINE = "timing FP8 on the model's own matrix shapes"


@pytest.fixture
def place(workplace: Workplace, tmp_path: Path) -> Workplace:
    """Beside a card of compute capability 8.9, with Transformer Engine's metadata."""
    card = machine_with(RTX_4090)
    machine, torch = lay_out_gpus(tmp_path / "machine", card), FakeTorch(tmp_path / "torch")
    torch.write(card)  # which can use it, as far as the check before the start goes
    packages = tmp_path / "packages"
    (packages / "transformer_engine-2.10.0.dist-info").mkdir(parents=True)
    changes = {
        "PATH": f"{machine.programs}:{workplace.environment['PATH']}",
        "PYTHONPATH": f"{packages}:{torch.folder}",
    }
    workplace.write_job(allow=["fp8"])
    return workplace._replace(environment={**workplace.environment, **changes})


def refusal_of_fp8(plan: Plan) -> str | None:
    """Why AdamW in FP8 was rejected; None: it is a candidate."""
    return next((row.reason for row in plan.rejections if row.strategy == "none/fp8/adamw_fused"), None)


def test_train_times_it_and_goes_on_without_it_where_that_fails(place: Workplace) -> None:
    before = codec.decode(place.run("plan", "job.yaml", "--json").stdout.encode(), Plan, origin="plan")
    assert refusal_of_fp8(before) is None
    assert [note for note in before.notes if "`shardwise train`" in note and "fp8" in note.lower()]

    lines = [
        line
        for line in place.run("train", "job.yaml", "--dry-run", "--run-dir", "runs/dry").stdout.splitlines()
        if line.startswith(LINE)
    ]
    assert "CUDA" in lines[-1]
    taken = codec.read(place.only_run() / "plan.json", Plan)
    assert "CUDA" in (refusal_of_fp8(taken) or "")


def test_train_times_nothing_that_is_known(place: Workplace) -> None:
    before = codec.decode(place.run("plan", "job.yaml", "--json").stdout.encode(), Plan, origin="plan")
    gain = fp8_gain_of(1.31)
    assert store_fp8_gain(Path(place.environment["SHARDWISE_CACHE"]), key_of(before), gain) is None
    assert LINE not in place.run("train", "job.yaml", "--dry-run", "--run-dir", "runs/dry").stdout
    taken = codec.read(place.only_run() / "plan.json", Plan)
    assert taken.fp8_gain == gain
    assert any(candidate.strategy.precision is Precision.FP8 for candidate in taken.candidates)
