"""One sharding engine in the runtime: how it is built, filled, stepped, verified, and read.

`Engine` is the interface; its defaults are those of an engine whose ranks hold every tensor whole. Each sharding engine
has a module of its own, and the table of all is `shardwise.trainer.runtime.engines.ENGINES`. The parts that decide
before anything runs are the row of facts in `trainer/spec/engines.py`; the view of its state for checkpoints is its row
in `trainer/runtime/checkpoint/engines.py`.
"""

# ruff: noqa: B027  # a default may do nothing

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer as TorchOptimizer

from shardwise.trainer.runtime.engines import cpu_ranks
from shardwise.trainer.runtime.models.build import plain_model
from shardwise.trainer.runtime.models.meta_model import MetaModel
from shardwise.trainer.runtime.precision.mixed_precision import AmpScaler, LossScaler
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.strategy import Precision
from shardwise.trainer.spec.units import format_bytes

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # a rank may load or save for long while the others wait
NCCL = "nccl"

Row = tuple[str, object, object]  # what, planned, found
_ACCELERATE_TYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class EngineChoice(NamedTuple):
    """The settings that decide which engine Accelerate wraps a model in, from a plan or from a dry run."""

    sharding: Sharding
    precision: Precision
    num_ranks: int
    accumulation: int
    device_kind: DeviceKind
    block_class: str  # what FSDP2 wraps
    offload: Offload = Offload.NONE
    hybrid_mesh: tuple[int, int] | None = None  # (copies, ranks that share one) of HSDP
    reduces_every_micro_batch: bool = False  # of FSDP2
    reduces_in_bf16: bool = False  # the same


class Engine(ABC):
    """An engine; `model` is the one that it has prepared."""

    updates_in_last_backward = False  # it clips, decides and steps there, and detects the last backward itself
    drops_empty_groups = False  # the optimizer inside lacks the parameter groups without parameters

    @abstractmethod
    def accelerator(self, choice: EngineChoice, ds_config: Mapping[str, Any] | None) -> Accelerator:
        """Accelerate's object that will wrap a model in this engine, in the process group of this rank."""

    @abstractmethod
    def runs(self, model: nn.Module) -> bool:
        """True if the model is wrapped by this engine, by the classes of the objects themselves."""

    @abstractmethod
    def sharding_of(self, model: nn.Module) -> Sharding:
        """The sharding that is active."""

    # Building

    def read_config(self, attempt_dir: Path) -> dict[str, Any] | None:
        """The filled configuration file next to plan.json; None for an engine without one."""
        return None

    def load_shards(self, meta_model: MetaModel, accelerator: Accelerator) -> None:
        """Cuts and fills the model before the optimizer is built on its parameters; collective."""

    def cut_loaded(self, meta_model: MetaModel, accelerator: Accelerator, precision: Precision) -> None:
        """Fills and cuts the model once the optimizer has grouped its parameters; collective."""

    def prepare(self, accelerator: Accelerator, model: nn.Module, optimizer: TorchOptimizer) -> tuple[nn.Module, Any]:
        """Accelerate's `prepare`: the wrapped model and optimizer."""
        wrapped, wrapped_optimizer = accelerator.prepare(model, optimizer)
        return wrapped, wrapped_optimizer

    def prefetch_two_blocks(self, model: nn.Module) -> None:
        """Gathers the weights of two blocks ahead of the one at work, where an engine gathers one."""

    def loss_scaler(self, model: nn.Module, precision: Precision, kind: DeviceKind) -> LossScaler | None:
        """The scaler of an fp16 run, after `prepare`; None where nothing is scaled."""
        return AmpScaler(str(kind)) if precision is Precision.FP16_MIXED else None

    # A step

    def without_sync(self, accelerator: Accelerator, model: nn.Module) -> AbstractContextManager[Any]:
        """Around the micro batches before the last one: their gradients are not reduced yet."""
        if self.reduces_every_micro_batch(accelerator):
            return nullcontext()
        context: AbstractContextManager[Any] = accelerator.no_sync(model)
        return context

    def reduces_in_bf16(self, model: nn.Module) -> bool:
        """True if ranks add gradients up in bf16 that are fp32 as the optimizer sees them."""
        return False

    def reduces_every_micro_batch(self, accelerator: Accelerator) -> bool:
        """Accelerate's own setting for it, which its `accumulate` obeys as well."""
        return bool(accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False))

    def deciding_update(self, model: nn.Module, accepts: Callable[[Tensor], bool]) -> AbstractContextManager[None]:
        """Around the last backward of a step: an engine that updates in it calls `accepts` with the gradient norm."""
        return nullcontext()

    def release_gathered(self, model: nn.Module) -> None:
        """Frees the whole weights that a forward gathered for a backward, where none follows."""

    def backward_leaf(self, model: nn.Module, parameter: nn.Parameter) -> Tensor | None:
        """The tensor that backward gives this rank's own gradient of a whole parameter, before the ranks share it.

        None as long as there is none, before the first forward.
        """
        return parameter

    # Verification

    def offload_of(self, model: nn.Module) -> Offload:
        """The offload that is active."""
        return Offload.NONE

    def types(
        self, accelerator: Accelerator, model: nn.Module, autocast: torch.dtype | None
    ) -> tuple[torch.dtype, torch.dtype]:
        """(computing type, type of the master weights), from the engine's own switches."""
        weights = trained_type(model)
        compute = _ACCELERATE_TYPES[accelerator.mixed_precision] if accelerator.native_amp else weights
        return autocast or compute, weights

    def accumulation(self, accelerator: Accelerator, model: nn.Module) -> int:
        """Micro batches of a step."""
        return int(accelerator.gradient_accumulation_steps)

    def owned(self, model: nn.Module) -> tuple[int, int | None]:
        """(parameters of which this rank holds a part, elements it owns); (0, None) where nothing is sharded."""
        return 0, None

    def partitioned(self, model: nn.Module) -> list[nn.Parameter]:
        """Parameters that the ranks share out."""
        return list(model.parameters())

    def updated_groups(self, model: nn.Module, optimizer: Any) -> list[tuple[str, list[nn.Parameter]]]:  # noqa: ANN401  # torch's
        """(name of its group, the parameters) of everything that the inner optimizer updates."""
        return [(str(group.get("name")), group["params"]) for group in optimizer.param_groups]

    def rows(self, model: nn.Module, chosen: Candidate, hybrid_mesh: tuple[int, int] | None) -> Iterator[Row]:
        """Comparisons with the plan that this engine alone has."""
        yield from ()

    # Reading

    def facts(self, model: nn.Module, optimizer: TorchOptimizer) -> dict[str, str]:
        """Places of model state on this rank after a step, as text."""
        return {}

    def masters(self, model: nn.Module) -> list[Tensor]:
        """Master weights that are no parameters of the model and that the inner optimizer does not list."""
        return []

    def whole_weights(self, accelerator: Accelerator, model: nn.Module) -> Mapping[str, Tensor]:
        """All weights by name, at least on rank 0; collective where they are sharded."""
        weights: Mapping[str, Tensor] = accelerator.get_state_dict(model)
        return weights

    def held_rows(self, parameter: Tensor) -> Tensor:
        """Whole rows of a matrix, on their device: all of them, or those of this rank; collective where needed."""
        return parameter.detach()

    def gathered(self, parameter: Tensor) -> Tensor:
        """All elements of one parameter on the CPU; collective where ranks hold parts of it."""
        return parameter.detach().cpu()


