"""Damage of every kind is found before a byte is believed; the next older checkpoint is taken, and that is reported."""

import json
import os
import pickle
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from small_disk import flip_bit

from shardwise.trainer.runtime.checkpoint import check_compatible, find_checkpoint, import_weights
from shardwise.trainer.runtime.checkpoint.folders import verified
from shardwise.trainer.runtime.checkpoint.load import begin_resumption
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError

SHARD, MANIFEST = "shard-00000.safetensors", "MANIFEST.json"


@pytest.fixture
def root(tiny, tmp_path):
    tiny.run_until(tmp_path / "checkpoints", 4)
    return tmp_path / "checkpoints"


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def sign(folder: Path) -> None:
    """Makes the manifest vouch for the shard as it is now, as an attacker would."""
    content = (folder / SHARD).read_bytes()
    entry = {"size_bytes": len(content), "sha256": sha256(content).hexdigest()}
    edit_manifest(folder, lambda manifest: manifest["files"].update({SHARD: entry}))


def bomb(folder: Path) -> bytes:
    """Unpickling it creates a folder."""

    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(folder.parent.parent / "exploded"),))

    return pickle.dumps(Bomb())


def link(path: Path) -> None:
    elsewhere = path.parent.parent / f"elsewhere-{path.name}"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def name_that_climbs(folder: Path) -> None:
    (folder.parent / SHARD).write_bytes((folder / SHARD).read_bytes())
    edit_manifest(folder, lambda manifest: manifest["files"].update({f"../{SHARD}": manifest["files"][SHARD]}))


def in_manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_manifest(folder, change)


def in_weight(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Callable[[Path], None]:
    """A change of the first weight's entry and of its chunk."""

    def edit(manifest: dict[str, Any]) -> None:
        weight = next(iter(manifest["parameters"].values()))["weight"]
        change(weight, weight["chunks"][0])

    return in_manifest(edit)


def pickled_shard(folder: Path) -> None:
    (folder / SHARD).write_bytes(bomb(folder))
    sign(folder)


def pipe(folder: Path) -> None:
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped bit": lambda folder: flip_bit(folder / SHARD, -100),
    "truncated": lambda folder: os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 8),
    "no shard": lambda folder: (folder / SHARD).unlink(),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "pickled manifest": lambda folder: (folder / MANIFEST).write_bytes(bomb(folder)),
    "pickled shard": pickled_shard,
    "deep manifest": lambda folder: (folder / MANIFEST).write_text('{"groups":' + '{"a":' * 100_000),
    "giant manifest": lambda folder: os.truncate(folder / MANIFEST, 1 << 29),  # sparse
    "manifest of another step": in_manifest(lambda manifest: manifest["facts"].update(step=400)),
    "later format": in_manifest(lambda manifest: manifest.update(format=2)),
    "unknown field": in_manifest(lambda manifest: manifest.update(hook="os.system")),
    "missing chunk": in_weight(lambda weight, chunk: weight.update(chunks=[])),
    "overlapping chunk": in_weight(lambda weight, chunk: weight["chunks"].append(chunk)),
    "chunk of another size": in_weight(lambda entry, chunk: (entry.update(shape=[10]), chunk.update(num_elements=10))),
    "chunk of another type": in_weight(lambda weight, chunk: weight.update(type="I32")),
    "chunk without key": in_weight(lambda weight, chunk: chunk.update(key="nowhere")),
    "chunk of an unlisted file": in_weight(lambda weight, chunk: chunk.update(file="shard-00009.safetensors")),
    "chunk that climbs": in_weight(lambda weight, chunk: chunk.update(file=f"../{SHARD}")),
    "negative start": in_weight(lambda weight, chunk: chunk.update(start=-1)),
    "name that climbs": name_that_climbs,
    "name with a line end": in_manifest(lambda held: held["files"].update({f"{SHARD}\n": held["files"][SHARD]})),
    "tie to nowhere": in_manifest(lambda manifest: manifest["parameters"].update(w={"tied_to": "model.nowhere"})),
    "neither weight nor tie": in_manifest(lambda manifest: manifest["parameters"].update(w={})),
    "linked shard": lambda folder: link(folder / SHARD),
    "linked manifest": lambda folder: link(folder / MANIFEST),
    "linked folder": link,
    "pipe instead of shard": pipe,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_reported_and_the_older_taken(tiny, root, damage):
    """Both where it is hashed before it is read, and where it is loaded while it is hashed."""
    expected = tiny.digest(*tiny.resume(verified(root / "step-00000002")))
    DAMAGE[damage](root / "step-00000004")
    found, loaded = list[str](), list[str]()
    assert find_checkpoint(root, on_skip=found.append).step == 2
    model = tiny.build_model(seed=7)
    optimizer = tiny.build_optimizer(model)
    resumption = begin_resumption(root, check=lambda checkpoint: None, on_skip=loaded.append)
    resumption.load(model, optimizer, sharding=Sharding.NONE)
    assert resumption.checkpoint.step == 2 and tiny.digest(model, optimizer) == expected
    for (line,) in (found, loaded):
        assert line.startswith("step-00000004 is damaged and was passed over: ")
    assert not (root.parent / "exploded").exists()


