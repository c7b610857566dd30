"""A CUDA device that is not there: enough of it for autograd, autocast, FSDP2 and checkpointing on fake tensors.

Fake tensors carry a device without memory behind it, but a build of torch without CUDA refuses at four places to work
with `cuda` at all. With a CUDA build on a machine that has a GPU, nothing of this is touched.

    device guard    autograd calls the registered guard of a tensor's device; a CPU build has none and aborts. torch
                    itself installs a guard that does nothing where a CUDA build finds no GPU, but only in place of
                    another one: a dummy is registered first (slot 1 is CUDA)
    hooks           the engine reads from the CUDA hooks whether CUDA is built; the methods of the one object there is
    are
                    replaced, in a private copy of its table of virtual functions
    availability    Accelerate uses another device, and `torch.autocast("cuda")` turns itself off without a warning,
    where
                    torch.cuda is not available: here it is available
    streams         torch.cuda's streams and events raise; there is one stream here, on which nothing waits
    pinned memory   is locked by the driver; a fake tensor of as many bytes stands for it (`PinnedPages`)

The first two reach into torch's memory through the layout of its C++ headers, which are read from the wheel, and the
outcome is checked: where it is not what was meant, the dry run refuses to run. They have to be done before the first
backward of the process, because the engine counts devices once.
"""

import ctypes
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.trainer.runtime.memory import activation_offload
from shardwise.trainer.spec.errors import EnvironmentFaultError

_CUDA = 1  # c10::DeviceType::CUDA
_NUM_DEVICE_TYPES = 21
_HEADER = 2  # entries before the first virtual function: offset to top, type information
_DESTRUCTORS = ["~complete", "~deleting"]
_retained: list[Any] = []  # what torch now points to must outlive this module's functions


def enable_fake_cuda() -> None:
    """Makes fake tensors on `cuda` usable in this process; once, before its first backward."""
    if torch.cuda.is_available():
        return
    if _accelerator() == "cuda":  # a CUDA build that finds no GPU, or done before
        torch._C._ensureCUDADeviceGuardSet()
        return
    _install_guard()
    _replace_hooks()
    if _accelerator() != "cuda":
        raise EnvironmentFaultError(
            f"torch {torch.__version__} could not be made to work on a CUDA device that is not there; "
            "install the pinned torch version"
        )


class FakeDeviceMode(FakeTensorMode):
    """A fake tensor mode that never has torch initialise the device, although it seems to be available."""

    @property
    def avoid_device_init(self) -> bool:
        return True


class PinnedPages:
    """Page-locked host memory that is not there, counted."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.peak_bytes = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """A flat tensor of bytes, which counts until the last tensor on its storage is freed."""
        pages = torch.empty(num_bytes, dtype=torch.uint8)
        self._add(num_bytes)
        weakref.finalize(pages.untyped_storage(), self._add, -num_bytes)
        return pages

    def _add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


@contextmanager
def as_if_available(compute_capability: tuple[int, int], pages: PinnedPages | None = None) -> Iterator[None]:
    """torch.cuda as Python code sees it on a machine with one such GPU, whose driver locks `pages`."""
    stream = _Stream()
    values = {
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda *_: nullcontext(),
        "set_stream": lambda *_: None,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "device_count": lambda: 1,
        "synchronize": lambda *_: None,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_capability": lambda *_: compute_capability,
        "get_device_properties": lambda *_: SimpleNamespace(
            major=compute_capability[0], minor=compute_capability[1], name="simulated", multi_processor_count=132
        ),
    }
    with (
        replaced(torch.cuda, **values),
        replaced(torch.accelerator, current_stream=lambda *_: stream),  # FSDP2's, of a block that nothing waited for
        replaced(torch.Tensor, record_stream=lambda *_: None),
        replaced(activation_offload, _pinned=(pages or PinnedPages()).allocate),
    ):
        yield


def ready_backward_thread() -> None:
    """Makes Python data an index on the device also where blocks run again, under a fake tensor mode.

    The backward of a CUDA tensor runs in a thread of its own, and the mode sets the flag for its own thread only.
    """
    is_lifted_on_host = torch._C._only_lift_cpu_tensors()
    leaf = torch.zeros((), device="cuda", requires_grad=True)
    leaf.register_hook(lambda _: torch._C._set_only_lift_cpu_tensors(is_lifted_on_host))
    leaf.mul(1.0).backward()


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:  # noqa: ANN401  # any module or class, any attribute
    """Attributes of `owner` replaced for the block."""
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class _Event:
    """An event on the only stream: over as soon as it is recorded."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> "_Event":
        return self

    def wait(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream:
    """The only stream: all work on it is done."""

    device_index = 0
    stream_id = 0

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait_stream(self, *_: object) -> None:
        pass

    def wait_event(self, *_: object) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False


def _accelerator() -> str | None:
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def _install_guard() -> None:
    library = ctypes.CDLL(str(_folder() / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _NUM_DEVICE_TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if guards[_CUDA]:
        return
    no_devices = ctypes.CFUNCTYPE(ctypes.c_long)(lambda: 0)
    table = (ctypes.c_void_p * 64)(*[ctypes.cast(no_devices, ctypes.c_void_p).value] * 64)
    dummy = (ctypes.c_void_p * 4)(ctypes.addressof(table), 0, 0, 0)
    _retained.extend([library, no_devices, table, dummy])
    guards[_CUDA] = ctypes.addressof(dummy)
    torch._C._ensureCUDADeviceGuardSet()
    if guards[_CUDA] == ctypes.addressof(dummy):
        guards[_CUDA] = None
        raise EnvironmentFaultError(f"torch {torch.__version__} did not install a guard for a missing CUDA device")


def _replace_hooks() -> None:
    slots = _virtual_functions()
    library = ctypes.CDLL(str(_folder() / "lib" / "libtorch_cpu.so"))
    get_hooks = library._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p
    pointer = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
    table = (ctypes.c_void_p * (_HEADER + len(slots)))()
    word = ctypes.sizeof(ctypes.c_void_p)
    ctypes.memmove(table, pointer[0] - _HEADER * word, len(table) * word)
    for name, function in _replies().items():
        table[_HEADER + slots.index(name)] = ctypes.cast(function, ctypes.c_void_p).value
        _retained.append(function)
    _retained.extend([library, table])
    pointer[0] = ctypes.addressof(table) + _HEADER * word


def _replies() -> dict[str, Any]:
    """Replies of a CUDA build on a machine with one unused GPU."""
    to_long, to_nothing = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p), ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    of_index = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p, ctypes.c_long)
    return {
        "isBuilt": to_long(lambda _: 1),
        "deviceCount": to_long(lambda _: 1),
        "hasPrimaryContext": of_index(lambda _, __: 0),
        "init": to_nothing(lambda _: None),
    }


def _virtual_functions() -> list[str]:
    """Names of the virtual functions of torch's CUDA hooks, in the order of their table."""
    folder = _folder() / "include" / "ATen" / "detail"
    base = (folder / "AcceleratorHooksInterface.h").read_text()
    text = (folder / "CUDAHooksInterface.h").read_text()
    derived = text[text.index("struct TORCH_API CUDAHooksInterface") :]
    declared = re.compile(r"^\s*virtual\s+[^;{]*?([~\w]+)\s*\(", re.MULTILINE)
    inherited = [name for name in declared.findall(base) if not name.startswith("~")]
    return [*_DESTRUCTORS, *inherited, *(name for name in declared.findall(derived) if not name.startswith("~"))]


def _folder() -> Path:
    return Path(torch.__file__).parent
