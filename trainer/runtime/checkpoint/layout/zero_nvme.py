"""What ZeRO-3 keeps on NVMe, brought in through DeepSpeed's own swappers, one piece of memory after the other.

A partition of masters that is a file comes with its state into the pinned buffers that DeepSpeed steps in: nothing is
allocated for it. It is written back only where it was filled, and then the weights follow it, wherever they are.
"""

from typing import Any, NamedTuple

import torch

from trainer.runtime.engines.engine_state import partition_sizes, partitions


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