def test_what_does_not_fit_is_refused_once_it_is_known_to_be_whole_and_another_job_before_anything_is_built(tiny, root):
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model, is_sgd=True)
    (root / "step-00000004" / "optimizer.pt").write_bytes(bomb(root / "step-00000004"))
    resumption = begin_resumption(root, check=lambda checkpoint: None, on_skip=pytest.fail)
    with pytest.raises(InputError, match="the checkpoint holds exp_avg, exp_avg_sq, the optimizer of this job keeps"):
        resumption.load(model, optimizer, sharding=Sharding.NONE)
    with pytest.raises(InputError, match=r"train\.seed: it has 0, this job 9"):
        facts = tiny.build_facts(0, seed=9)
        begin_resumption(root, check=lambda found: check_compatible(found, facts), on_skip=pytest.fail)
    assert not (root.parent / "exploded").exists(), "a file that no manifest lists is not opened"


def test_where_all_are_damaged_nothing_starts_over_silently(tiny, root):
    for folder in root.glob("step-*"):
        flip_bit(folder / SHARD, -100)
    skipped: list[str] = []
    resumption = begin_resumption(root, check=lambda checkpoint: None, on_skip=skipped.append)
    assert resumption.checkpoint.step == 4, "sizes are right"
    model = tiny.build_model()
    with pytest.raises(EnvironmentFaultError, match="none of its 2 checkpoints is whole"):
        resumption.load(model, tiny.build_optimizer(model), sharding=Sharding.NONE)
    with pytest.raises(EnvironmentFaultError, match="none of its 2 checkpoints is whole"):
        find_checkpoint(root, on_skip=skipped.append)
    assert [line.split()[0] for line in skipped] == ["step-00000004", "step-00000002"] * 2


def test_no_folder_an_empty_one_and_other_names_hold_no_checkpoint(tmp_path):
    assert find_checkpoint(tmp_path / "nowhere", on_skip=pytest.fail) is None
    assert begin_resumption(tmp_path / "nowhere", check=lambda found: None, on_skip=pytest.fail) is None
    for name in (".tmp-step-00000004-ab12", ".tmp-trash-step-00000002-cd34", "step-4", "step-0000000004", "export"):
        (tmp_path / name).mkdir()
    assert find_checkpoint(tmp_path, on_skip=pytest.fail) is None


def test_signed_infinity_is_refused_on_import(tiny, newest, root):
    folder = root / "step-00000004"
    tensors = load_file(folder / SHARD)
    tensors["lm_head.weight|weight|0"][7] = float("inf")
    save_file(tensors, folder / SHARD)
    sign(folder)
    with pytest.raises(InputError, match=r"lm_head\.weight: the checkpoint holds NaN or infinity"):
        import_weights(tiny.build_model(), newest(root))
