"""Nothing that a stranger put into a checkpoint is run, followed out of its folder, or read without a bound."""

import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from import_factory import FIRST, MASTERS, STATES, assert_refused, distributed, imported, saved_by_torch, zero
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from shardwise.trainer.runtime.importing.run import main
from shardwise.trainer.runtime.importing.tensors import load_metadata, load_pickled
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.messages.worker_requests import ImportKind, ImportRequest


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (os.system, (f"touch '{self.marker}'",))


@pytest.fixture
def marker(tmp_path) -> Path:
    return tmp_path / "it was run"


def adapter(base: Path, folder: Path) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "lora_alpha": 8, "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    parts = {"lora_A": torch.ones(2, 64), "lora_B": torch.ones(64, 2)}
    place = "base_model.model.model.layers.0.self_attn.q_proj"
    torch.save({f"{place}.{name}.weight": each for name, each in parts.items()}, folder / "adapter_model.bin")
    return folder


def add_to_torch_file(path: Path, bomb: object) -> None:
    torch.save({**torch.load(path, weights_only=False), "bomb": [{"deep": (1, bomb)}]}, path)


@contextmanager
def changed_metadata(folder: Path) -> Iterator[tuple[Any, Any]]:
    """The metadata of a distributed checkpoint, written again as the body leaves it, and of it the first tensor's."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    yield metadata, next(each for index, each in metadata.storage_data.items() if index.fqn == f"model.{FIRST}")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def add_to_metadata(path: Path, bomb: object) -> None:
    with changed_metadata(path.parent) as (metadata, _):
        metadata.planner_data = bomb


def add_to_part(path: Path, bomb: object) -> None:
    """In the place of a tensor, in as many bytes as it might have."""
    torch.save([torch.zeros(256, 64), bomb], path.parent / "bomb")
    content, planted = path.read_bytes(), (path.parent / "bomb").read_bytes()
    path.write_bytes(content + planted)
    (path.parent / "bomb").unlink()
    with changed_metadata(path.parent) as (_, place):
        place.offset, place.length = len(content), len(planted)


PICKLES = {
    "pytorch_model.bin": (saved_by_torch, "pytorch_model.bin", add_to_torch_file),
    "a bare pickle": (saved_by_torch, "pytorch_model.bin", lambda path, bomb: path.write_bytes(pickle.dumps(bomb))),
    "adapter_model.bin": (adapter, "adapter_model.bin", add_to_torch_file),
    "model_states": (zero, f"global_step2/{STATES}", add_to_torch_file),
    "optim_states": (zero, f"global_step2/{MASTERS.format(1)}", add_to_torch_file),
    ".metadata": (distributed, ".metadata", add_to_metadata),
    ".distcp": (distributed, "__0_0.distcp", add_to_part),
}  # fmt: skip


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_that_would_run_code_is_refused_and_not_run(name, base, marker, tmp_path):
    """And the checkpoint without it is imported."""
    make, file, plant = PICKLES[name]
    folder = make(base, tmp_path / "in")
    plant(folder / file, Bomb(marker))
    given_base = str(base) if make is adapter else None
    with pytest.raises(InputError) as refused:
        imported(folder, tmp_path / "out", base=given_base)
    assert not marker.exists() and not (tmp_path / "out").exists()
    assert name == "a bare pickle" or ".system" in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 3
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists(), "it does run where it is unpickled"
    imported(make(base, tmp_path / "good"), tmp_path / "out", base=given_base)
    written, held = load_file(tmp_path / "out" / "model.safetensors"), load_file(base / "model.safetensors")
    changed = {"model.layers.0.self_attn.q_proj.weight"} if make is adapter else set()
    assert {name for name, each in held.items() if not torch.equal(written[name], each)} == changed


def test_bombs_in_files_that_are_not_needed_are_not_even_opened(base, marker, tmp_path):
    folder = saved_by_torch(base, tmp_path / "in")
    (folder / "trainer_state.json").write_text("{}")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "random_states_0.pkl"):
        (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
    (folder / "modeling_llama.py").write_text(f"open({str(marker)!r}, 'w')")
    assert imported(folder, tmp_path / "out").kind is ImportKind.TRAINER
    assert not marker.exists()


def test_classes_that_stand_in_deepspeeds_files_are_not_imported(tmp_path):
    """A pickle of a class on the list is read, though there is no such class here and it takes no such state."""
    content = b"\x80\x02cdeepspeed.runtime.fp16.loss_scaler\nDynamicLossScaler\n)\x81}X\x05\x00\x00\x00scaleK\x03sb."
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        archive.writestr("file/data.pkl", content)
        archive.writestr("file/byteorder", "little")
        archive.writestr("file/version", "3\n")
    read = load_pickled(tmp_path / "file.pt")
    assert type(read).__module__ == "shardwise.trainer.runtime.importing.tensors" and read.state == {"scale": 3}


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.", r"posix\.system"),
        (b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93.", r"builtins\.getattr"),
        (b"\x80\x04\x8c\x05torch\x8c\x0chub.load_url\x93.", r"torch\.hub\.load_url"),
        (b"\x80\x02(iposix\nsystem\n.", "INST"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.", "damaged"),
        (b"\x80\x04N.", "no metadata"),
        (b"", "damaged"),
    ],
)
def test_metadata_of_anything_else_is_refused(content, fact, tmp_path):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(InputError, match=fact):
        load_metadata(tmp_path / ".metadata")


@pytest.mark.parametrize(
    ("compression", "more"),
    [(zipfile.ZIP_DEFLATED, {}), (zipfile.ZIP_STORED, {"pytorch_model/constants.pkl": b"\x80\x02)."})],
)
def test_an_archive_that_grows_when_it_is_read_or_holds_code_is_refused(compression, more, base, tmp_path):
    folder = saved_by_torch(base, tmp_path / "in")
    path = folder / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()} | more
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    assert_refused(folder, tmp_path / "out", "compressed, or holds code")
    torch.save({}, path, _use_new_zipfile_serialization=False)
    assert_refused(folder, tmp_path / "out", r"torch .*since 1\.6")


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("config.json", "run.CONFIG_BYTES"),
        ("pytorch_model.bin.index.json", "files.INDEX_BYTES"),
        ("pytorch_model.bin", "tensors.PICKLE_BYTES"),
    ],
)
def test_a_file_of_more_than_its_bound_is_not_read(name, bound, base, tmp_path, monkeypatch):
    folder = saved_by_torch(base, tmp_path / "in")
    if "index" in name:
        places = dict.fromkeys(load_file(base / "model.safetensors"), "pytorch_model-1.bin")
        (folder / name).write_text(json.dumps({"weight_map": places}))
        (folder / "pytorch_model.bin").rename(folder / "pytorch_model-1.bin")
    monkeypatch.setattr(f"shardwise.trainer.runtime.importing.{bound}", 100)
    assert_refused(folder, tmp_path / "out", rf"{re.escape(name)}: .*\b100 B\b")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "..", "sub/model.safetensors", ""])
def test_an_index_that_names_a_file_elsewhere_is_refused(name, base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "in")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    places = dict.fromkeys(load_file(base / "model.safetensors"), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert_refused(folder, tmp_path / "out", rf"{re.escape(repr(name))}.*nothing was read")


LINKS: dict[str, Callable[..., Path]] = {
    "config.json": saved_by_torch, "pytorch_model.bin": saved_by_torch, f"global_step2/{STATES}": zero,
    f"global_step2/{MASTERS.format(1)}": zero, "latest": zero, ".metadata": distributed, "__0_0.distcp": distributed,
    "adapter_model.bin": adapter, "adapter_config.json": adapter, "tokenizer.json": saved_by_torch,
}  # fmt: skip


@pytest.mark.parametrize("name", LINKS)
def test_a_link_out_of_the_folder_is_refused_and_a_pipe_in_the_place_of_a_file_is_not_waited_for(name, base, tmp_path):
    folder, given_base = LINKS[name](base, tmp_path / "in"), str(base) if LINKS[name] is adapter else None
    file, outside = folder / name, tmp_path / "outside"
    file.touch()
    file.rename(outside)
    file.symlink_to(outside)
    assert_refused(folder, tmp_path / "out", rf"{re.escape(file.name)}: .*\blink\b", base=given_base)
    if name == "config.json":
        file.unlink()
        os.mkfifo(file)
        assert_refused(folder, tmp_path / "out", r"config\.json: .*file")
    if name == "latest":
        file.unlink()
        (folder / "global_step2").rename(tmp_path / "steps")
        (folder / "link").symlink_to(tmp_path / "steps")
        for other in ("../steps", "link"):
            file.write_text(other)
            assert_refused(folder, tmp_path / "out", rf"folder '{re.escape(other)}'")


def test_a_snapshot_of_the_hubs_cache_is_links_into_its_blobs(base, tmp_path):
    root = tmp_path / "models--org--name"
    (root / "blobs").mkdir(parents=True)
    snapshot = root / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in base.iterdir():
        (snapshot / path.name).symlink_to(shutil.copy(path, root / "blobs" / f"blob-{path.name}"))
    imported(snapshot, tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


def test_names_do_not_reach_the_terminal_as_they_are(base, tmp_path, capsys):
    """A stranger's names may hold line ends and what moves the cursor."""
    folder = saved_by_torch(base, tmp_path / "in", lambda weights: {**weights, "a\x1b[2Jb\nc\nd\ne": torch.ones(1)})
    codec.write(tmp_path / "asked", ImportRequest(checkpoint=str(folder), out=str(tmp_path / "out")))
    assert main([str(tmp_path / "asked"), str(tmp_path / "answered")]) == 2
    error = capsys.readouterr().err
    assert "unexpected: a?[2Jb" in error and len(error.splitlines()) == 3


