"""Activation offload: tensors saved for the backward pass are in host RAM and brought back block by block.

Copies run on a stream of their own, parallel to the compute: the tensors of a block are copied to the host while the
next block runs forward, and copied back while the block behind it runs backward. At most two blocks are on the device
at a time: the one that computes and the one that is being copied. The last block keeps its tensors, which the backward
pass needs at once.

Not moved are: parameters and views of them (an engine frees and gathers those itself), what several blocks share
(masks, rotary embeddings), views that are larger than their memory, and tensors below `MIN_BYTES`. A block that is
recomputed saves its input only, so only that moves. What selective checkpointing keeps is not saved through autograd:
the two exclude each other.

Host buffers are pinned and reused from step to step (`PinnedBuffers`), so the pinned memory is the most that was moved
at a time. If the device is the host, the copies are made all the same, which makes them testable.
"""

import mmap
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from shardwise.trainer.runtime.memory.recomputation import blocks_of
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.strategy import Checkpointing
from shardwise.trainer.spec.units import format_bytes

MIN_BYTES = 16 * 1024  # below, starting a copy takes longer than the copy


def offload_activations(
    model: PreTrainedModel, checkpointing: Checkpointing = Checkpointing.NONE
) -> "ActivationOffload":
    """Keeps what blocks save for the backward pass in host RAM; after `apply_checkpointing`, before compilation."""
    blocks = blocks_of(model)
    if len(blocks) < 2:
        raise InputError(f"pin.activation_offload: {type(model).__name__} has no two blocks to move activations of")
    if checkpointing is Checkpointing.SELECTIVE:
        raise InputError(
            "pin.activation_offload and pin.checkpointing: selective exclude each other: what it keeps stays on the "
            "device; use full or none"
        )
    if checkpointing is not Checkpointing.NONE and not isinstance(blocks[0], GradientCheckpointingLayer):
        raise InputError(
            f"pin.activation_offload and pin.checkpointing exclude each other in {type(model).__name__}, whose blocks "
            "transformers does not recompute; set pin.checkpointing=none"
        )
    offload = ActivationOffload(blocks)
    for index, block in enumerate(blocks):
        offload.wrap(index, block)
    return offload


class ActivationOffload:
    """The activation offload of a model: one shelf for each block and forward."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._shelves: dict[int, _Shelf] = {}
        self._slots: dict[int, list[_Slot]] = {}  # of each block that has run
        self._transfers: Transfers | None = None
        self._recomputations: dict[int, Callable[..., Any]] = {}  # of blocks that are recomputed, by their number

    def wrap(self, index: int, block: nn.Module) -> None:
        """Runs a block through `run`, also if an engine changes its class.

        Around a recomputation, where that begins: transformers 5.23 calls it around the forward, 5.17 around the call.
        """
        replaceable: Any = block
        if getattr(block, "gradient_checkpointing", False):
            self._recomputations[index] = replaceable._gradient_checkpointing_func
            replaceable._gradient_checkpointing_func = self._call_around(index, self._recomputations[index])
            return

        def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the signature of the block
            return self.run(index, partial(type(block).forward, block), args, kwargs)

        replaceable.forward = forward

    @property
    def num_copies(self) -> int:
        return sum(shelf.num_copies for shelf in self._shelves.values())

    @property
    def moved_bytes(self) -> int:
        return sum(shelf.moved_bytes for shelf in self._shelves.values())

    @property
    def num_moved_blocks(self) -> int:
        return sum(shelf.num_copies > 0 for shelf in self._shelves.values())

    def facts(self) -> dict[str, str]:
        """Text of what was moved in the latest forward."""
        return {
            "activation_offload": f"{self.num_copies} tensors of {self.num_moved_blocks} blocks, "
            f"{format_bytes(self.moved_bytes)}, in host RAM"
        }

    def exclude_from_compilation(self) -> None:
        """Moves the copies of blocks that were just compiled out of the compiled code."""
        for index, block in enumerate(self._blocks):
            replaceable: Any = block
            if index in self._recomputations:
                replaceable._gradient_checkpointing_func = self._recomputations[index]
            else:
                del replaceable.forward
            replaceable._compiled_call_impl = self._call_around(index, replaceable._compiled_call_impl)

    def _call_around(self, index: int, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the signature of the block
            return self.run(index, compiled, args, kwargs)

        return call

    def run(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401  # the result of the block
        """Runs the block's forward; what it saves is put on a shelf."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self._transfers is None:
            device = next(_tensors(args)).device
            self._transfers = _CudaTransfers(device) if device.type == "cuda" else _PlainTransfers()
        if index not in self._slots:
            self._slots[index] = [
                (module, name)
                for module in self._blocks[index].modules()
                for name, parameter in module._parameters.items()
                if parameter is not None
            ]
        shelf = _Shelf(
            self._slots[index],
            self._transfers,
            stays=index == len(self._blocks) - 1,
            shared={_memory_of(tensor) for tensor in _tensors(kwargs)},
            prefetch=partial(self._fetch, index - 1),
        )
        with torch.autograd.graph.saved_tensors_hooks(shelf.put, shelf.take):
            result = forward(*args, **kwargs)
        self._transfers.close(shelf.close())
        self._shelves[index] = shelf
        return result

    def _fetch(self, index: int) -> None:
        if index in self._shelves:
            self._shelves[index].fetch()