def trained_type(model: nn.Module) -> torch.dtype:
    """Type of the parameters that are trained."""
    return next(parameter.dtype for parameter in plain_model(model).parameters() if parameter.requires_grad)


def process_group(kind: DeviceKind, *, holds_shards_on_host: bool = False) -> InitProcessGroupKwargs:
    """NCCL does not support tensors in host RAM: the norm of gradients whose shards are there is summed by gloo."""
    on_gpu = f"cuda:{NCCL},cpu:{cpu_ranks.GLOO}" if holds_shards_on_host else NCCL
    return InitProcessGroupKwargs(
        backend=cpu_ranks.GLOO if kind is DeviceKind.CPU else on_gpu, timeout=COLLECTIVE_TIMEOUT
    )


def state_tensors(optimizer: TorchOptimizer) -> list[Tensor]:
    """The moments of every parameter; counts of steps are none."""
    found = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in found if isinstance(value, Tensor) and value.ndim > 0]


def places(pieces: Iterable[tuple[Any, ...]]) -> str:
    """`float32 on cpu 1.2 MiB; float32 on nvme 12 MiB`, of (tensor, elements, is on NVMe[, type]) each.

    What is on NVMe is an empty tensor meanwhile, or one of another type.
    """
    totals: Counter[str] = Counter()
    for tensor, size, is_on_nvme, *types in pieces:
        dtype = types[0] if types else tensor.dtype
        place = "nvme" if is_on_nvme else _device(tensor)
        totals[f"{str(dtype).removeprefix('torch.')} on {place}"] += size * dtype.itemsize
    return "; ".join(f"{place} {format_bytes(totals[place])}" for place in sorted(totals)) or "none"


def _device(tensor: Tensor) -> str:
    return f"pinned {tensor.device.type}" if tensor.device.type == "cpu" and tensor.is_pinned() else tensor.device.type
