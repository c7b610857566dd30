"""kill -9 at every point of a save: the newest committed checkpoint is whole, and the run ends as if never killed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from shardwise.trainer.runtime.checkpoint import find_checkpoint

NEWEST_AFTER_DEATH_AT = {  # killed in the save of step 4; step 2 was committed before
    "staged": 2,
    "mid-file": 2,
    "shard-written": 2,
    "manifest-written": 2,
    "damaged-moved": 2,  # step 4 was there, damaged
    "committed": 4,
    "synced": 4,
    "pruning": 4,
    "pruned": 4,
}
NUM_RANDOM = 15
LAST = 8


@pytest.fixture(scope="module")
def crashed(
    tiny: ModuleType,
    run_tiny: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """A folder per point, as a process that was killed there left it."""
    root = tmp_path_factory.mktemp("crashed")
    points = [*NEWEST_AFTER_DEATH_AT, *(f"random-{number}" for number in range(NUM_RANDOM))]
    done = run_tiny("crash", root, *points)
    assert done.returncode == 0, done.stderr
    return {point: root / point for point in points}


@pytest.fixture(scope="module")
def digests(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The state of the uninterrupted run by step."""
    root = tmp_path_factory.mktemp("uninterrupted")
    return {step: tiny.run_until(root, step) for step in range(2, LAST + 1, 2)}


def test_the_table_has_every_point(tiny: ModuleType, tmp_path: Path) -> None:
    reached: list[str] = []
    tiny.run_until(tmp_path, 4, on_point_at=(4, reached.append))
    model = tiny.build_model()
    (tmp_path / "step-00000004" / "MANIFEST.json").unlink()
    tiny.save(tmp_path, model, tiny.build_optimizer(model), 4, on_point=reached.append)
    assert set(reached) == set(NEWEST_AFTER_DEATH_AT)


@pytest.mark.parametrize("point", NEWEST_AFTER_DEATH_AT)
def test_newest_committed_survives_a_kill_there(
    tiny: ModuleType, crashed: dict[str, Path], digests: dict[int, str], point: str
) -> None:
    root, step = crashed[point], NEWEST_AFTER_DEATH_AT[point]
    checkpoint = find_checkpoint(root, on_skip=pytest.fail)
    assert checkpoint is not None
    assert checkpoint.step == step
    assert tiny.digest(*tiny.resume(checkpoint)) == digests[step]
    leftovers = [path.name for path in root.iterdir() if path.name.startswith(".tmp-")]
    assert bool(leftovers) == (point not in ("committed", "synced", "pruned"))

    assert tiny.run_until(root, LAST) == digests[LAST]
    assert sorted(path.name for path in root.iterdir()) == [".lock", f"step-{LAST:08d}"]


@pytest.mark.parametrize("number", range(NUM_RANDOM))
def test_a_kill_at_any_moment_costs_only_uncommitted_steps(
    tiny: ModuleType, crashed: dict[str, Path], number: int
) -> None:
    root = crashed[f"random-{number}"]
    checkpoint = find_checkpoint(root, on_skip=pytest.fail)
    start = 0 if checkpoint is None else checkpoint.step
    killed_and_resumed = tiny.run_until(root, start + 4)
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model)
    tiny.train(model, optimizer, start=0, stop=start + 4)
    assert killed_and_resumed == tiny.digest(model, optimizer)


@pytest.mark.long
def test_two_hundred_kills_cost_only_uncommitted_steps(
    tiny: ModuleType, run_tiny: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    points = [f"random-{number}" for number in range(1000, 1200)]
    done = run_tiny("crash", tmp_path, *points)
    assert done.returncode == 0, done.stderr
    for point in points:
        checkpoint = find_checkpoint(tmp_path / point, on_skip=pytest.fail)
        start = 0 if checkpoint is None else checkpoint.step
        model = tiny.build_model()
        optimizer = tiny.build_optimizer(model)
        tiny.train(model, optimizer, start=0, stop=start + 2)
        assert tiny.run_until(tmp_path / point, start + 2) == tiny.digest(model, optimizer)


def test_the_random_moments_fall_into_the_run(crashed: dict[str, Path]) -> None:
    with_checkpoint = [
        point for point, root in crashed.items() if point.startswith("random-") and list(root.glob("step-*"))
    ]
    assert len(with_checkpoint) >= NUM_RANDOM // 3
    num_points = len(NEWEST_AFTER_DEATH_AT)
    sys.stdout.write(f"{len(crashed)} kills: {num_points} at points of a save, {NUM_RANDOM} at random moments\n")


def test_an_error_in_a_save_leaves_nothing_behind(tiny: ModuleType, tmp_path: Path) -> None:
    def fail(point: str) -> None:
        if point == "manifest-written":
            raise KeyboardInterrupt

    tiny.run_until(tmp_path, 2)
    with pytest.raises(KeyboardInterrupt):
        tiny.run_until(tmp_path, 4, on_point_at=(4, fail))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000002"]
    assert tiny.run_until(tmp_path, 4)
