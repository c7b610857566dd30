"""Writes a plain Hugging Face folder from a foreign checkpoint, weights only, on the CPU.

    python -m shardwise.trainer.runtime.importing.run REQUEST.json RESULT.json

    1  which kind of folder it is, and which of its files are the weights          files
    2  names, shapes and types of their tensors; nothing is executed               tensors, sharded
    3  each compared with the model of the config, built without weights           names
    4  written tensor by tensor next to OUT, each checked for NaN; then renamed    here

No more than one tensor is in memory. Safetensors files (https://github.com/huggingface/safetensors#format) have the
header's length in 8 little-endian bytes, a JSON header, then the tensors' bytes without gaps. They are of at most 5 GB,
as transformers writes them, but for a single tensor that is larger; several have an index. Progress goes to stdout; an
error is one to three lines on stderr and the exit code of its kind.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from shardwise.trainer.runtime.importing.files import (
    ADAPTER_CONFIG,
    CONFIG_BYTES,
    NAMES,
    Form,
    Found,
    checked_file,
    copy_file,
    copy_tokenizer,
    find_kind,
    has_file,
    printable,
    read_weight_map,
)
from shardwise.trainer.runtime.importing.names import Placed, base_name, build_empty, merged, place_tensors
from shardwise.trainer.runtime.importing.sharded import read_dcp, read_zero
from shardwise.trainer.runtime.importing.tensors import (
    SAFETENSORS_TYPES,
    Stored,
    Tensors,
    read_safetensors,
    read_torch_files,
)
from shardwise.trainer.runtime.run.process import end_with_parent, report_progress, run_request
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.messages.worker_requests import Imported, ImportKind, ImportRequest, WeightType
from shardwise.trainer.spec.model.config_json import read_config
from shardwise.trainer.spec.units import format_bytes

REPORT_EVERY_S = 10.0
FILE_BYTES = 5 * 10**9
_BLOCK_ELEMENTS = 1 << 24  # checked for NaN at a time
_TYPES = {WeightType.FP32: torch.float32, WeightType.BF16: torch.bfloat16, WeightType.FP16: torch.float16}


class _Opened(NamedTuple):
    """The tensors of a checkpoint."""

    tensors: dict[str, Stored]
    described: str
    files: tuple[Path, ...] = ()  # safetensors that hold them as they are


class _Config(NamedTuple):
    """A config.json, and its name in messages."""

    content: dict[str, Any]
    origin: str
    folder: Path | None  # that it was found in


def import_checkpoint(request: ImportRequest, report: Callable[[str], None] = lambda _: None) -> Imported:
    """Writes the requested folder; `report` is given lines of progress.

    InputError where the checkpoint is damaged, unsafe, incomplete or of another model; EnvironmentFaultError where the
    disk is in the way.
    """
    folder, out = Path(request.checkpoint), Path(request.out)
    found = find_kind(folder, request.kind)
    dtype = None if request.dtype is None else _TYPES[request.dtype]
    if request.base is not None and found.kind is not ImportKind.PEFT:
        raise InputError(f"--base: {folder} is {NAMES[found.kind]} and no adapter; remove --base")
    if found.kind is ImportKind.PEFT:
        config, opened, placed = _merged_adapter(request, found)
    else:
        opened = _open(found)
        config = _config_of(request, folder, found.folder)
        placed = _place(config, opened, found)
    total_bytes = num_bytes(placed.tensors, dtype)
    placed = placed._replace(tensors=_Progress(placed.tensors, report).tensors)
    with _staged(out) as staging:
        held_as = most_common_type(placed.tensors, dtype)
        if not _link(opened, placed, found, dtype, staging):
            _check_room(out, total_bytes)
            write_tensors(placed.tensors, staging, dtype=dtype, origin=str(folder))
        _write_config(config.content, held_as, staging)
        notes = (*_notes(found), *placed.notes, *_add_tokenizer(request, folder, config, staging))
    return Imported(
        kind=found.kind,
        source=f"{NAMES[found.kind]}: {opened.described}",
        num_tensors=len(placed.tensors),
        num_bytes=total_bytes,
        dtype=SAFETENSORS_TYPES[held_as],
        notes=tuple(printable(note.replace("\n", " ")) for note in notes),
    )


class _Progress:
    """Tensors of which each reports, when it is read, how much has been read."""

    def __init__(self, tensors: Tensors, report: Callable[[str], None]) -> None:
        self._total_bytes = sum(stored.num_bytes for stored in tensors.values())
        self._num_bytes, self._last_s, self._report = 0, time.monotonic(), report
        self.tensors = {name: each._replace(read=partial(self._read, each)) for name, each in tensors.items()}

    def _read(self, stored: Stored) -> Tensor:
        self._num_bytes += stored.num_bytes
        if time.monotonic() - self._last_s >= REPORT_EVERY_S:
            self._last_s = time.monotonic()
            self._report(f"{format_bytes(self._num_bytes)} of {format_bytes(self._total_bytes)}")
        return stored.read()


def _open(found: Found) -> _Opened:
    if found.form is Form.SAFETENSORS:
        tensors, files = read_safetensors(found.folder, found.name)
        return _Opened(tensors, found.name, files)
    if found.form is Form.TORCH:
        return _Opened(read_torch_files(found.folder, found.name), found.name)
    if found.form is Form.DCP:
        return _Opened(read_dcp(found.folder), f"the parts in {found.name}")
    zero = read_zero(found.folder)
    return _Opened(zero.tensors, f"{zero.described}, {found.name}")


def _place(config: _Config, opened: _Opened, found: Found) -> Placed:
    model = build_empty(config.content, config.origin, most_layers=len(opened.tensors))
    is_nested = found.form is Form.DCP
    return place_tensors(model, opened.tensors, str(found.folder), config_origin=config.origin, is_nested=is_nested)


def _config_of(request: ImportRequest, *folders: Path) -> _Config:
    """The config that was named, or the checkpoint's own."""
    if request.config is not None:
        return _Config(request.config, request.config_origin or "--config", None)
    for folder in folders:
        if has_file(folder, "config.json"):
            path = checked_file(folder, "config.json", most_bytes=CONFIG_BYTES)
            return _Config(read_config(path), str(path), folder)
    raise InputError(f"{folders[0]}: holds no config.json; name the model: --config FOLDER, a hub id or a preset")


