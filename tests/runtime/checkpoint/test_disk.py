"""A disk that is full, read-only, or of another process: one sentence, and older checkpoints as they were."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from small_disk import file_size_limit, mounted_disk
from torch import nn

from shardwise.trainer.runtime.checkpoint import NonFiniteStateError, shards
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.report import Evaluation

NOBODY = 65534


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
def small_disk(tmp_path):
    with mounted_disk(tmp_path, "2m") as folder:
        yield folder


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
        self.held[name] = {each.name for each in path.iterdir()} if path.is_dir() else path.read_bytes()

    def rename(self, source: str | Path, target: str | Path) -> None:
        self._rename(source, target)
        self.order.append(f"rename {self._name(Path(source))} {self._name(Path(target))}")

    def _name(self, path: Path) -> str:
        """Below the root, without the random end of a temporary name."""
        parts = path.relative_to(self._root).parts
        return "/".join(part.rpartition("-")[0] if part.startswith(".tmp-") else part for part in parts) or "."


def test_the_disk_has_everything_before_the_rename_and_the_rename_before_the_old_goes(
    tiny, trained, tmp_path, monkeypatch
):
    """What a loss of power leaves behind is what was synced: contents, then their names, then the folder's name."""
    tiny.save(tmp_path, *trained, 1, keep=1)
    monkeypatch.setattr(shards, "_LEAST_FILE_BYTES", 4096)
    monkeypatch.setattr(shards, "own_cores", lambda: 2)
    calls = DiskCalls(tmp_path, monkeypatch)
    saved = tiny.save(tmp_path, *trained, 2, keep=1)

    staged, files = ".tmp-step-00000002", tiny.names(saved)
    assert len(files) == 5, "four shards, written side by side, and the manifest"
    *shard_syncs, manifest_sync, folder_sync, commit, root_sync, prune = calls.order
    assert sorted(shard_syncs) == [f"sync {staged}/{name}" for name in files if name != "MANIFEST.json"]
    assert [manifest_sync, folder_sync, commit, root_sync, prune] == [
        f"sync {staged}/MANIFEST.json", f"sync {staged}", f"rename {staged} step-00000002", "sync .",
        "rename step-00000001 .tmp-trash-step-00000001",
    ]  # fmt: skip
    assert {name: (saved / name).read_bytes() for name in files} == {
        name: calls.held[f"{staged}/{name}"] for name in files
    }, "nothing is written after its sync"
    assert calls.held[staged] == set(files)
    assert {"step-00000001", "step-00000002"} <= set(calls.held["."])


@pytest.mark.parametrize("share", [0.01, 0.999])  # in the shard's header, near its end
def test_write_that_fails_leaves_the_older_one(tiny, trained, tmp_path, share):
    shard_bytes = (tiny.save(tmp_path, *trained, 1) / "shard-00000.safetensors").stat().st_size
    with (
        file_size_limit(int(shard_bytes * share)),
        pytest.raises(EnvironmentFaultError, match="step 2 was not saved: File too large"),
    ):
        tiny.save(tmp_path, *trained, 2)
    assert tiny.names(tmp_path) == [".lock", "step-00000001"]
    tiny.save(tmp_path, *trained, 2)
    assert tiny.names(tmp_path) == [".lock", "step-00000001", "step-00000002"]


def test_too_little_room_is_found_before_anything_is_written(tiny, small_disk):
    model = nn.Linear(1024, 1024)  # 4 MiB
    reached: list[str] = []
    with pytest.raises(EnvironmentFaultError, match=r"needs 4\.4 MiB and 2 MiB are free"):
        tiny.save(small_disk, model, torch.optim.SGD(model.parameters()), 1, on_point=reached.append)
    assert (tiny.names(small_disk), reached) == ([".lock"], [])


def test_the_oldest_makes_room_where_that_suffices_and_another_stays(tiny, newest, small_disk):
    model = nn.Linear(400, 400)  # 640 kB: the disk has room for two
    optimizer = torch.optim.SGD(model.parameters())
    for step in (1, 2):
        tiny.save(small_disk, model, optimizer, step)
    (small_disk / "others").write_bytes(bytes(shutil.disk_usage(small_disk).free - 100_000))
    large = nn.Linear(700, 700)
    for keep in (1, 2):
        with pytest.raises(EnvironmentFaultError, match="a checkpoint needs"):
            tiny.save(small_disk, large, torch.optim.SGD(large.parameters()), 3, keep=keep)
        assert tiny.names(small_disk) == [".lock", "others", "step-00000001", "step-00000002"], "it would not suffice"
    tiny.save(small_disk, model, optimizer, 3, keep=2)
    assert tiny.names(small_disk) == [".lock", "others", "step-00000002", "step-00000003"]
    shutil.rmtree(small_disk / "step-00000002")
    (small_disk / "others").write_bytes(bytes((small_disk / "others").stat().st_size + 640_000))
    with pytest.raises(EnvironmentFaultError, match="a checkpoint needs"):
        tiny.save(small_disk, model, optimizer, 4, keep=1)
    assert newest(small_disk).step == 3, "the only one stays"


