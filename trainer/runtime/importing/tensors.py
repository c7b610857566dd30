"""Tensors that lie in a stranger's files: their names, shapes and types at once, their values one at a time."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.runtime.importing.files import checked_file, has_file, read_weight_map
from trainer.runtime.importing.pickles import load_pickled
from trainer.spec.errors import InputError

SAFETENSORS_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_TORCH_TYPES = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}
_NESTS = ("state_dict", "model", "module")  # what scripts put the weights under, beside their own things


class Stored(NamedTuple):
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Tensors = Mapping[str, Stored]


def held(tensor: Tensor) -> Stored:
    """A tensor that is there already: in memory, or mapped."""
    return Stored(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def read_safetensors(folder: Path, name: str) -> tuple[dict[str, Stored], tuple[Path, ...]]:
    """The tensors of a safetensors file, or of those that an index names, and the files."""
    return _read_parts(folder, name, ".safetensors.index.json", _open_safetensors)


def read_torch_files(folder: Path, name: str) -> dict[str, Stored]:
    """The tensors of a file of `torch.save`, or of those that an index names."""
    return _read_parts(folder, name, ".bin.index.json", _open_torch)[0]


def find_weights(folder: Path, stem: str, ending: str) -> str | None:
    """The file of weights in a folder, or its index; None where there is neither."""
    names = (f"{stem}{ending}", f"{stem}{ending}.index.json")
    return next((name for name in names if has_file(folder, name)), None)


def _read_parts(
    folder: Path, name: str, index_ending: str, read: Callable[[Path], Iterator[tuple[str, Stored]]]
) -> tuple[dict[str, Stored], tuple[Path, ...]]:
    weight_map = read_weight_map(folder, name) if name.endswith(index_ending) else None
    files = [name] if weight_map is None else sorted({*weight_map.values()})
    paths = tuple(checked_file(folder, file) for file in files)
    tensors: dict[str, Stored] = {}
    for path in paths:
        inside = dict(read(path))
        tensors |= {key: each for key, each in inside.items() if weight_map is None or weight_map.get(key) == path.name}
    lost = sorted({*weight_map} - {*tensors}) if weight_map is not None else []
    if lost:
        raise InputError(f"{folder / name}: places {lost[0]} in {(weight_map or {})[lost[0]]}, which lacks it")
    return tensors, paths


def _open_safetensors(path: Path) -> Iterator[tuple[str, Stored]]:
    try:
        opened: Any = safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise InputError(f"{path}: is damaged, or no safetensors file: {error}") from error
    for key in opened.keys():  # noqa: SIM118  # no mapping
        part = opened.get_slice(key)
        dtype = _TORCH_TYPES.get(part.get_dtype())
        if dtype is None:
            raise InputError(f"{path}: {key} is of type {part.get_dtype()}; import the 16- or 32-bit weights")
        yield key, Stored(tuple(part.get_shape()), dtype, _reader(part))


def _reader(part: Any) -> Callable[[], Tensor]:  # noqa: ANN401  # safetensors' slice, untyped
    def read() -> Tensor:
        tensor = part[...]
        assert isinstance(tensor, Tensor)
        return tensor

    return read


def _open_torch(path: Path) -> Iterator[tuple[str, Stored]]:
    loaded = load_pickled(path)
    for nest in _NESTS:
        if isinstance(loaded, dict) and isinstance(loaded.get(nest), dict):
            loaded = loaded[nest]
            break
    if not isinstance(loaded, dict):
        raise InputError(f"{path}: holds no weights by name, but a {type(loaded).__name__}")
    for key, tensor in loaded.items():
        yield str(key), held(checked_tensor(tensor, path, str(key)))


def checked_tensor(tensor: object, origin: Path, name: str) -> Tensor:
    """The tensor without what a pickle may have put on it; InputError for anything but dense numbers on the CPU."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise InputError(f"{origin}: {name[:80]!r} is no tensor")
    plain = Tensor.detach(tensor)  # type: ignore[arg-type] # the class's own method: a pickle sets attributes
    is_dense = plain.layout is torch.strided and plain.device.type == "cpu" and not plain.is_quantized
    if not is_dense or plain.dtype not in SAFETENSORS_TYPES:
        raise InputError(f"{origin}: {name[:80]} is no plain tensor of numbers ({plain.layout}, {plain.dtype})")
    return plain
