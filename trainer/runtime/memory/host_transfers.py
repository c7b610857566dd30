"""Tensors in host RAM: how they leave a device and come back to it, beside the compute.

Copies run on a stream of their own. Host buffers are pinned and used again from step to step (`PinnedBuffers`): what is
pinned is what was moved at most. Where the device is the host the copies are made all the same, so that a test sees
them, and nothing is gained.
"""

import mmap
from bisect import bisect_left, insort
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor


class Moved:
    """A tensor in host RAM, and on the device again once it was fetched; autograd holds it as long as it needs it."""

    def __init__(self, host: Tensor, give_back: Callable[[], None]) -> None:
        self.host = host
        self.device: Tensor | None = None
        self.arrival: torch.cuda.Event | None = None  # when `device` holds it, where that takes time
        self._give_back = give_back

    def __del__(self) -> None:
        self._give_back()


class Transfers(Protocol):
    """How tensors leave a device and come back."""

    def to_host(self, tensor: Tensor) -> Moved:
        """Starts a copy of a flat tensor to host RAM."""

    def close(self, sources: list[Tensor]) -> None:
        """Lets the sources of the block before go once they are copied, and keeps those of this one."""

    def to_device(self, moved: list[Moved]) -> None:
        """Starts copies back."""

    def arrived(self, moved: Moved) -> Tensor:
        """The tensor on the device, for what runs next."""


def transfers_of(device: torch.device) -> Transfers:
    """Those of the device that computes."""
    return _CudaTransfers(device) if device.type == "cuda" else _PlainTransfers()


class _PlainTransfers:
    """Where the device is the host: a copy leaves, and is used where it is."""

    def to_host(self, tensor: Tensor) -> Moved:
        return Moved(torch.empty_like(tensor).copy_(tensor), _nothing)

    def close(self, sources: list[Tensor]) -> None:
        sources.clear()

    def to_device(self, moved: list[Moved]) -> None:
        for each in moved:
            each.device = each.host

    def arrived(self, moved: Moved) -> Tensor:
        assert moved.device is not None, "a shelf is fetched as a whole"
        return moved.device


def _nothing() -> None:
    """No buffer is given back."""


class _CudaTransfers:
    """Copies on one stream for both directions: a buffer that is given back is only filled when it has been read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers = PinnedBuffers(self._stream.synchronize)
        self._leaving: list[Tensor] = []
        self._left: torch.cuda.Event | None = None  # the copies of `_leaving`

    def to_host(self, tensor: Tensor) -> Moved:
        buffer = self._buffers.take(tensor.numel() * tensor.element_size())
        host = buffer.view(tensor.dtype)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        return Moved(host, partial(self._buffers.give_back, buffer))

    def close(self, sources: list[Tensor]) -> None:
        if self._left is not None:
            torch.cuda.current_stream(self._device).wait_event(self._left)
        self._leaving, self._left = sources, self._stream.record_event() if sources else None

    def to_device(self, moved: list[Moved]) -> None:
        # The memory belongs to the stream that computes, whose earlier work may still use what was there before.
        for each in moved:
            each.device = torch.empty_like(each.host, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for each in moved:
                assert each.device is not None
                each.device.copy_(each.host, non_blocking=True)
                each.device.record_stream(self._stream)
        arrival = self._stream.record_event()
        for each in moved:
            each.arrival = arrival

    def arrived(self, moved: Moved) -> Tensor:
        assert moved.device is not None and moved.arrival is not None, "a shelf is fetched as a whole"
        torch.cuda.current_stream(self._device).wait_event(moved.arrival)
        return moved.device


class PinnedBuffers:
    """Page-locked host memory in whole pages, taken again where it was given back.

    A tensor takes the smallest buffer that holds it. Where none does, the largest that is free goes and one that is
    large enough comes: rows that grow longer leave no short buffers behind, and what is pinned is bounded by the
    longest. torch's own pinned memory comes in powers of two, up to twice what the plan counted.
    """

    def __init__(self, finish_copies: Callable[[], None]) -> None:
        self.pinned_bytes = 0
        self._finish_copies = finish_copies  # before memory goes that a copy may still read
        self._free: list[Tensor] = []  # ascending

    def take(self, num_bytes: int) -> Tensor:
        """A flat tensor of bytes, as many as were asked for."""
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        index = bisect_left(self._free, size, key=Tensor.numel)
        if index < len(self._free):
            return self._free.pop(index)[:num_bytes]
        if self._free:
            self._finish_copies()
            self.pinned_bytes -= self._free.pop().numel()
        self.pinned_bytes += size
        return _pinned(size)[:num_bytes]

    def give_back(self, buffer: Tensor) -> None:
        """The buffer may be filled anew by the next copy of the same stream."""
        size = buffer.untyped_storage().nbytes()
        insort(self._free, buffer.as_strided((size,), (1,)), key=Tensor.numel)


class _PinnedPages(mmap.mmap):
    """Whole pages that nothing else lies in; what locked them is undone before they go."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def _pinned(num_bytes: int) -> Tensor:
    """So many bytes of page-locked memory, for as long as the tensor or a view of it is there."""
    pages = _PinnedPages(-1, num_bytes)
    tensor, runtime = torch.frombuffer(pages, dtype=torch.uint8), torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(tensor.data_ptr(), num_bytes, 0)))
    pages.unlock = partial(runtime.cudaHostUnregister, tensor.data_ptr())  # the address may be another's later
    return tensor