def _merged_adapter(request: ImportRequest, found: Found) -> tuple[_Config, _Opened, Placed]:
    path = checked_file(found.folder, ADAPTER_CONFIG, most_bytes=CONFIG_BYTES)
    adapter_config = codec.read_object(path)
    if request.base is None:
        raise InputError(
            f"{found.folder}: is an adapter of {base_name(adapter_config)}, and training starts from whole models;\n"
            "name its base to have it merged: --base FOLDER or a hub id"
        )
    base = Path(request.base)
    base_found = find_kind(base, ImportKind.HUGGINGFACE)
    opened, adapter = _open(base_found), _open(found)
    config = _config_of(request, base)
    placed = _place(config, opened, base_found)
    tensors = merged(placed.tensors, placed.model_names, adapter.tensors, adapter_config, found.folder)
    described = f"{found.name}, merged into {base.name}"
    return config, _Opened(tensors, described), placed._replace(tensors=tensors)


def _link(opened: _Opened, placed: Placed, found: Found, dtype: torch.dtype | None, staging: Path) -> bool:
    """Links or copies safetensors files, checked, if nothing in them changes; else returns False."""
    is_same = placed.tensors.keys() == opened.tensors.keys()
    changes = [each for each in placed.tensors.values() if dtype not in (None, each.dtype)]
    if not opened.files or not is_same or changes:
        return False
    for name, stored in placed.tensors.items():
        check_finite(name, stored.read(), str(found.folder))
    for path in opened.files:
        name = path.name if found.name.endswith(".index.json") else "model.safetensors"
        try:
            os.link(path.resolve(), staging / name)
        except OSError:  # another file system, or one without links
            shutil.copyfile(path, staging / name)
    if found.name.endswith(".index.json"):
        _write_index(placed.tensors, read_weight_map(found.folder, found.name), staging)
    return True


