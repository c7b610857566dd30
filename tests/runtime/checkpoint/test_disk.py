"""A disk that is full, read-only, or somebody else's: an answer in one sentence, and older checkpoints as they were."""

import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from small_disk import mounted_disk
from torch import nn

from shardwise.trainer.runtime.checkpoint import NonFiniteStateError, find_checkpoint, shards
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.report import Evaluation

NOBODY = 65534


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """The kernel refuses longer files; Python ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def not_root() -> Iterator[None]:
    """Permission bits mean nothing to root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with mounted_disk(tmp_path, "2m") as folder:
        yield folder


@pytest.fixture
def trained(tiny: ModuleType) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model)
    tiny.train(model, optimizer, start=0, stop=1)
    return model, optimizer


class DiskCalls:
    """Calls through to the kernel, and keeps the order of what reaches the disk: `sync NAME` and `rename NAME NAME`.

    `held` is what an entry held when it was synced: the bytes of a file, the names in a folder.
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._root, self._fsync, self._rename = root, os.fsync, os.rename
        self.order: list[str] = []
        self.held: dict[str, bytes | set[str]] = {}
        patch.setattr(os, "fsync", self.fsync)
        patch.setattr(os, "rename", self.rename)

    def fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        name = self._name(path)
        self.order.append(f"sync {name}")
        self.held[name] = set(names(path)) if path.is_dir() else path.read_bytes()

    def rename(self, source: str | Path, target: str | Path) -> None:
        self._rename(source, target)
        self.order.append(f"rename {self._name(Path(source))} {self._name(Path(target))}")

    def _name(self, path: Path) -> str:
        """Below the root, without the random end of a temporary name."""
        parts = path.relative_to(self._root).parts
        return "/".join(part.rpartition("-")[0] if part.startswith(".tmp-") else part for part in parts) or "."


def test_the_disk_has_everything_before_the_rename_and_the_rename_before_the_old_goes(
    tiny: ModuleType, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a loss of power leaves behind is what was synced: contents, then their names, then the folder's name."""
    tiny.save(tmp_path, *trained, 1, keep=1)
    monkeypatch.setattr(shards, "_LEAST_FILE_BYTES", 4096)
    monkeypatch.setattr(shards, "own_cores", lambda: 2)
    calls = DiskCalls(tmp_path, monkeypatch)
    saved = tiny.save(tmp_path, *trained, 2, keep=1)

    staged, files = ".tmp-step-00000002", names(saved)
    assert len(files) == 5, "four shards, written side by side, and the manifest"
    *shard_syncs, manifest_sync, folder_sync, commit, root_sync, prune = calls.order
    assert sorted(shard_syncs) == [f"sync {staged}/{name}" for name in files if name != "MANIFEST.json"]
    assert [manifest_sync, folder_sync, commit, root_sync, prune] == [
        f"sync {staged}/MANIFEST.json",
        f"sync {staged}",
        f"rename {staged} step-00000002",
        "sync .",
        "rename step-00000001 .tmp-trash-step-00000001",
    ]
    assert {name: (saved / name).read_bytes() for name in files} == {
        name: calls.held[f"{staged}/{name}"] for name in files
    }, "nothing is written after its sync"
    assert calls.held[staged] == set(files)
    assert {"step-00000001", "step-00000002"} <= set(calls.held["."])


@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])  # in the shard's header, among its tensors, near its end
def test_write_that_fails_leaves_the_older_one(
    tiny: ModuleType, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path, share: float
) -> None:
    shard_bytes = (tiny.save(tmp_path, *trained, 1) / "shard-00000.safetensors").stat().st_size
    with (
        file_size_limit(int(shard_bytes * share)),
        pytest.raises(EnvironmentFaultError, match=r"the checkpoint of step 2 was not saved: File too large"),
    ):
        tiny.save(tmp_path, *trained, 2)
    assert names(tmp_path) == [".lock", "step-00000001"]
    tiny.save(tmp_path, *trained, 2)
    assert names(tmp_path) == [".lock", "step-00000001", "step-00000002"]


