"""ZeRO-1, -2 and -3 of DeepSpeed 0.19.8: fp32 masters and state in flat partitions, of which a parameter has fragments.

    ZeRO-1, -2   one partition for each parameter group; a parameter's `_hp_mapping` describes which of its elements lie
                 where in it, or is None on a rank that holds none of them
    ZeRO-3       one partition for each sub-group; each parameter has equal pieces on all ranks, the last padded, which
                 lie one after the other in the partition. Under NVMe offload large ones are files

The optimizer was given the partitions in place of the parameters, so its state and its step count are theirs. Accessors
that DeepSpeed has for this are not used: they fail on a second parameter group (ZeRO-1, -2) and if elements do not
divide (ZeRO-3), and what is set through them never reaches the weights that the model computes with. Frozen parameters,
which no partition holds, are what the model has: copies in the computing type. Pure bf16 has bf16 masters.

What ZeRO-3 keeps on NVMe is brought in through DeepSpeed's own swappers, one partition after the other. Masters that
are a file come with their state into the pinned buffers that DeepSpeed steps in: nothing is allocated. They are
written back only if they were filled, and then the weights follow them, wherever they are.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer as TorchOptimizer

from shardwise.trainer.runtime.checkpoint.manifest import Blocks, Manifest, ParameterEntry, TensorEntry
from shardwise.trainer.runtime.checkpoint.optimizer_state import (
    Group,
    StateTensor,
    count_up,
    named_groups,
    state_tensors,
    step_count,
)
from shardwise.trainer.runtime.checkpoint.optimizer_state import create_state as create_partition_state
from shardwise.trainer.runtime.checkpoint.pieces import Piece, flat, named_state, type_of
from shardwise.trainer.runtime.engines.zero import partition_sizes, partition_type, partitions, updated_groups
from shardwise.trainer.spec.errors import InputError


class SwappedPartition:
    """One partition that is a file, of an engine that has several; only one of them is brought in at a time."""

    def __init__(self, engine: Any, index: int, brought: "list[SwappedPartition]") -> None:  # noqa: ANN401  # DeepSpeedEngine, untyped
        self._zero, self._index, self._brought = engine.optimizer, index, brought
        self._is_filled = False
        self.dtype: torch.dtype = self._zero.optimizer_swapper.dtype

    def bring(self, *, to_fill: bool) -> torch.Tensor:
        """The masters; their state is where the optimizer keeps it."""
        if self not in self._brought:
            self.put_away()
            self._zero._optimizer_states_and_gradient_swap_in(self._index)
            self._brought.append(self)
        self._is_filled |= to_fill
        return self.values

    def put_away(self) -> None:
        """Gives back what is brought in, of this partition or of another."""
        for other in self._brought:
            other._release()
        self._brought.clear()

    def stretch(self, key: str | None, offset: int) -> "SwappedStretch":
        """The elements from `offset` on, of the masters or of a state."""
        return SwappedStretch(self, key, offset)

    def state(self, key: str | None) -> torch.Tensor:
        """The masters or a state, while they are brought in."""
        found = self.values if key is None else self._zero.optimizer.state[self.values][key]
        assert isinstance(found, torch.Tensor)
        return found.detach()

    @property
    def values(self) -> torch.Tensor:
        """The tensor of the masters, empty unless they are brought in."""
        values = self._zero.fp32_partitioned_groups_flat[self._index]
        assert isinstance(values, torch.Tensor)
        return values

    def _release(self) -> None:
        swapper = self._zero.optimizer_swapper
        if self._is_filled:
            self._zero._reassign_or_swap_out_partitioned_parameters(self._index)
            swapper.swap_out_optimizer_state(parameter=self.values, async_swap=False)
        else:
            swapper.release_swap_buffers(parameter=self.values)
        self.values.grad = None  # as DeepSpeed does: it lies in a buffer that was given back
        self._is_filled = False


class SwappedStretch(NamedTuple):
    """Part of a partition that is a file."""

    partition: SwappedPartition
    key: str | None
    offset: int

    def bring(self, num_elements: int, *, to_fill: bool) -> torch.Tensor:
        """The elements in DeepSpeed's buffers, until another partition is brought."""
        self.partition.bring(to_fill=to_fill)
        return self.partition.state(self.key)[self.offset : self.offset + num_elements]

    def put_away(self) -> None:
        """Gives back what is brought in."""
        self.partition.put_away()


class _FrozenFile(NamedTuple):
    """A rank's piece of a frozen weight, which is a file; nothing fills it."""

    parameter: Any

    def bring(self, num_elements: int, *, to_fill: bool) -> torch.Tensor:
        """A copy of it."""
        assert not to_fill, "frozen weights on NVMe are filled as they are loaded"
        whole = torch.empty(self.parameter.partition_numel(), dtype=self.parameter.dtype)
        self.parameter.nvme_swapper.swap_into_buffer(self.parameter, whole)
        return whole[:num_elements]

    def put_away(self) -> None:
        """The copy is the caller's."""


