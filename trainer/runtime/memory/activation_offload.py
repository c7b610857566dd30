"""What blocks save for the backward pass is moved to host RAM in the forward and brought back block by block.

Copies run beside the compute (`host_transfers`): a block's tensors leave while the next block runs forwards, and come
back while the block behind them runs backwards. At most two blocks are on the device at a time: the one at work and the
one being copied. The last block keeps its own, which the backward needs at once.

Not moved: parameters and views of them (an engine frees and gathers those itself), what several blocks share (masks,
rotary embeddings), views that are larger than their memory, and tensors below `MIN_BYTES`. Where a block is recomputed
it saves its input only, so that is what moves. What selective checkpointing keeps is not saved through autograd: the
two exclude each other.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.runtime.memory.host_transfers import Moved, Transfers, transfers_of
from trainer.runtime.run.blocks import blocks_of
from trainer.spec.errors import InputError
from trainer.spec.strategy import Checkpointing
from trainer.spec.units import format_bytes

MIN_BYTES = 16 * 1024  # below, starting a copy takes longer than the copy


def offload_activations(model: PreTrainedModel) -> None:
    """Keeps what blocks save for the backward pass in host RAM; after `apply_checkpointing`, before compilation."""
    blocks = blocks_of(model)
    if len(blocks) < 2:
        raise InputError(f"pin.activation_offload: {type(model).__name__} has no two blocks to move activations of")
    recomputation = getattr(blocks[0], "shardwise_recomputation", None)
    if recomputation is not None and recomputation.checkpointing is Checkpointing.SELECTIVE:
        raise InputError(
            "pin.activation_offload and pin.checkpointing: selective exclude each other: what it keeps stays on the "
            "device; take full or none"
        )
    if recomputation is not None and not isinstance(blocks[0], GradientCheckpointingLayer):
        raise InputError(
            f"pin.activation_offload and pin.checkpointing exclude each other in {type(model).__name__}, whose blocks "
            "transformers does not recompute; take pin.checkpointing=none"
        )
    offload = ActivationOffload(len(blocks))
    for index, block in enumerate(blocks):
        _wrap_forward(block, partial(offload.run, index, block))
    seam: Any = model
    seam.shardwise_activation_offload = offload


def offload_facts(model: nn.Module) -> dict[str, str]:
    """What was moved in the latest forward, in words."""
    offload = getattr(model, "shardwise_activation_offload", None)
    if offload is None:
        return {}
    return {
        "activation_offload": f"{offload.num_copies} tensors of {offload.num_moved_blocks} blocks, "
        f"{format_bytes(offload.moved_bytes)}, in host RAM"
    }


def _wrap_forward(block: nn.Module, run: Callable[..., Any]) -> None:
    """Puts `run(forward, args, kwargs)` around the block's forward, whichever class an engine makes of the block."""
    seam: Any = block

    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the signature of whatever block it replaces
        return run(partial(type(block).forward, block), args, kwargs)

    seam.forward = forward
    seam.shardwise_offload_run = run


def move_around_compiled(block: nn.Module) -> None:
    """Takes the copies of a block that was just compiled out of what is compiled; nothing where none are made."""
    seam: Any = block
    run, compiled = getattr(block, "shardwise_offload_run", None), seam._compiled_call_impl
    if run is None:
        return
    del seam.forward

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the signature of whatever block it replaces
        return run(compiled, args, kwargs)

    seam._compiled_call_impl = call


class ActivationOffload:
    """The shelves of a model, one for each block and forward."""

    def __init__(self, num_blocks: int) -> None:
        self._last = num_blocks - 1
        self._shelves: dict[int, _Shelf] = {}
        self._transfers: Transfers | None = None

    @property
    def num_copies(self) -> int:
        return sum(shelf.num_copies for shelf in self._shelves.values())

    @property
    def moved_bytes(self) -> int:
        return sum(shelf.moved_bytes for shelf in self._shelves.values())

    @property
    def num_moved_blocks(self) -> int:
        return sum(shelf.num_copies > 0 for shelf in self._shelves.values())

    def run(
        self, index: int, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401  # what the block answers
        """The block's forward, with what it saves on a shelf."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self._transfers is None:
            self._transfers = transfers_of(next(_tensors(args)).device)
        shelf = _Shelf(
            block,
            self._transfers,
            stays=index == self._last,
            shared={_memory_of(tensor) for tensor in _tensors(kwargs)},
            prefetch=partial(self._fetch, index - 1),
        )
        with torch.autograd.graph.saved_tensors_hooks(shelf.put, shelf.take):
            answer = forward(*args, **kwargs)
        self._transfers.close(shelf.close())
        self._shelves[index] = shelf
        return answer

    def _fetch(self, index: int) -> None:
        if index in self._shelves:
            self._shelves[index].fetch()


class _ParameterView(NamedTuple):
    """A saved view of a parameter, made anew when it is asked for: between, its engine may have freed the memory."""

    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return self.parameter.detach().as_strided(self.size, self.stride, self.offset)


class _MovedView(NamedTuple):
    """A saved tensor as it lay in memory."""

    moved: Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


class _Shelf:
    """What one block saved in one forward."""

    def __init__(
        self,
        block: nn.Module,
        transfers: Transfers,
        *,
        stays: bool,
        shared: set[int],
        prefetch: Callable[[], None],
    ) -> None:
        self._block = block
        self._transfers = transfers
        self._stays = stays
        self._shared = shared
        self._prefetch: Callable[[], None] | None = prefetch
        self._moved: dict[tuple[object, ...], Moved] = {}
        self._sources: list[Tensor] = []
        self.num_copies = 0
        self.moved_bytes = 0

    def put(self, tensor: Tensor) -> object:
        """What autograd holds instead of a saved tensor."""
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
            self._sources.append(flat)  # until it is copied, nothing else may take its place
            self.num_copies += 1
            self.moved_bytes += num_bytes
        return _MovedView(self._moved[key], tensor.dtype, tensor.shape, dense.stride())

    def take(self, held: object) -> Tensor:
        """The saved tensor, on the device; starts bringing back those of the block before."""
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
        """Ends the forward; the tensors that may go as soon as they are copied."""
        sources, self._sources = self._sources, []
        return sources

    def fetch(self) -> None:
        """Starts bringing back everything, once; from here on autograd alone holds it."""
        moved, self._moved = list(self._moved.values()), {}
        if moved:
            self._transfers.to_device(moved)

    def _parameter_in(self, memory: int) -> nn.Parameter | None:
        """The parameter of the block that lies in this memory; under ZeRO-3 it lies elsewhere at every forward."""
        for parameter in self._block.parameters():
            # A shard is in no forward: FSDP2 has put the gathered parameter in its place.
            if not hasattr(parameter, "to_local") and _memory_of(parameter) == memory:
                return parameter
        return None


def _memory_of(tensor: Tensor) -> int:
    """What tensors that share memory have in common, also where the memory has no address, as in a dry run."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors in arguments, whatever they are nested in."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