def another_step(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("global_step4"))
    (folder.parent / "latest").unlink()


def shorten_masters(folder: Path) -> None:
    path = folder / MASTERS.format(1)
    loaded = torch.load(path, weights_only=True)
    state = loaded["optimizer_state_dict"]
    state["single_partition_of_fp32_groups"] = [state["single_partition_of_fp32_groups"][0][:-9].clone()]
    torch.save(loaded, path)


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (lambda states: (states / MASTERS.format(0)).unlink(), "optim_states of rank 0"),
        (lambda states: (states / MASTERS.format(1)).unlink(), "2 ranks.*optim_states of 1"),
        (shorten_masters, r"elements of model\.norm\.weight.*optim_states"),
        (
            lambda states: shutil.copy(states / STATES, states / "mp_rank_01_model_states.pt"),
            r"mp_rank_01_model_states\.pt.*tensor, pipeline or expert",
        ),
        (another_step, r"global_step2.*global_step4.*`latest`"),
    ],
)
def test_a_deepspeed_checkpoint_that_is_not_whole_is_refused(damage, fact, base, tmp_path):
    folder = zero(base, tmp_path / "in")
    damage(folder / "global_step2")
    assert_refused(folder, tmp_path / "out", fact)


def change_first(metadata: Any, place: Any, lie: str | dict[str, object], half: Path) -> None:
    """The first tensor's metadata is wrong; `half` is a file with half of its rows."""
    tensor = metadata.state_dict_metadata[f"model.{FIRST}"]
    match lie:
        case dict():
            vars(place).update(lie)
        case "huge":
            tensor.size = tensor.chunks[0].sizes = torch.Size([10**9, 10**9])
        case "part":
            tensor.chunks[0].sizes = torch.Size([1, 64])
        case "overlap":
            place.relative_path, place.offset, place.length = half.name, 0, half.stat().st_size
            tensor.chunks = [type(tensor.chunks[0])(torch.Size([0, 0]), torch.Size([128, 64])) for _ in range(2)]
        case "twice":
            for name in [*metadata.state_dict_metadata]:
                metadata.state_dict_metadata[f"ema.{name}"] = metadata.state_dict_metadata[name]
            metadata.storage_data |= {
                type(index)(f"ema.{index.fqn}", index.offset): each for index, each in metadata.storage_data.items()
            }


