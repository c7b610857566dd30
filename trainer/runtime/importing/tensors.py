"""Tensors in untrusted files: their names, shapes and types at once, their values one at a time.

A pickle is a program: it may name any function and have it called. So, for a file of `torch.save`:

1. It must be a plain zip: nothing compressed, one pickle of bounded size, no code.
2. The names in its pickle are read without running it, and must be on a list: tensors, their storages and types, and
   the few classes of other libraries that occur in such files.
3. Only then `torch.load(weights_only=True)` reads it; for those classes it uses stand-ins that store arguments and
   do nothing: DeepSpeed is never imported for it. Storages are mapped, not read.

`.metadata` of torch's distributed checkpoints is a bare pickle, which torch itself reads by `pickle.load`; here by an
unpickler that knows a dozen names, each of them a stand-in, a size, a type or a path.
"""

import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import SEEK_CUR, SEEK_END, SEEK_SET, BufferedReader, BytesIO, RawIOBase
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.serialization import safe_globals

from shardwise.trainer.runtime.importing.files import checked_file, read_weight_map
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.units import MIB, format_bytes

SAFETENSORS_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_TORCH_TYPES = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}
PICKLE_BYTES = 64 * MIB  # of data.pkl, which holds no tensor
METADATA_BYTES = 512 * MIB  # 250 bytes for each piece of each tensor

_STORAGES = ("Float", "Half", "BFloat16", "Double", "Long", "Int", "Short", "Char", "Byte", "Bool")
_TYPES = tuple(str(dtype).removeprefix("torch.") for dtype in SAFETENSORS_TYPES)
_PLAIN = {
    "collections.OrderedDict",
    "_codecs.encode",  # how protocol 2 writes bytes
    "torch.Size",
    "torch.device",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
    "torch._tensor._rebuild_from_type_v2",  # a tensor with attributes, such as DeepSpeed's `ds_id`
    "torch.Tensor",
    "torch.storage.UntypedStorage",
    *(f"torch.{name}Storage" for name in _STORAGES),
    *(f"torch.{name}" for name in _TYPES),
}
_INERT = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "argparse.Namespace",  # scripts save their arguments with the weights
    "pathlib.PosixPath",
    "numpy.dtype",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
)
_METADATA_INERT = (
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",  # before torch 2.3
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib.Path",
)
_METADATA_OPCODES = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "NONE",
    "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE",
    "BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS",
    "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_SET", "ADDITEMS", "STACK_GLOBAL", "GLOBAL", "NEWOBJ", "REDUCE",
    "BUILD",
}  # fmt: skip
_DAMAGES = (  # raised by readers of a format at bytes that are not of it
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError, TypeError,
    ValueError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile,
)  # fmt: skip
_NESTS = ("state_dict", "model", "module")  # keys under which scripts save the weights, among others


class Stored(NamedTuple):
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Tensors = Mapping[str, Stored]


def in_memory(tensor: Tensor) -> Stored:
    """A tensor that is loaded already, or mapped."""
    return Stored(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def read_safetensors(folder: Path, name: str) -> tuple[dict[str, Stored], tuple[Path, ...]]:
    """The tensors of a safetensors file, or of those that an index names, and the files."""
    return _read_parts(folder, name, ".safetensors.index.json", _open_safetensors)


def read_torch_files(folder: Path, name: str) -> dict[str, Stored]:
    """The tensors of a file of `torch.save`, or of those that an index names."""
    return _read_parts(folder, name, ".bin.index.json", _open_torch)[0]


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
        yield key, Stored(tuple(part.get_shape()), dtype, partial(part.__getitem__, ...))


def _open_torch(path: Path) -> Iterator[tuple[str, Stored]]:
    loaded = load_pickled(path)
    for nest in _NESTS:
        if isinstance(loaded, dict) and isinstance(loaded.get(nest), dict):
            loaded = loaded[nest]
            break
    if not isinstance(loaded, dict):
        raise InputError(f"{path}: holds no weights by name, but a {type(loaded).__name__}")
    for key, tensor in loaded.items():
        yield str(key), in_memory(checked_tensor(tensor, path, str(key)))


def checked_tensor(tensor: object, origin: Path, name: str) -> Tensor:
    """The tensor without attributes that a pickle may have set; InputError unless it is dense numbers on the CPU."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise InputError(f"{origin}: {name[:80]!r} is no tensor")
    plain = Tensor.detach(tensor)  # type: ignore[arg-type] # the class's own method: a pickle sets attributes
    is_dense = plain.layout is torch.strided and plain.device.type == "cpu" and not plain.is_quantized
    if not is_dense or plain.dtype not in SAFETENSORS_TYPES:
        raise InputError(f"{origin}: {name[:80]} is no plain tensor of numbers ({plain.layout}, {plain.dtype})")
    return plain


class StandIn:
    """Replaces a class or function that a pickle names: stores its arguments and state, does nothing."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "StandIn":  # noqa: ANN401  # any content of a pickle
        made = object.__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __init__(self, *_: object) -> None:
        """`__new__` has stored the arguments already."""

    def __setstate__(self, state: object) -> None:
        self.state = state


def _stand_ins(names: tuple[str, ...]) -> dict[str, type[StandIn]]:
    return {name: type(name.rpartition(".")[2], (StandIn,), {}) for name in names}


STAND_INS: Mapping[str, type[StandIn]] = _stand_ins(_INERT)
METADATA_STAND_INS: Mapping[str, type[StandIn]] = _stand_ins(_METADATA_INERT)


def load_pickled(path: Path) -> Any:  # noqa: ANN401  # any content
    """Content of a file of `torch.save`, tensors mapped; InputError if it is damaged or could run code."""
    with _explained(path):
        with path.open("rb") as stream:
            _check_archive(stream, path)
        return _load_checked(path, is_mapped=True)


def load_pickled_part(path: Path, start: int, num_bytes: int) -> Any:  # noqa: ANN401  # any content
    """As `load_pickled`, of a part of a file, which is read straight into its tensors."""
    with _explained(path), path.open("rb") as stream:
        part = cast("IO[bytes]", _Part(stream, start, num_bytes))
        _check_archive(part, path)
        part.seek(0)
        return _load_checked(part, is_mapped=False)


class _Part(RawIOBase):
    """Bytes [start, start + num_bytes) of a file, as a file (torch's own view of a part seeks wrongly from its end)."""

    def __init__(self, stream: BufferedReader, start: int, num_bytes: int) -> None:
        self._stream, self._start, self._num_bytes, self._place = stream, start, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        self._place = max(0, offset + {SEEK_SET: 0, SEEK_CUR: self._place, SEEK_END: self._num_bytes}[whence])
        return self._place

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401  # RawIOBase's signature
        self._stream.seek(self._start + self._place)
        num_read = self._stream.readinto(memoryview(buffer)[: max(0, self._num_bytes - self._place)])
        self._place += num_read
        return num_read


def _load_checked(source: Path | IO[bytes], *, is_mapped: bool) -> Any:  # noqa: ANN401  # any content
    with safe_globals([(kind, name) for name, kind in STAND_INS.items()]):
        return torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)