_Slot = tuple[nn.Module, str]  # where a parameter stands: FSDP2 puts another one there for a forward


class _ParameterView(NamedTuple):
    """A saved view of a parameter. It is made again when it is needed: its engine may have freed the memory."""

    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return self.parameter.detach().as_strided(self.size, self.stride, self.offset)


class _MovedView(NamedTuple):
    """A saved tensor in host RAM, with its layout."""

    moved: "Moved"
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


class _Shelf:
    """The tensors that one block saved in one forward."""

    def __init__(
        self,
        slots: "Sequence[_Slot]",
        transfers: "Transfers",
        *,
        stays: bool,
        shared: set[int],
        prefetch: Callable[[], None],
    ) -> None:
        self._slots = slots
        self._transfers = transfers
        self._stays = stays
        self._shared = shared
        self._prefetch: Callable[[], None] | None = prefetch
        self._moved: dict[tuple[object, ...], Moved] = {}
        self._sources: list[Tensor] = []
        self.num_copies = 0
        self.moved_bytes = 0

    def put(self, tensor: Tensor) -> object:
        """The object that autograd holds in place of a saved tensor."""
        memory = _memory_of(tensor)
        parameter = self._parameter_in(memory)
        if parameter is not None:
            return _ParameterView(parameter, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        num_bytes = tensor.numel() * tensor.element_size()
        is_expanded = num_bytes > tensor.untyped_storage().nbytes()
        if self._stays or num_bytes < MIN_BYTES or is_expanded or memory in self._shared:
            return tensor
        strides = torch.empty_like(tensor, device="meta").stride()  # its own, unless it has gaps
        dense = tensor if strides == tensor.stride() else tensor.contiguous()
        place = (_memory_of(dense), dense.storage_offset() * dense.element_size())
        key = (*place, num_bytes, tensor._version)  # several operations save one tensor in several shapes
        if key not in self._moved:
            flat = dense.as_strided((dense.numel(),), (1,))
            self._moved[key] = self._transfers.to_host(flat)
            self._sources.append(flat)  # its memory must not be reused before it is copied
            self.num_copies += 1
            self.moved_bytes += num_bytes
        return _MovedView(self._moved[key], tensor.dtype, tensor.shape, dense.stride())

    def take(self, held: object) -> Tensor:
        """The saved tensor, on the device; starts the copies back of the block before."""
        if self._prefetch is not None:
            self.fetch()
            prefetch, self._prefetch = self._prefetch, None
            prefetch()
        if isinstance(held, _ParameterView):
            return held.tensor()
        if isinstance(held, _MovedView):
            return self._transfers.arrived(held.moved).view(held.dtype).as_strided(held.size, held.stride)
        assert isinstance(held, Tensor)
        return held

    def close(self) -> list[Tensor]:
        """Ends the forward and returns the tensors that may be freed as soon as they are copied."""
        sources, self._sources = self._sources, []
        return sources

    def fetch(self) -> None:
        """Starts the copies back, once; from here on autograd alone holds the tensors."""
        moved, self._moved = list(self._moved.values()), {}
        if moved:
            self._transfers.to_device(moved)

    def _parameter_in(self, memory: int) -> nn.Parameter | None:
        """The parameter of the block that owns this memory; under ZeRO-3 the memory changes with every forward."""
        for module, name in self._slots:
            parameter = module._parameters[name]
            # A shard is in no forward: FSDP2 has put the gathered parameter in its place.
            if parameter is not None and not hasattr(parameter, "to_local") and _memory_of(parameter) == memory:
                return parameter
        return None


def _memory_of(tensor: Tensor) -> int:
    """Identity of a tensor's memory, also of memory without an address (dry run)."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors in nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


class Moved:
    """A tensor in host RAM, and on the device again once it was fetched; autograd holds it as long as needed."""

    def __init__(self, host: Tensor, give_back: Callable[[], None]) -> None:
        self.host = host
        self.device: Tensor | None = None
        self.arrival: torch.cuda.Event | None = None  # of the copy back, if it is asynchronous
        self._give_back = give_back

    def __del__(self) -> None:
        self._give_back()


class Transfers(Protocol):
    """Copies of tensors between a device and host RAM."""

    def to_host(self, tensor: Tensor) -> Moved:
        """Starts a copy of a flat tensor to host RAM."""

    def close(self, sources: list[Tensor]) -> None:
        """Frees the sources of the block before once they are copied, and keeps those of this one."""

    def to_device(self, moved: list[Moved]) -> None:
        """Starts copies back."""

    def arrived(self, moved: Moved) -> Tensor:
        """The tensor on the device, ready for the operations that follow."""


class _PlainTransfers:
    """Transfers if the device is the host: a copy is made, and used where it is."""

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
    """There is no buffer to give back."""


class _CudaTransfers:
    """Copies on one stream for both directions, so that a returned buffer is filled only after it was read."""

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
        # The memory belongs to the compute stream, whose earlier work may still use its previous content.
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
    """Page-locked host memory in whole pages, reused.

    A tensor uses the smallest free buffer that holds it. If there is none, the largest free buffer is replaced by one
    that is large enough: short buffers do not stay when rows become longer, and the pinned memory is bounded by the
    longest. torch's own pinned memory comes in powers of two, up to twice what the plan counts.
    """

    def __init__(self, finish_copies: Callable[[], None]) -> None:
        self.pinned_bytes = 0
        self._finish_copies = finish_copies  # before memory is freed that a copy may still read
        self._free: list[Tensor] = []  # ascending

    def take(self, num_bytes: int) -> Tensor:
        """A flat uint8 tensor of `num_bytes`."""
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
        """Makes the buffer available to the next copy of the same stream."""
        size = buffer.untyped_storage().nbytes()
        insort(self._free, buffer.as_strided((size,), (1,)), key=Tensor.numel)


class _PinnedPages(mmap.mmap):
    """Whole pages of their own, unlocked before they are unmapped."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def _pinned(num_bytes: int) -> Tensor:
    """Page-locked memory, as long as the tensor or a view of it exists."""
    pages = _PinnedPages(-1, num_bytes)
    tensor, runtime = torch.frombuffer(pages, dtype=torch.uint8), torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(tensor.data_ptr(), num_bytes, 0)))
    pages.unlock = partial(runtime.cudaHostUnregister, tensor.data_ptr())  # the address may be reused later
    return tensor