@pytest.mark.parametrize(
    ("lie", "fact"),
    [
        ({"relative_path": "../outside"}, r"file '\.\./outside'"),
        ({"length": 10**12}, " 1000000000000 bytes"),
        ({"offset": 10**9}, "truncated"),
        ("huge", r"model\.embed_tokens\.weight .*\(1000000000, 1000000000\)"),
        ("part", r"model\.model\.embed_tokens\.weight .*whole"),
        ("overlap", r"model\.model\.embed_tokens\.weight .*overlap"),
        ("twice", r"ema\.model\. and model\."),
    ],
)
def test_a_distributed_checkpoint_that_contradicts_itself_is_refused(lie, fact, base, tmp_path):
    folder = distributed(base, tmp_path / "in")
    half = folder / "half.distcp"
    torch.save(torch.ones(128, 64), half)
    shutil.copy(folder / "__0_0.distcp", tmp_path / "outside")
    with changed_metadata(folder) as found:
        change_first(*found, lie, half)
    assert_refused(folder, tmp_path / "out", fact)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin", "optim_states", ".metadata", ".distcp"])
def test_a_file_with_random_damage_ends_in_a_message(name, base, tmp_path):
    """Cut off, or with bytes changed: an InputError of at most three lines, or what the file still holds."""
    make, file, _ = PICKLES[name]
    good, given_base = make(base, tmp_path / "in"), str(base) if make is adapter else None
    content = (good / file).read_bytes()
    random = Random(7)
    for number in range(25):
        damaged = bytearray(content[: random.randrange(len(content))] if number % 3 == 0 else content)
        if number % 3 and damaged:
            near_end = number % 3 == 2  # the zip's directory; torch's pickle stands in front
            span = len(damaged) if name == ".metadata" else min(3000, len(damaged))
            for _ in range(random.randrange(1, 8)):
                place = random.randrange(span)
                damaged[len(damaged) - 1 - place if near_end else place] = random.randrange(256)
        (good / file).write_bytes(damaged)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        try:
            imported(good, tmp_path / "out", base=given_base)
        except (InputError, EnvironmentFaultError) as error:
            assert len(str(error).splitlines()) <= 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-100],
        lambda content: content[:20] + b"x" * 50 + content[70:],
        lambda content: struct.pack("<Q", 2**60) + content[8:],
    ],
    ids=["short", "header", "huge header"],
)
def test_a_damaged_safetensors_file_is_refused(damage, base, tmp_path):
    shutil.copytree(base, tmp_path / "in")
    path = tmp_path / "in" / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert_refused(tmp_path / "in", tmp_path / "out", r"model\.safetensors: .*damaged")


@pytest.mark.filterwarnings("ignore")
def test_w50_torch_runs_what_the_metadata_of_a_distributed_checkpoint_names(base, marker, tmp_path):
    folder = distributed(base, tmp_path / "in")
    add_to_metadata(folder / ".metadata", Bomb(marker))
    FileSystemReader(folder).read_metadata()
    assert marker.exists()


def test_w51_deepspeeds_own_script_runs_what_a_checkpoint_names(base, marker, tmp_path):
    folder = zero(base, tmp_path / "in")
    add_to_torch_file(folder / "global_step2" / STATES, Bomb(marker))
    code = f"from deepspeed.utils.zero_to_fp32 import *; get_fp32_state_dict_from_zero_checkpoint({str(folder)!r})"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, check=True)
    assert marker.exists()