def load_metadata(path: Path) -> StandIn:
    """Content of `.metadata` of a torch distributed checkpoint, as stand-ins; InputError as for `load_pickled`."""
    with _explained(path):
        content = path.read_bytes()
        for opcode, _, _ in pickletools.genops(content):
            if opcode.name not in _METADATA_OPCODES:
                raise pickle.UnpicklingError(f"the operation {opcode.name} has no place in it")
        loaded = _MetadataUnpickler(BytesIO(content), path).load()
    if type(loaded) is not METADATA_STAND_INS["torch.distributed.checkpoint.metadata.Metadata"]:
        raise InputError(f"{path}: is damaged: it holds no metadata of a torch distributed checkpoint")
    return loaded


class _MetadataUnpickler(pickle._Unpickler):
    """The unpickler in Python: the one in C allocates as many objects as a pickle claims to hold."""

    def __init__(self, stream: BinaryIO, origin: Path) -> None:
        super().__init__(stream)
        self._origin = origin

    def find_class(self, module_name: str, global_name: str) -> Any:  # noqa: ANN401  # pickle's signature
        name = f"{module_name}.{global_name}"
        if name in METADATA_STAND_INS:
            return METADATA_STAND_INS[name]
        if name == "torch.Size":
            return _size
        if module_name == "torch" and global_name in _TYPES:
            return getattr(torch, global_name)
        raise refused(self._origin, name)


def _size(dims: Any = ()) -> tuple[int, ...]:  # noqa: ANN401  # any content of a pickle
    return tuple(int(dim) for dim in dims)


def refused(origin: Path, name: str) -> InputError:
    """The error for a name that is on no list."""
    shown = name if name.isprintable() and len(name) <= 80 else repr(name[:77])
    return InputError(
        f"{origin}: is a pickle that calls {shown}, which weights do not need and which may run any code;\n"
        "nothing was run. Save the weights as safetensors where the checkpoint comes from"
    )


def _check_archive(stream: IO[bytes], origin: Path) -> None:
    """InputError for anything but a plain zip of `torch.save` whose pickle names only known classes."""
    if not zipfile.is_zipfile(stream):
        stream.seek(0)
        if stream.read(4) == b"PK\x03\x04":
            raise InputError(f"{origin}: is truncated; copy it again")
        raise InputError(
            f"{origin}: is no file of torch.save in the form that torch has written since 1.6;\n"
            "if you trust it, load it with torch and save it again, best as safetensors"
        )
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        names = [member.filename for member in members]
        pickles = [member for member in members if member.filename.endswith(".pkl")]
        is_plain = all(each.compress_type == zipfile.ZIP_STORED for each in members) and len({*names}) == len(names)
        if not is_plain or len(pickles) != 1 or not pickles[0].filename.endswith("/data.pkl"):
            raise InputError(f"{origin}: is no plain file of tensors: it is compressed, or holds code")
        if pickles[0].file_size > PICKLE_BYTES:
            raise InputError(
                f"{origin}: holds a pickle of {format_bytes(pickles[0].file_size)}; {format_bytes(PICKLE_BYTES)} is "
                "the most that is read"
            )
        content = archive.read(pickles[0])
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            raise refused(origin, f"{opcode.name} {argument or ''}".strip())
        name = str(argument).replace(" ", ".")
        if opcode.name == "GLOBAL" and name not in _PLAIN and name not in STAND_INS:
            raise refused(origin, name)


@contextmanager
def _explained(origin: Path) -> Iterator[None]:
    """Turns errors of a reader at a damaged file into an InputError with the file's name."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{origin}: cannot be read: {error.strerror or error}") from error
    except _DAMAGES as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{origin}: is damaged, or no file of tensors: {first[:200]}") from error
