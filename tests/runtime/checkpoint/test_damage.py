"""Damage of every kind is found before a byte is believed; the next older checkpoint is taken, and it is said."""

import json
import os
import pickle
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.trainer.runtime.checkpoint import CheckpointFolder, check_compatible, find_checkpoint, import_weights
from shardwise.trainer.runtime.checkpoint.folders import verified
from shardwise.trainer.runtime.checkpoint.load import begin_resumption
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.strategy import Sharding

SHARD = "shard-00000.safetensors"


@pytest.fixture
def root(tiny: ModuleType, tmp_path: Path) -> Path:
    """Checkpoints of steps 2 and 4."""
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model)
    for step in (2, 4):
        tiny.train(model, optimizer, start=step - 2, stop=step)
        tiny.save(tmp_path / "checkpoints", model, optimizer, step)
    return tmp_path / "checkpoints"


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def sign(folder: Path) -> None:
    """Makes the manifest vouch for the shard as it is now, as somebody with bad intentions would."""
    content = (folder / SHARD).read_bytes()
    entry = {"size_bytes": len(content), "sha256": sha256(content).hexdigest()}
    edit_manifest(folder, lambda manifest: manifest["files"].update({SHARD: entry}))


def first_weight(manifest: dict[str, Any]) -> dict[str, Any]:
    return next(iter(manifest["parameters"].values()))["weight"]


def _flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / SHARD).read_bytes())
    content[-100] ^= 1
    (folder / SHARD).write_bytes(content)


def _truncate(folder: Path) -> None:
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 8)


def _remove_shard(folder: Path) -> None:
    (folder / SHARD).unlink()


def _remove_manifest(folder: Path) -> None:
    (folder / "MANIFEST.json").unlink()