def swapped_partitions(engine: Any) -> dict[int, SwappedPartition]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """The partitions of this rank that are files, by their position."""
    brought: list[SwappedPartition] = []
    return {
        index: SwappedPartition(engine, index, brought)
        for index, (values, size) in enumerate(zip(partitions(engine), partition_sizes(engine), strict=True))
        if values.numel() < size
    }


def partition_of_frozen(parameter: Any, num_elements: int) -> tuple[torch.Tensor, _FrozenFile | None]:  # noqa: ANN401  # cut by ZeRO-3
    """This rank's piece of a frozen parameter, in memory, or described on `meta` and where it is fetched from."""
    if parameter.ds_tensor.status.name == "AVAILABLE":
        return parameter.ds_tensor.detach().view(-1)[:num_elements], None
    return torch.empty(num_elements, dtype=parameter.dtype, device="meta"), _FrozenFile(parameter)


class _Fragment(NamedTuple):
    """Elements [start, start + num_elements) of a parameter, at `offset` of the partition."""

    start: int
    num_elements: int
    offset: int


class _Partition(NamedTuple):
    """A partition of this rank and the parameters that share it, whether or not this rank has elements of each."""

    values: torch.Tensor  # empty while it is on NVMe
    group_name: str
    group: Group
    parameters: Sequence[Any]  # DeepSpeed adds attributes to them
    fragments: Sequence[_Fragment | None]
    swapped: SwappedPartition | None


def describe(model: nn.Module, optimizer: TorchOptimizer) -> dict[str, ParameterEntry]:
    """Every parameter and persistent buffer with its group, steps and state, without chunks."""
    owners = {
        id(parameter): partition for partition in _partitions(model, optimizer) for parameter in partition.parameters
    }
    master_type = type_of(torch.empty(0, dtype=partition_type(model)))
    entries = {}
    for name, item in named_state(model).items():
        partition, shape = owners.get(id(item.tensor)), tuple(getattr(item.tensor, "ds_shape", item.tensor.shape))
        if item.tied_to is not None:
            entry = ParameterEntry(tied_to=item.tied_to, is_trained=partition is not None, is_buffer=item.is_buffer)
        elif partition is None:
            weight = TensorEntry(shape=shape, type=type_of(item.tensor), chunks=())
            entry = ParameterEntry(weight=weight, is_trained=False, is_buffer=item.is_buffer)
        else:
            states = state_tensors(optimizer, partition.values)
            entry = ParameterEntry(
                weight=TensorEntry(shape=shape, type=master_type, chunks=()),
                group=partition.group_name,
                step=step_count(optimizer, partition.values),
                state={
                    key: TensorEntry(shape=shape, type=type_of(stored.values), chunks=(), block=stored.block)
                    for key, stored in states.items()
                },
            )
        entries[name] = entry
    return entries


def held_pieces(model: nn.Module, optimizer: TorchOptimizer) -> list[Piece]:
    """This rank's fragments of masters and states, partition by partition, and what no partition holds."""
    state = named_state(model)
    names = {id(item.tensor): name for name, item in state.items() if item.tied_to is None}
    pieces, in_partitions = [], set[int]()
    for partition in _partitions(model, optimizer):
        states = state_tensors(optimizer, partition.values)
        stored: list[tuple[str | None, StateTensor]] = [(None, StateTensor(partition.values)), *states.items()]
        for parameter, fragment in zip(partition.parameters, partition.fragments, strict=True):
            in_partitions.add(id(parameter))
            if fragment is not None:
                name = names[id(parameter)]
                pieces += [_piece(name, key, stored, fragment, partition) for key, stored in stored]
    others = [(name, item) for name, item in state.items() if item.tied_to is None]
    pieces += [_frozen(model, name, item.tensor) for name, item in others if id(item.tensor) not in in_partitions]
    return [piece for piece in pieces if piece.num_elements]


def create_state(model: nn.Module, optimizer: TorchOptimizer, manifest: Manifest) -> None:
    """Makes the state of every partition; InputError where its parameters were not all updated equally often."""
    names = {id(item.tensor): name for name, item in named_state(model).items() if item.tied_to is None}
    count_up(optimizer, max((entry.step or 0 for entry in manifest.parameters.values()), default=0))
    for partition in _partitions(model, optimizer):
        entries = {names[id(each)]: manifest.entry(names[id(each)]) for each in partition.parameters}
        with_state = {name: entry for name, entry in entries.items() if entry.state}
        steps = {entry.step for entry in with_state.values()}
        if len(steps) > 1:
            (first, one), (second, other) = _two_that_differ(with_state)
            raise InputError(
                f"{first} was updated {one} times and {second} {other} times; ZeRO keeps one count for both, "
                "so resume this checkpoint under ddp or fsdp"
            )
        for name, entry in list(with_state.items())[:1]:
            if partition.swapped is not None:
                partition.swapped.bring(to_fill=True)
            create_partition_state(optimizer, partition.group, partition.values, entry, name=name)
            if len(with_state) < len(entries):  # stretches that nothing is going to fill
                for stored in state_tensors(optimizer, partition.values).values():
                    stored.values.zero_()
            if partition.swapped is not None:
                partition.swapped.put_away()