@pytest.mark.parametrize("is_new", [True, False])
def test_folder_that_may_not_be_written_is_named(tiny, trained, is_new):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "checkpoints")
        if not is_new:
            tiny.save(root, *trained, 1)
            root.chmod(0o555)
        root.parent.chmod(0o555)
        with not_root(), pytest.raises(EnvironmentFaultError, match=rf"not saved: {root}.*: Permission denied"):
            tiny.save(root, *trained, 2)
        root.parent.chmod(0o755)
        if not is_new:
            root.chmod(0o755)
            assert tiny.names(root) == [".lock", "step-00000001"]


def test_second_writer_is_refused_and_the_first_continues(tiny, trained, tmp_path):
    def save_as_well(point):
        if point == "mid-file":
            with pytest.raises(EnvironmentFaultError, match=f"{tmp_path}: another process is saving here"):
                tiny.save(tmp_path, *trained, 5)

    tiny.save(tmp_path, *trained, 4, on_point=save_as_well)
    assert tiny.names(tmp_path) == [".lock", "step-00000004"]
    tiny.save(tmp_path, *trained, 5)


@pytest.mark.parametrize("state", [None, "exp_avg_sq"])
def test_state_that_is_not_finite_is_not_saved(tiny, trained, tmp_path, state):
    tiny.save(tmp_path, *trained, 1)
    model, optimizer = trained
    spoilt = model.lm_head.weight.data if state is None else optimizer.state[model.lm_head.weight][state]
    spoilt[3, 3] = float("nan" if state is None else "inf")
    title = r"lm_head\.weight" if state is None else rf"lm_head\.weight \({state}\)"
    with pytest.raises(NonFiniteStateError, match=f"^{title} holds NaN or infinity"):
        tiny.save(tmp_path, *trained, 2)
    facts = tiny.build_facts(2, evaluations=(Evaluation(step=2, loss=float("nan"), perplexity=1.0, num_tokens=5),))
    with pytest.raises(NonFiniteStateError, match="the evaluation loss of step 2 is nan"):
        tiny.save(tmp_path, *trained, 2, facts=facts)
    assert tiny.names(tmp_path) == [".lock", "step-00000001"]


@pytest.mark.parametrize(
    ("keep", "keep_every", "protect", "expected"),
    [
        (2, None, (), [5, 6]), (3, None, (1,), [1, 4, 5, 6]), (9, None, (), [1, 2, 3, 4, 5, 6]),
        (2, 4, (1,), [1, 4, 5, 6]),
    ],
)  # fmt: skip
def test_the_newest_and_the_protected_are_kept(tiny, trained, tmp_path, keep, keep_every, protect, expected):
    for step in range(1, 7):
        tiny.save(tmp_path, *trained, step, keep=keep, keep_every=keep_every, protect=protect)
    assert tiny.names(tmp_path) == [".lock", *(f"step-{step:08d}" for step in expected)]
    with pytest.raises(ValueError, match="keep must be at least 1, not 0"):
        tiny.save(tmp_path, *trained, 7, keep=0)


def test_incomplete_folders_neither_count_nor_go(tiny, trained, tmp_path):
    for step in (1, 2):
        tiny.save(tmp_path, *trained, step)
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000002" / "shard-00000.safetensors").write_bytes(b"short")
    tiny.save(tmp_path, *trained, 4, keep=2)
    assert tiny.names(tmp_path) == [".lock", *(f"step-{step:08d}" for step in (1, 2, 3, 4))]


def test_damaged_later_step_never_pushes_out_the_newest_whole_one(tiny, trained, newest, tmp_path):
    for step in (2, 6):
        tiny.save(tmp_path, *trained, step)
    shard = tmp_path / "step-00000006" / "shard-00000.safetensors"
    shard.write_bytes(bytes(shard.stat().st_size))  # its size is right
    tiny.save(tmp_path, *trained, 4, keep=1)
    assert tiny.names(tmp_path) == [".lock", "step-00000004", "step-00000006"]
    tiny.save(tmp_path, *trained, 6, keep=1)
    assert newest(tmp_path).step == 6
    assert tiny.names(tmp_path) == [".lock", "step-00000006"]


def test_whole_checkpoint_of_the_same_step_is_kept_unless_it_is_of_another_run(tiny, trained, tmp_path):
    path = tiny.save(tmp_path, *trained, 1)
    before = path.stat().st_ino
    reached: list[str] = []
    assert tiny.save(tmp_path, *trained, 1, on_point=reached.append) == path
    with pytest.raises(InputError, match="belongs to run tiny; give other a folder of its own"):
        tiny.save(tmp_path, *trained, 1, facts=tiny.build_facts(1, run_name="other"))
    assert (path.stat().st_ino, reached, tiny.names(tmp_path)) == (before, [], [".lock", "step-00000001"])
