"""Checkpoints written while training goes on: of the step they began at, committed whole or not at all."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shardwise.trainer.runtime.checkpoint import NonFiniteStateError, find_checkpoint
from shardwise.trainer.spec.errors import EnvironmentFaultError

NEWEST_AFTER_DEATH_AT = {  # killed in the save of step 4; step 2 was committed before
    "staged": 2,
    "copied": 2,
    "mid-file": 2,
    "shard-written": 2,
    "manifest-written": 2,
    "committed": 4,
    "synced": 4,
    "pruned": 4,
}
NUM_RANDOM = 10
LAST = 8
_PROGRAM = Path(__file__).with_name("background_run.py")


@pytest.fixture(scope="module")
def background(tiny: ModuleType) -> ModuleType:
    """background_run.py as a module, over the tiny run of the other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tiny_run", tiny)
        patch.syspath_prepend(str(_PROGRAM.parent))
        return importlib.import_module("background_run")


def run_program(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_PROGRAM), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder per point, as a process that was killed there left it."""
    root = tmp_path_factory.mktemp("crashed")
    points = [*NEWEST_AFTER_DEATH_AT, *(f"random-{number}" for number in range(NUM_RANDOM))]
    done = run_program("crash", root, *points)
    assert done.returncode == 0, done.stderr
    return {point: root / point for point in points}


def uninterrupted(tiny: ModuleType, last: int) -> str:
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model)
    tiny.train(model, optimizer, start=0, stop=last)
    return str(tiny.digest(model, optimizer))


def test_what_is_saved_is_of_the_step_at_which_the_save_began(
    tiny: ModuleType, background: ModuleType, tmp_path: Path
) -> None:
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model)
    tiny.train(model, optimizer, start=0, stop=2)
    then = tiny.digest(model, optimizer)
    saving = background.begin(tmp_path, model, optimizer, 2)
    tiny.train(model, optimizer, start=2, stop=5)
    assert tiny.digest(model, optimizer) != then
    saving.finish()
    checkpoint = find_checkpoint(tmp_path, on_skip=pytest.fail)
    assert checkpoint is not None and checkpoint.step == 2
    assert tiny.digest(*tiny.resume(checkpoint)) == then


def test_a_checkpoint_is_not_there_before_it_is_polled(
    tiny: ModuleType, background: ModuleType, tmp_path: Path
) -> None:
    model = tiny.build_model()
    saving = background.begin(tmp_path, model, tiny.build_optimizer(model), 1)
    assert find_checkpoint(tmp_path, on_skip=pytest.fail) is None
    while not saving.poll():
        assert find_checkpoint(tmp_path, on_skip=pytest.fail) is None
    assert find_checkpoint(tmp_path, on_skip=pytest.fail) is not None
    assert saving.poll() and saving.is_over


def test_a_step_that_is_there_is_not_written_again(tiny: ModuleType, background: ModuleType, tmp_path: Path) -> None:
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model)
    folder = tiny.save(tmp_path, model, optimizer, 3)
    before = (folder / "MANIFEST.json").stat().st_mtime_ns
    saving = background.begin(tmp_path, model, optimizer, 3)
    assert saving.poll()
    assert (folder / "MANIFEST.json").stat().st_mtime_ns == before


def test_what_goes_wrong_in_the_thread_is_raised_later_and_leaves_nothing(
    tiny: ModuleType, background: ModuleType, tmp_path: Path
) -> None:
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model)
    tiny.save(tmp_path, model, optimizer, 1)

    def fail(point: str) -> None:
        if point == "mid-file":
            raise OSError(28, "No space left on device", "shard-00000.safetensors")

    saving = background.begin(tmp_path, model, optimizer, 2, on_point=fail)
    with pytest.raises(EnvironmentFaultError, match=r"step 2 was not saved: .*No space left"):
        saving.finish()
    assert saving.poll()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000001"]
    next(iter(model.parameters())).data.view(-1)[0] = float("nan")
    with pytest.raises(NonFiniteStateError):
        background.begin(tmp_path, model, optimizer, 3).finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000001"]


@pytest.mark.parametrize("point", NEWEST_AFTER_DEATH_AT)
def test_newest_committed_survives_a_kill_there(
    tiny: ModuleType, background: ModuleType, crashed: dict[str, Path], point: str
) -> None:
    root, step = crashed[point], NEWEST_AFTER_DEATH_AT[point]
    checkpoint = find_checkpoint(root, on_skip=pytest.fail)
    assert checkpoint is not None
    assert checkpoint.step == step
    assert tiny.digest(*tiny.resume(checkpoint)) == uninterrupted(tiny, step)
    assert background.run_until(root, LAST) == uninterrupted(tiny, LAST)
    kept = [".lock", f"step-{LAST - 2:08d}", f"step-{LAST:08d}"]
    assert sorted(path.name for path in root.iterdir()) == kept


@pytest.mark.parametrize("number", range(NUM_RANDOM))
def test_a_kill_at_any_moment_costs_only_uncommitted_steps(
    tiny: ModuleType, background: ModuleType, crashed: dict[str, Path], number: int
) -> None:
    root = crashed[f"random-{number}"]
    checkpoint = find_checkpoint(root, on_skip=pytest.fail)
    last = 4 + (0 if checkpoint is None else checkpoint.step)
    assert background.run_until(root, last) == uninterrupted(tiny, last)


def test_two_ranks_commit_when_both_have_written_and_fail_together(tiny: ModuleType, tmp_path: Path) -> None:
    done = run_program("ranks", tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"answers-{rank}.json").read_text()) for rank in (0, 1))
    assert len(first["polls"]) > 1, "the second rank slept in its file"
    assert first == second | {"failed": first["failed"]}
    assert first["over"] == [True, True]
    assert "rank 1: the checkpoint of step 50 was not saved: shard: No space left on device" in first["failed"]
    assert first["left"] == [".lock", "step-00000001"]
    torch.manual_seed(0)
    (tmp_path / "ddp" / "step-00000051").rename(tmp_path / "step-00000051")
    checkpoint = find_checkpoint(tmp_path / "ddp", on_skip=pytest.fail)
    assert checkpoint is not None
    assert tiny.digest(*tiny.resume(checkpoint)) == first["digest of 1"]