def _empty_folder(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _garbage_manifest(folder: Path) -> None:
    (folder / "MANIFEST.json").write_bytes(b"\x80\x04\x95garbage")


def _half_a_manifest(folder: Path) -> None:
    os.truncate(folder / "MANIFEST.json", 500)


def _deep_manifest(folder: Path) -> None:
    (folder / "MANIFEST.json").write_text('{"groups":' + '{"a":' * 100_000)


def _giant_manifest(folder: Path) -> None:
    os.truncate(folder / "MANIFEST.json", 1 << 29)  # sparse


def _manifest_of_another_step(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest["facts"].update(step=400))


def _later_format(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest.update(format=2))


def _unknown_field(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest.update(hook="os.system"))


def _missing_chunk(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: first_weight(manifest).update(chunks=[]))


def _overlapping_chunk(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: first_weight(manifest)["chunks"].append(first_weight(manifest)["chunks"][0]))


def _chunk_of_another_size(folder: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        weight = first_weight(manifest)
        weight["shape"] = [1, 10]
        weight["chunks"][0]["num_elements"] = 10

    edit_manifest(folder, change)


def _chunk_of_another_type(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: first_weight(manifest).update(type="I32"))


def _chunk_without_key(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: first_weight(manifest)["chunks"][0].update(key="nowhere"))


def _negative_start(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: first_weight(manifest)["chunks"][0].update(start=-1))


def _tie_to_nowhere(folder: Path) -> None:
    edit_manifest(
        folder, lambda manifest: manifest["parameters"].update({"w": {"tied_to": "model.nowhere", "weight": None}})
    )


def _neither_weight_nor_tie(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest["parameters"].update({"w": {}}))


def _unlisted_file(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: first_weight(manifest)["chunks"][0].update(file="shard-00009.safetensors"))


def _name_that_climbs(folder: Path) -> None:
    shard = (folder / SHARD).read_bytes()
    (folder.parent / SHARD).write_bytes(shard)
    edit_manifest(folder, lambda manifest: manifest["files"].update({f"../{SHARD}": manifest["files"][SHARD]}))


def _chunk_that_climbs(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: first_weight(manifest)["chunks"][0].update(file=f"../{SHARD}"))


def _name_with_a_line_end(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest["files"].update({f"{SHARD}\n": manifest["files"][SHARD]}))


def _linked_shard(folder: Path) -> None:
    (folder / SHARD).rename(folder.parent / "elsewhere")
    (folder / SHARD).symlink_to(folder.parent / "elsewhere")


def _linked_manifest(folder: Path) -> None:
    (folder / "MANIFEST.json").rename(folder.parent / "elsewhere")
    (folder / "MANIFEST.json").symlink_to(folder.parent / "elsewhere")


def _linked_folder(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


def _file_instead_of_folder(folder: Path) -> None:
    _empty_folder(folder)
    folder.rmdir()
    folder.write_bytes(b"")


def _pipe_instead_of_shard(folder: Path) -> None:
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)


class _Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


def _pickle_bomb(folder: Path) -> None:
    (folder / SHARD).write_bytes(pickle.dumps(_Bomb(folder.parent.parent / "exploded")))
    sign(folder)


def _torch_bomb(folder: Path) -> None:
    torch.save(_Bomb(folder.parent.parent / "exploded"), folder / SHARD)
    sign(folder)


def _bomb_for_a_manifest(folder: Path) -> None:
    (folder / "MANIFEST.json").write_bytes(pickle.dumps(_Bomb(folder.parent.parent / "exploded")))


DAMAGE: tuple[Callable[[Path], None], ...] = (
    _flip_a_bit, _truncate, _remove_shard, _remove_manifest, _empty_folder, _garbage_manifest, _half_a_manifest,
    _deep_manifest, _giant_manifest, _manifest_of_another_step, _later_format, _unknown_field, _missing_chunk,
    _overlapping_chunk, _chunk_of_another_size, _chunk_of_another_type, _chunk_without_key, _negative_start,
    _tie_to_nowhere, _neither_weight_nor_tie, _unlisted_file, _name_that_climbs, _chunk_that_climbs,
    _name_with_a_line_end, _linked_shard, _linked_manifest, _linked_folder, _file_instead_of_folder,
    _pipe_instead_of_shard, _pickle_bomb, _torch_bomb, _bomb_for_a_manifest,
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__.strip("_"))
def test_damaged_checkpoint_is_reported_and_the_older_taken(root: Path, damage: Callable[[Path], None]) -> None:
    damage(root / "step-00000004")
    skipped: list[str] = []
    checkpoint = find_checkpoint(root, on_skip=skipped.append)
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert len(skipped) == 1
    assert skipped[0].startswith("step-00000004 is damaged and was passed over: ")
    assert not (root.parent / "exploded").exists()


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__.strip("_"))
def test_what_is_loaded_while_it_is_hashed_is_the_older_one_in_the_end(
    tiny: ModuleType, root: Path, damage: Callable[[Path], None]
) -> None:
    expected = tiny.digest(*tiny.resume(verified(root / "step-00000002")))
    damage(root / "step-00000004")
    skipped: list[str] = []
    model = tiny.build_model(seed=7)
    optimizer = tiny.build_optimizer(model)
    resumption = begin_resumption(root, check=lambda checkpoint: None, on_skip=skipped.append)
    assert resumption is not None
    resumption.load(model, optimizer, sharding=Sharding.NONE)
    assert resumption.checkpoint.step == 2 and tiny.digest(model, optimizer) == expected
    (line,) = skipped
    assert line.startswith("step-00000004 is damaged and was passed over: ")
    assert not (root.parent / "exploded").exists()


def test_what_does_not_fit_is_refused_once_it_is_known_to_be_whole(tiny: ModuleType, root: Path) -> None:
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model, "momentum")
    resumption = begin_resumption(root, check=lambda checkpoint: None, on_skip=pytest.fail)
    assert resumption is not None
    with pytest.raises(InputError, match="the checkpoint holds exp_avg, exp_avg_sq, the optimizer of this job keeps"):
        resumption.load(model, optimizer, sharding=Sharding.NONE)