def test_manifest_that_cannot_be_written_leaves_the_older_one(tiny: ModuleType, tmp_path: Path) -> None:
    model = nn.ParameterDict({f"layer_{number}": nn.Parameter(torch.zeros(1)) for number in range(400)})
    optimizer = torch.optim.SGD(model.parameters())
    shard_bytes = (tiny.save(tmp_path, model, optimizer, 1) / "shard-00000.safetensors").stat().st_size
    with (
        file_size_limit(shard_bytes),
        pytest.raises(EnvironmentFaultError, match="step 2 was not saved: File too large"),
    ):
        tiny.save(tmp_path, model, optimizer, 2)
    assert names(tmp_path) == [".lock", "step-00000001"]


def test_too_little_room_is_said_before_anything_is_written(tiny: ModuleType, small_disk: Path) -> None:
    model = nn.Linear(1024, 1024)  # 4 MiB
    reached: list[str] = []
    with pytest.raises(EnvironmentFaultError, match=r"needs 4\.4 MiB and 2 MiB are free; make room or lower"):
        tiny.save(small_disk, model, torch.optim.SGD(model.parameters()), 1, on_point=reached.append)
    assert (names(small_disk), reached) == ([".lock"], [])


def test_disk_that_fills_up_meanwhile_keeps_the_older_one(tiny: ModuleType, small_disk: Path) -> None:
    model = nn.Linear(400, 400)  # 640 kB
    optimizer = torch.optim.SGD(model.parameters())

    def fill(point: str) -> None:
        if point == "staged":
            (small_disk / "others").write_bytes(bytes(shutil.disk_usage(small_disk).free - 100_000))

    tiny.save(small_disk, model, optimizer, 1)
    with pytest.raises(EnvironmentFaultError, match="step 2 was not saved: No space left on device"):
        tiny.save(small_disk, model, optimizer, 2, on_point=fill)
    assert names(small_disk) == [".lock", "others", "step-00000001"]
    assert find_checkpoint(small_disk, on_skip=pytest.fail) is not None


@pytest.mark.parametrize("is_new", [True, False])
def test_folder_that_may_not_be_written_is_named(
    tiny: ModuleType, trained: tuple[nn.Module, torch.optim.Optimizer], is_new: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder)
        root = parent / "checkpoints"
        if not is_new:
            tiny.save(root, *trained, 1)
            root.chmod(0o555)
        parent.chmod(0o555)
        with not_root(), pytest.raises(EnvironmentFaultError, match=rf"not saved: {root}.*: Permission denied"):
            tiny.save(root, *trained, 2)
        parent.chmod(0o755)
        if not is_new:
            root.chmod(0o755)
            assert names(root) == [".lock", "step-00000001"]


def test_second_writer_is_refused_and_the_first_goes_on(
    tiny: ModuleType, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    refused: list[str] = []

    def save_as_well(point: str) -> None:
        if point == "mid-file":
            with pytest.raises(EnvironmentFaultError) as error:
                tiny.save(tmp_path, *trained, 5)
            refused.append(str(error.value))

    tiny.save(tmp_path, *trained, 4, on_point=save_as_well)
    assert refused == [f"{tmp_path}: another process is saving here; give each run its folder"]
    assert names(tmp_path) == [".lock", "step-00000004"]
    tiny.save(tmp_path, *trained, 5)


def _nan_weight(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.get_parameter("lm_head.weight").data[3, 3] = float("nan")


def _infinite_weight(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.get_parameter("lm_head.weight").data[3, 3] = float("-inf")


def _infinite_moment(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.get_parameter("lm_head.weight")]["exp_avg_sq"][0, 0] = float("inf")


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_nan_weight, r"lm_head\.weight holds NaN or infinity, so nothing was saved"),
        (_infinite_weight, r"lm_head\.weight holds NaN or infinity"),
        (_infinite_moment, r"lm_head\.weight \(exp_avg_sq\) holds NaN or infinity"),
    ],
)
def test_state_that_is_not_finite_is_not_saved(
    tiny: ModuleType,
    trained: tuple[nn.Module, torch.optim.Optimizer],
    tmp_path: Path,
    spoil: Callable[[nn.Module, torch.optim.Optimizer], None],
    sentence: str,
) -> None:
    tiny.save(tmp_path, *trained, 1)
    spoil(*trained)
    with pytest.raises(NonFiniteStateError, match=sentence):
        tiny.save(tmp_path, *trained, 2)
    assert names(tmp_path) == [".lock", "step-00000001"]