def _write_config(config: dict[str, Any], held_as: torch.dtype, staging: Path) -> None:
    """The config as it was, with the type of the weights that are there and without code that is not."""
    written = {name: value for name, value in config.items() if name not in ("auto_map", "_name_or_path", "dtype")}
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    written[key] = str(held_as).removeprefix("torch.")
    (staging / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _add_tokenizer(request: ImportRequest, folder: Path, config: _Config, staging: Path) -> tuple[str, ...]:
    named = [Path(place) for place in (request.tokenizer, request.base) if place is not None]
    places = [folder, *([config.folder] if config.folder is not None else []), *named]
    for place in places:
        copy_file(place, "generation_config.json", staging, most_bytes=CONFIG_BYTES)
        if has_file(staging, "generation_config.json"):
            break
    source = copy_tokenizer(places, staging)
    if source is None:
        return ("no tokenizer was found: a job that trains from it names one with model.tokenizer",)
    return () if source == folder else (f"tokenizer: that of {source.name}",)


def _notes(found: Found) -> Iterator[str]:
    for form, name in found.others:
        remedy = "; --kind deepspeed reads its fp32 masters" if form is Form.ZERO else ""
        yield f"{name} is there as well and was not imported{remedy}"
    if found.not_read:
        names = ", ".join(found.not_read[:3])
        more = f" and {len(found.not_read) - 3} more" if len(found.not_read) > 3 else ""
        yield f"not read, as weights only are imported: {names}{more}"


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """An empty folder next to `out` that gets its name at the end, and is removed after an error."""
    staging = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        yield staging
        staging.rename(out)  # fails where there is a folder that is not empty by now
        _sync(out.parent)
    except OSError as error:
        raise EnvironmentFaultError(f"{out}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_room(out: Path, total_bytes: int) -> None:
    free_bytes = shutil.disk_usage(out.parent).free
    if free_bytes < total_bytes:
        raise EnvironmentFaultError(
            f"{out}: needs {format_bytes(total_bytes)}, and {format_bytes(free_bytes)} are free there"
        )


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(arguments: Sequence[str]) -> int:
    """Runs the request in the first file and writes the result to the second; returns the exit code."""
    disable_progress_bar()
    return run_request(
        arguments, ImportRequest, lambda request: import_checkpoint(request, report_progress), clean=printable
    )


def write_tensors(tensors: Tensors, folder: Path, *, dtype: torch.dtype | None, origin: str) -> None:
    """Writes model.safetensors, or several files and their index; floating-point numbers in `dtype`, if given.

    InputError where a number is not finite, or is not in `dtype`.
    """
    planned = {name: _typed(stored, dtype) for name, stored in tensors.items()}
    files = _files(planned)
    for file, names in files.items():
        with (folder / file).open("wb") as stream:
            stream.write(_header({name: planned[name] for name in names}))
            for name in names:
                _write_tensor(stream, name, planned[name], origin)
            stream.flush()
            os.fsync(stream.fileno())
    if len(files) > 1:
        _write_index(planned, {name: file for file, names in files.items() for name in names}, folder)


def _write_index(tensors: Tensors, weight_map: Mapping[str, str], folder: Path) -> None:
    index = {"metadata": {"total_size": num_bytes(tensors, None)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def check_finite(name: str, tensor: Tensor, origin: str, *, stored: Tensor | None = None) -> None:
    """InputError where a number is NaN or infinite; `stored` is the tensor before rounding."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:  # torch has no check for 8 bit
        return
    for block in tensor.reshape(-1).split(_BLOCK_ELEMENTS):
        if not bool(torch.isfinite(block).all()):
            if stored is not None and stored.dtype is not tensor.dtype:
                check_finite(name, stored, origin)
                raise InputError(f"{origin}: {name} has numbers too large for {tensor.dtype}; use --dtype bf16 or fp32")
            raise InputError(f"{origin}: {name} holds NaN or infinity; import an earlier checkpoint")


def most_common_type(tensors: Tensors, dtype: torch.dtype | None) -> torch.dtype:
    """The floating-point type of most elements."""
    counts: dict[torch.dtype, int] = {}
    for stored in tensors.values():
        kind = _typed(stored, dtype).dtype
        if kind.is_floating_point:
            counts[kind] = counts.get(kind, 0) + torch.Size(stored.shape).numel()
    return max(counts, key=lambda each: counts[each]) if counts else torch.float32


def num_bytes(tensors: Tensors, dtype: torch.dtype | None) -> int:
    """Bytes of the tensors on disk."""
    return sum(_typed(stored, dtype).num_bytes for stored in tensors.values())


def _typed(stored: Stored, dtype: torch.dtype | None) -> Stored:
    return stored if dtype is None or not stored.dtype.is_floating_point else stored._replace(dtype=dtype)


def _files(tensors: Mapping[str, Stored]) -> dict[str, list[str]]:
    """Which tensors each file has, in their order."""
    groups: list[list[str]] = [[]]
    size_bytes = 0
    for name, stored in tensors.items():
        if groups[-1] and size_bytes + stored.num_bytes > FILE_BYTES:
            groups.append([])
            size_bytes = 0
        groups[-1].append(name)
        size_bytes += stored.num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups)}


def _header(tensors: Mapping[str, Stored]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, stored in tensors.items():
        entries[name] = {
            "dtype": SAFETENSORS_TYPES[stored.dtype],
            "shape": [*stored.shape],
            "data_offsets": [offset, offset + stored.num_bytes],
        }
        offset += stored.num_bytes
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


def _write_tensor(stream: BinaryIO, name: str, stored: Stored, origin: str) -> None:
    found = stored.read()
    tensor = found.to(stored.dtype).contiguous()
    if tuple(tensor.shape) != stored.shape:
        raise InputError(f"{origin}: {name} is {tuple(tensor.shape)} and was described as {stored.shape}")
    check_finite(name, tensor, origin, stored=found)
    stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