def test_one_of_another_job_is_refused_before_anything_is_built(tiny: ModuleType, root: Path) -> None:
    def check(checkpoint: CheckpointFolder) -> None:
        check_compatible(checkpoint, tiny.build_facts(0, seed=9))

    with pytest.raises(InputError, match=r"another train\.seed: it has 0, this job 9"):
        begin_resumption(root, check=check, on_skip=pytest.fail)


def test_where_every_hash_is_wrong_the_load_ends(tiny: ModuleType, root: Path) -> None:
    for step in (2, 4):
        _flip_a_bit(root / f"step-{step:08d}")
    skipped: list[str] = []
    resumption = begin_resumption(root, check=lambda checkpoint: None, on_skip=skipped.append)
    assert resumption is not None and resumption.checkpoint.step == 4
    model = tiny.build_model()
    with pytest.raises(EnvironmentFaultError, match="none of its 2 checkpoints is whole; move them away"):
        resumption.load(model, tiny.build_optimizer(model), sharding=Sharding.NONE)
    assert len(skipped) == 2 and all("hashes to" in line for line in skipped)


def test_nothing_is_resumed_from_where_nothing_was_saved(tmp_path: Path) -> None:
    assert begin_resumption(tmp_path / "nowhere", check=lambda checkpoint: None, on_skip=pytest.fail) is None


def test_undamaged_newest_is_taken_in_silence(root: Path) -> None:
    checkpoint = find_checkpoint(root, on_skip=pytest.fail)
    assert checkpoint is not None
    assert checkpoint.step == 4


def test_where_all_are_damaged_nothing_starts_over_silently(root: Path) -> None:
    for folder in root.glob("step-*"):
        _flip_a_bit(folder)
    skipped: list[str] = []
    with pytest.raises(EnvironmentFaultError, match="none of its 2 checkpoints is whole; move them away"):
        find_checkpoint(root, on_skip=skipped.append)
    assert [line.split()[0] for line in skipped] == ["step-00000004", "step-00000002"]


def test_no_folder_an_empty_one_and_other_names_hold_no_checkpoint(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "nowhere", on_skip=pytest.fail) is None
    for name in (".tmp-step-00000004-ab12", ".tmp-trash-step-00000002-cd34", "step-4", "step-0000000004", "export"):
        (tmp_path / name).mkdir()
    assert find_checkpoint(tmp_path, on_skip=pytest.fail) is None


def test_newest_is_by_number_also_beyond_eight_digits(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.build_model()
    for step in (99_999_999, 100_000_000):
        tiny.save(tmp_path, model, tiny.build_optimizer(model), step)
    checkpoint = find_checkpoint(tmp_path, on_skip=pytest.fail)
    assert checkpoint is not None
    assert checkpoint.path.name == "step-100000000"


def test_files_that_the_manifest_does_not_list_are_never_opened(root: Path) -> None:
    (root / "step-00000004" / "optimizer.pt").write_bytes(pickle.dumps(_Bomb(root.parent / "exploded")))
    checkpoint = find_checkpoint(root, on_skip=pytest.fail)
    assert checkpoint is not None
    assert not (root.parent / "exploded").exists()


def test_signed_infinity_is_refused_on_import(tiny: ModuleType, root: Path) -> None:
    folder = root / "step-00000004"
    tensors = load_file(folder / SHARD)
    tensors["lm_head.weight|weight|0"][7] = float("inf")
    save_file(tensors, folder / SHARD)
    sign(folder)
    checkpoint = find_checkpoint(root, on_skip=pytest.fail)
    assert checkpoint is not None
    with pytest.raises(InputError, match=r"lm_head\.weight: the checkpoint holds NaN or infinity"):
        import_weights(tiny.build_model(), checkpoint)