def settle(model: Any) -> None:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """Refreshes what the model computes with from the masters; those on NVMe have been as they were put away."""
    zero = model.optimizer
    if not _is_zero3(model):
        zero.update_lp_params()
        return
    zero.checkpoint_event_prologue()  # no weight is gathered after it
    for index, values in enumerate(partitions(model)):
        if values.numel():
            zero._reassign_or_swap_out_partitioned_parameters(index)
    zero.checkpoint_event_epilogue()  # gathers the small weights that ZeRO-3 keeps whole


def _is_zero3(model: Any) -> bool:  # noqa: ANN401  # DeepSpeedEngine, untyped
    return hasattr(model.optimizer, "fp32_partitioned_groups_flat")


def _partitions(model: Any, optimizer: TorchOptimizer) -> list[_Partition]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    groups = named_groups(optimizer)
    swapped = swapped_partitions(model) if _is_zero3(model) else {}
    return [
        _Partition(values, name, groups[name], parameters, _fragments(model, parameters), swapped.get(index))
        for index, (values, (name, parameters)) in enumerate(zip(partitions(model), updated_groups(model), strict=True))
    ]


def _fragments(model: Any, parameters: Sequence[Any]) -> list[_Fragment | None]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """This rank's fragments of the parameters of a partition."""
    if _is_zero3(model):
        sizes = [each.partition_numel() for each in parameters]
        offsets = list(accumulate(sizes, initial=0))[:-1]
        return [_cut_of_zero3(model, each, offset) for each, offset in zip(parameters, offsets, strict=True)]
    mappings = [each._hp_mapping for each in parameters]
    return [
        None if here is None else
        _Fragment(here.lp_fragment_address.start, here.lp_fragment_address.numel, here.hp_fragment_address.start)
        for here in mappings
    ]  # fmt: skip


def _cut_of_zero3(model: Any, parameter: Any, offset: int = 0) -> _Fragment | None:  # noqa: ANN401  # both untyped
    """This rank's piece; equal on all ranks, so that those of the last are less than a piece, or nothing."""
    size = parameter.partition_numel()
    start = size * model.optimizer._get_param_partition_rank(parameter)
    num_elements = min(size, parameter.ds_numel - start)
    return _Fragment(start, num_elements, offset) if num_elements > 0 else None


def _piece(name: str, key: str | None, stored: StateTensor, fragment: _Fragment, partition: _Partition) -> Piece:
    start, size, offset = fragment
    if stored.block > 1:  # counted from the start of the partition, so that a fragment may begin and end inside of one
        before = Blocks(num_elements=offset + size, first_elements=stored.block, block=stored.block)
        first, last = before.value_of(offset), before.value_of(offset + size - 1)
        cut = Blocks(size, first_elements=min(stored.block - offset % stored.block, size), block=stored.block)
        return Piece(name, key, start, stored.values[first : last + 1], blocks=cut)
    if partition.swapped is None:
        values = stored.values.detach()[offset : offset + size]
        return Piece(name, key, start, values, coded=stored.coded, offset=offset)
    described = torch.empty(size, dtype=partition.swapped.dtype, device="meta")
    return Piece(name, key, start, described, elsewhere=partition.swapped.stretch(key, offset))


def _frozen(model: nn.Module, name: str, parameter: Any) -> Piece:  # noqa: ANN401  # perhaps cut by ZeRO-3
    """A piece outside the partitions: a buffer or a frozen parameter, whole, or under ZeRO-3 this rank's part."""
    if not hasattr(parameter, "ds_tensor"):
        return Piece(name, None, 0, flat(parameter, name=name), is_shared=True, may_round=True)
    start, size, _ = _cut_of_zero3(model, parameter) or _Fragment(0, 0, 0)
    values, elsewhere = partition_of_frozen(parameter, size)
    return Piece(name, None, start, values, may_round=True, elsewhere=elsewhere)


def _two_that_differ(entries: dict[str, ParameterEntry]) -> tuple[tuple[str, int | None], tuple[str, int | None]]:
    (first, one), *others = ((name, entry.step) for name, entry in entries.items())
    return (first, one), next((name, step) for name, step in others if step != one)