def test_an_evaluation_that_is_not_finite_is_not_saved(
    tiny: ModuleType, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    facts = tiny.build_facts(2, evaluations=(Evaluation(step=2, loss=float("nan"), perplexity=1.0, num_tokens=5),))
    with pytest.raises(NonFiniteStateError, match="the evaluation loss of step 2 is nan"):
        tiny.save(tmp_path, *trained, 2, facts=facts)


@pytest.mark.parametrize(
    ("keep", "keep_every", "protect", "expected"),
    [
        (1, None, (), [6]),
        (2, None, (), [5, 6]),
        (3, None, (1,), [1, 4, 5, 6]),
        (9, None, (), [1, 2, 3, 4, 5, 6]),
        (1, None, (6,), [6]),
        (1, 2, (), [2, 4, 6]),
        (2, 4, (1,), [1, 4, 5, 6]),
    ],
)
def test_the_newest_and_the_protected_are_kept(
    tiny: ModuleType,
    trained: tuple[nn.Module, torch.optim.Optimizer],
    tmp_path: Path,
    keep: int,
    keep_every: int | None,
    protect: tuple[int, ...],
    expected: list[int],
) -> None:
    for step in range(1, 7):
        tiny.save(tmp_path, *trained, step, keep=keep, keep_every=keep_every, protect=protect)
    assert names(tmp_path) == [".lock", *(f"step-{step:08d}" for step in expected)]


def test_incomplete_folders_neither_count_nor_go(
    tiny: ModuleType, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    for step in (1, 2):
        tiny.save(tmp_path, *trained, step)
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000002" / "shard-00000.safetensors").write_bytes(b"short")
    tiny.save(tmp_path, *trained, 4, keep=2)
    assert names(tmp_path) == [".lock", *(f"step-{step:08d}" for step in (1, 2, 3, 4))]


def test_damaged_later_step_never_pushes_out_the_newest_whole_one(
    tiny: ModuleType, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    for step in (2, 6):
        tiny.save(tmp_path, *trained, step)
    shard = tmp_path / "step-00000006" / "shard-00000.safetensors"
    shard.write_bytes(bytes(shard.stat().st_size))  # its size is right
    tiny.save(tmp_path, *trained, 4, keep=1)
    checkpoint = find_checkpoint(tmp_path, on_skip=lambda line: None)
    assert checkpoint is not None
    assert checkpoint.step == 4
    tiny.save(tmp_path, *trained, 6, keep=1)
    checkpoint = find_checkpoint(tmp_path, on_skip=pytest.fail)
    assert checkpoint is not None
    assert checkpoint.step == 6
    assert names(tmp_path) == [".lock", "step-00000006"]


def test_whole_checkpoint_of_the_same_step_is_kept_as_it_is(
    tiny: ModuleType, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    path = tiny.save(tmp_path, *trained, 1)
    before = path.stat().st_ino
    reached: list[str] = []
    assert tiny.save(tmp_path, *trained, 1, on_point=reached.append) == path
    assert (path.stat().st_ino, reached) == (before, [])


def test_another_runs_checkpoint_is_not_overwritten(
    tiny: ModuleType, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    tiny.save(tmp_path, *trained, 1)
    with pytest.raises(InputError, match="belongs to run tiny; give other a folder of its own"):
        tiny.save(tmp_path, *trained, 1, facts=tiny.build_facts(1, run_name="other"))
    assert names(tmp_path) == [".lock", "step-00000001"]


def test_keeping_none_is_a_mistake_of_the_caller(
    tiny: ModuleType, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1, not 0"):
        tiny.save(tmp_path, *trained, 1, keep=0)
