"""DeepSpeed's ZeRO-1, -2 and -3, with offload to host RAM and NVMe.

Its engine clips and updates within the last backward of a step. Its objects are untyped (0.19.8); used here are

    ZeRO-1, -2   single_partition_of_fp32_groups        the flat master partition of each parameter group
    ZeRO-3       fp32_partitioned_groups_flat           the same of each sub-group; empty while it is on NVMe
                 fp16_partitioned_groups_flat_numel     the number of its elements, also while it is on NVMe
    both         optimizer                              whose state is keyed by those partitions
    ZeRO-3       ds_tensor of a parameter               this rank's piece; `final_location` nvme where it is a file

The masters are called fp32 there also where they are bf16.

A patch decides about each update: DeepSpeed discards the gradients of a step, and keeps weights, moments and step
counts, if the norm of all gradients over all ranks is not finite (`step` in runtime/zero/stage_1_and_2.py and
stage3.py). The norm of a step that is to be skipped is replaced by one that is not finite; fp16's loss scale stays.

Three patches repair NVMe offload. Without the first DeepSpeed stops the run, without the others it trains wrong:

    W34  it prefetches the weights that the recorded order of use names next. A weight that is in that order twice in a
         row, as the head at the end of a forward and the start of its backward, gets two buffers, and the read fails
    W52  it reads a gradient from its file directly into the buffer of a sub-group. If the offset is no multiple of the
         disk's block size, as after a weight of odd size, nothing is read, and the update uses the earlier content
    W55  on a device that cannot compute in fp16 it stores weights of any type in 16-bit buffers

A fifth lets ZeRO-1 and -2 start at all where CUDA_VISIBLE_DEVICES names cards by UUID, as in every run on one machine:

    W62  DeepSpeed reads the free memory of the card from NVML, and that variable as numbers
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer as TorchOptimizer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from shardwise.trainer.runtime.engines import cpu_ranks
from shardwise.trainer.runtime.engines.engine import Engine, EngineChoice, Row, places, process_group, state_tensors
from shardwise.trainer.runtime.engines.sharded_loading import load_into_zero3
from shardwise.trainer.runtime.models.meta_model import MetaModel
from shardwise.trainer.runtime.precision.mixed_precision import LossScaler
from shardwise.trainer.runtime.run.operators import read_processor_from_proc, use_built_operators
from shardwise.trainer.runtime.run.types import accelerate_precision
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.strategy import Precision
from shardwise.trainer.spec.units import format_bytes

SMALLEST_SWAPPED_BYTES = 1 << 20  # DeepSpeed keeps what is smaller in RAM (MIN_AIO_BYTES)
_NVME = "nvme"
_STAGES = {1: Sharding.ZERO1, 2: Sharding.ZERO2, 3: Sharding.ZERO3}
_CONFIG = "ds_config.json"


class Zero(Engine):
    """Accelerate with its DeepSpeed plugin."""

    updates_in_last_backward = True
    drops_empty_groups = True  # adapters have no norms

    def accelerator(self, choice: EngineChoice, ds_config: Mapping[str, Any] | None) -> Accelerator:
        assert ds_config is not None, f"the row needs {_CONFIG}"
        if choice.device_kind is DeviceKind.CPU:
            cpu_ranks.choose_deepspeed_cpu()
        read_processor_from_proc()
        use_built_operators()
        if choice.device_kind is DeviceKind.CUDA:
            read_free_memory_from_torch()
        if choice.offload.uses_nvme:
            swap_gradients_between_blocks()
        if choice.offload is Offload.NVME_ALL:
            read_each_weight_once()
            swap_weights_in_their_type()
        # Accelerate would replace the optimizer under offload otherwise (W5).
        config = {**ds_config, "zero_force_ds_cpu_optimizer": False}
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False),
            mixed_precision=accelerate_precision(choice.precision),
            gradient_accumulation_steps=choice.accumulation,
            kwargs_handlers=[process_group(choice.device_kind)],
        )
        unset_hf_deepspeed_config()  # else transformers shards the model while it is built, flag or no flag (W4)
        return accelerator

    def read_config(self, attempt_dir: Path) -> dict[str, Any] | None:
        path = attempt_dir / _CONFIG
        try:
            config = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise EnvironmentFaultError(f"{path}: ZeRO needs it, and it cannot be read: {error}") from error
        assert isinstance(config, dict)
        return config

    def runs(self, model: nn.Module) -> bool:
        return type(model).__name__ == "DeepSpeedEngine"  # importing DeepSpeed where it is not used takes seconds

    def sharding_of(self, model: Any) -> Sharding:  # noqa: ANN401  # DeepSpeedEngine, untyped, here and below
        return _STAGES.get(int(model.zero_optimization_stage()), Sharding.NONE)

    def cut_loaded(self, meta_model: MetaModel, accelerator: Accelerator, precision: Precision) -> None:
        load_into_zero3(meta_model, accelerator, precision)

    def loss_scaler(self, model: nn.Module, precision: Precision, kind: DeviceKind) -> LossScaler | None:
        return EngineScaler(model) if precision is Precision.FP16_MIXED else None

    def without_sync(self, accelerator: Accelerator, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()

    def deciding_update(self, model: nn.Module, accepts: Callable[[Tensor], bool]) -> AbstractContextManager[None]:
        return decide_before_update(model, accepts)

    def release_gathered(self, model: Any) -> None:  # noqa: ANN401
        """ZeRO-3 keeps what the next forward will use, up to `stage3_max_reuse_distance`, and no longer counts it
        in the limit of live parameters."""
        if hasattr(model.optimizer, "empty_partition_cache"):
            model.optimizer.empty_partition_cache()

    def offload_of(self, model: Any) -> Offload:  # noqa: ANN401
        zero = model.optimizer
        if hasattr(zero, "cpu_offload"):  # ZeRO-1 and -2
            return Offload.OPTIMIZER if zero.cpu_offload else Offload.NONE
        moves = (zero.offload_optimizer, zero.swap_optimizer, zero.offload_param, zero.params_in_nvme_and_cpu)
        return {
            (True, False, False, False): Offload.OPTIMIZER,
            (True, False, True, False): Offload.OPTIMIZER_PARAMS,
            (True, True, False, False): Offload.NVME_OPTIMIZER,
            (True, True, True, True): Offload.NVME_ALL,
        }.get(moves, Offload.NONE)

    def types(
        self,
        accelerator: Accelerator,
        model: Any,  # noqa: ANN401
        autocast: torch.dtype | None,
    ) -> tuple[torch.dtype, torch.dtype]:
        is_bf16, is_fp16 = model.bfloat16_enabled(), model.fp16_enabled()
        return torch.bfloat16 if is_bf16 else torch.float16 if is_fp16 else torch.float32, partition_type(model)

    def accumulation(self, accelerator: Accelerator, model: Any) -> int:  # noqa: ANN401
        return int(model.gradient_accumulation_steps())

    def owned(self, model: nn.Module) -> tuple[int, int | None]:
        return len(_parted(model)), sum(partition_sizes(model))

    def partitioned(self, model: nn.Module) -> list[nn.Parameter]:
        return [parameter for _, group in updated_groups(model) for parameter in group]

    def updated_groups(self, model: nn.Module, optimizer: Any) -> list[tuple[str, list[nn.Parameter]]]:  # noqa: ANN401
        return updated_groups(model)

    def rows(self, model: nn.Module, chosen: Candidate, hybrid_mesh: tuple[int, int] | None) -> Iterator[Row]:
        offload = chosen.strategy.offload
        if offload.uses_nvme:
            large, swapped = _swapped_partitions(model)
            yield "partitions on NVMe", large, swapped
            large, swapped = _swapped_weights(model)
            yield "weights on NVMe", large if offload.moves_parameters else 0, swapped
        if chosen.buckets is None:
            return
        for name, active in _buckets(model).items():
            if name == "prefetch_elements" and offload.uses_nvme:
                continue  # fewer, so that swap buffers suffice
            yield f"buckets: {name.replace('_', ' ')}", getattr(chosen.buckets, name), active

    def facts(self, model: nn.Module, optimizer: TorchOptimizer) -> dict[str, str]:
        masters, parted = list(zip(partitions(model), partition_sizes(model), strict=True)), _parted(model)
        found = {
            "partitions": f"{sum(size for _, size in masters):,} elements in {len(masters)}",
            "master weights": places(
                (flat, size, flat.numel() < size, partition_type(model)) for flat, size in masters
            ),
            "place of optimizer state": places((each, each.numel(), False) for each in state_tensors(optimizer)),
        }
        if parted:
            found["weights"] = places(
                (each.ds_tensor, each.ds_tensor.ds_numel, _is_on_nvme(each), each.dtype) for each in parted
            )
        return found | _swap_files(model, parted)

    def masters(self, model: nn.Module) -> list[Tensor]:
        return partitions(model)  # ZeRO-3 hands them over one by one

    def held_rows(self, parameter: Tensor) -> Tensor:
        return self.gathered(parameter) if hasattr(parameter, "ds_id") else parameter.detach()

    def gathered(self, parameter: Tensor) -> Tensor:
        if not hasattr(parameter, "ds_id"):
            return super().gathered(parameter)
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().cpu().clone()


class EngineScaler:
    """View of DeepSpeed's own loss scaling, which has clipped and stepped in the last backward."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401  # DeepSpeedEngine, untyped
        self.num_skipped = 0
        self._engine = engine

    @property
    def loss_scale(self) -> float:
        return float(self._engine.optimizer.loss_scale)

    @property
    def growth_tracker(self) -> int:
        inner = self._engine.optimizer.loss_scaler
        return int(inner.cur_iter - inner.last_overflow_iter - 1)

    def restore(self, loss_scale: float, growth_tracker: int) -> None:
        inner = self._engine.optimizer.loss_scaler
        inner.cur_scale, inner.cur_iter, inner.last_overflow_iter = loss_scale, growth_tracker, -1

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def unscale(self, optimizer: object) -> None:
        """The engine has."""

    def step(self, optimizer: Any) -> bool:  # noqa: ANN401  # Accelerate's wrapper
        was_skipped = bool(optimizer.step_was_skipped)
        self.num_skipped += was_skipped
        return was_skipped

    def pass_over(self) -> bool:
        return False  # the engine has thrown the gradients away


def partitions(engine: Any) -> list[torch.Tensor]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """The master partitions that this rank owns; those on NVMe are empty tensors, of no type in particular."""
    zero = engine.optimizer
    flats = getattr(zero, "fp32_partitioned_groups_flat", None)
    return list(zero.single_partition_of_fp32_groups if flats is None else flats)


def partition_sizes(engine: Any) -> list[int]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """Elements of each master partition, wherever it lies."""
    sizes = getattr(engine.optimizer, "fp16_partitioned_groups_flat_numel", None)
    return [flat.numel() for flat in partitions(engine)] if sizes is None else [int(size) for size in sizes]


def partition_type(engine: Any) -> torch.dtype:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """The type of the master partitions; one that is on NVMe meanwhile has forgotten its own."""
    held = (flat.dtype for flat in partitions(engine) if flat.numel())
    return next(held, engine.optimizer.master_weights_and_grads_dtype)


def updated_groups(engine: Any) -> list[tuple[str, list[nn.Parameter]]]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """(name of its parameter group, the parameters) of every partition; ZeRO-3 cuts a group into several."""
    zero = engine.optimizer
    names = [str(group.get("name")) for group in zero.optimizer.param_groups]
    if hasattr(zero, "bit16_groups"):  # ZeRO-1 and -2
        return list(zip(names, zero.bit16_groups, strict=True))
    owners = (zero.sub_group_to_group_id[index] for index in range(len(zero.fp16_groups)))
    return [(names[owner], group) for owner, group in zip(owners, zero.fp16_groups, strict=True)]


def _swapped_partitions(engine: Any) -> tuple[int, int]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """(master partitions large enough to lie on NVMe, those that do)."""
    sizes, width = partition_sizes(engine), partition_type(engine).itemsize
    large = sum(size * width >= SMALLEST_SWAPPED_BYTES for size in sizes)
    return large, sum(flat.numel() == 0 < size for flat, size in zip(partitions(engine), sizes, strict=True))


def _swapped_weights(model: nn.Module) -> tuple[int, int]:
    """(weights whose piece of this rank is large enough to be a file, those that are)."""
    parted = _parted(model)
    large = sum(each.ds_tensor.ds_numel * each.element_size() >= SMALLEST_SWAPPED_BYTES for each in parted)
    return large, sum(_is_on_nvme(each) for each in parted)


def _buckets(engine: Any) -> dict[str, int]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """Sizes of ZeRO's active buffers, in elements, by the name they have in a plan."""
    zero = engine.optimizer
    active = {"reduce_elements": int(zero.reduce_bucket_size)}
    offload = getattr(zero, "parameter_offload", None)
    if offload is not None:
        active |= {
            "prefetch_elements": int(offload._prefetch_bucket_sz),
            "live_parameters": int(offload._max_available_parameters_in_numel),
            "persistence_elements": int(offload.param_numel_persistence_threshold),
        }
    return active


def _parted(model: nn.Module) -> list[Any]:
    """The parameters that ZeRO-3 has cut."""
    return [parameter for parameter in model.parameters() if hasattr(parameter, "ds_tensor")]


def _is_on_nvme(parameter: Any) -> bool:  # noqa: ANN401  # a parameter that ZeRO-3 has cut
    place = parameter.ds_tensor.final_location
    return str(getattr(place, "value", place)) == _NVME


def _swap_files(engine: Any, parted: list[Any]) -> dict[str, str]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """Swap files on the disk, by parameter."""
    folders = {}
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    if swapper is not None:
        folders["optimizer on NVMe"] = Path(swapper.swap_folder)
    swappers = (getattr(parameter, "nvme_swapper", None) for parameter in parted)
    of_weights = next((each for each in swappers if each is not None), None)
    if of_weights is not None:
        folders["weights on NVMe"] = Path(of_weights.swap_folder)
    facts = {}
    for name, folder in folders.items():
        written = [path.stat().st_size for path in folder.glob("*.swp")]
        facts[name] = f"{len(written)} files, {format_bytes(sum(written))}"
        if not written:
            facts[name] = f"nothing: no piece has {format_bytes(SMALLEST_SWAPPED_BYTES)}"
    return facts


@contextmanager
def decide_before_update(engine: Any, accepts: Callable[[Tensor], bool]) -> Iterator[None]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """While the block runs, the engine calls `accepts` with the gradient norm and discards the gradients if it is
    False.

    Every rank calls it with the same norm, once the gradients are summed: infinity for what is no number. An fp16 step
    that overflows is discarded without a call.
    """
    zero = engine.optimizer
    own = _Decision(zero, accepts).attributes()
    before = {name: vars(zero)[name] for name in own if name in vars(zero)}
    vars(zero).update(own)
    try:
        yield
    finally:
        for name in own:
            del vars(zero)[name]
        vars(zero).update(before)


class _Decision:
    """Replacements for methods of a ZeRO optimizer."""

    def __init__(self, zero: Any, accepts: Callable[[Tensor], bool]) -> None:  # noqa: ANN401  # untyped
        self._zero = zero
        self._accepts = accepts
        self._is_refused = False
        self._update_scale = zero._update_scale
        self._norm = zero._get_norm_groups if _is_zero3(zero) else zero.scaled_global_norm

    def attributes(self) -> dict[str, Any]:
        """Attributes that replace those of the optimizer's class."""
        own: dict[str, Any] = {"_update_scale": self.update_scale}
        if _is_zero3(self._zero):
            return own | {"_get_norm_groups": self.norm_groups}
        own |= {"scaled_global_norm": self.norm, "check_grad_overflow": True}  # else bf16 does not check the norm
        if self._zero.dtype != torch.float16:
            own["check_overflow"] = _no_check  # it reads every gradient; the norm suffices
        return own

    def norm(self, norm_type: int = 2) -> Tensor:
        """Norm of all gradients, for ZeRO-1 and -2."""
        return self._decided(self._norm(norm_type))

    def norm_groups(self) -> list[Tensor]:
        """One norm of all gradients, instead of those of ZeRO-3's sub-groups, which it combines."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        return [self._decided(combine_grad_norm_groups(self._norm()))]

    def update_scale(self, has_overflow: bool = False) -> None:  # noqa: FBT001, FBT002  # DeepSpeed's signature
        """Moves the loss scale on; for it, a step that was refused did not overflow."""
        self._update_scale(has_overflow and not self._is_refused)

    def _decided(self, scaled_norm: Tensor) -> Tensor:
        self._is_refused = not self._accepts(scaled_norm / self._zero.loss_scale)
        return torch.full_like(scaled_norm, torch.inf) if self._is_refused else scaled_norm


def _is_zero3(zero: Any) -> bool:  # noqa: ANN401  # untyped
    return hasattr(zero, "_get_norm_groups")


def _no_check(partition_gradients: bool = True) -> None:  # noqa: FBT001, FBT002  # DeepSpeed's signature
    """Finds nothing."""


def read_free_memory_from_torch() -> None:
    """From here on DeepSpeed computes the free bytes of a card as it does without NVML."""
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()  # untyped

    def available_memory(device_index: int | None = None) -> int:
        free: int = accelerator.total_memory(device_index) - accelerator.memory_allocated(device_index)
        return free

    accelerator.available_memory = available_memory


def read_each_weight_once() -> None:
    """Skips the second occurrence of a weight in every read, for all engines of this process."""
    from deepspeed.runtime.swap_tensor import partitioned_param_swapper

    swapper: Any = partitioned_param_swapper.AsyncPartitionedParameterSwapper  # untyped
    read = swapper.swap_in
    if hasattr(read, "reads_once"):
        return

    def swap_in(self: Any, params: Sequence[Any], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # DeepSpeed's own signature
        read(self, list(dict.fromkeys(params)), *args, **kwargs)

    swap_in.reads_once = True  # type: ignore[attr-defined]  # so that it is wrapped once
    swapper.swap_in = swap_in


def swap_weights_in_their_type() -> None:
    """From here on, buffers of weights are allocated in the type that the engine requests."""
    from deepspeed.runtime.zero.partition_parameters import Init

    choose = Init._set_dtype
    if hasattr(choose, "keeps_requested_type"):
        return

    def set_dtype(self: Any, ds_config: Any, dtype: Any) -> None:  # noqa: ANN401  # DeepSpeed's own signature
        choose(self, ds_config, dtype)
        if dtype is not None:
            self.dtype = dtype

    set_dtype.keeps_requested_type = True  # type: ignore[attr-defined]  # so that it is wrapped once
    Init._set_dtype = set_dtype


def swap_gradients_between_blocks() -> None:
    """Keeps what stands before the first whole block of a gradient in memory, from here on, as its end is already."""
    from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper

    swapper: Any = OptimizerSwapper  # untyped
    adjust = swapper._adjust_for_misaligned_lengths
    if hasattr(adjust, "cuts_heads"):
        return

    def adjusted(self: Any, tensors: Sequence[Any], offsets: Sequence[int]) -> Any:  # noqa: ANN401  # DeepSpeed's own
        parts = [part for each in zip(tensors, offsets, strict=True) for part in _cut_head(*each, self.numel_alignment)]
        return adjust(self, [tensor for tensor, _ in parts], [offset for _, offset in parts])

    adjusted.cuts_heads = True  # type: ignore[attr-defined]  # so that it is wrapped once
    swapper._adjust_for_misaligned_lengths = adjusted


def _cut_head(tensor: Tensor, offset: int, alignment: int) -> list[tuple[Tensor, int]]:
    """A flat tensor that is to lie at `offset`, cut at the first multiple of `alignment` in it."""
    head = min(-offset % alignment, tensor.numel())
    parts = [(tensor[:head], offset), (tensor[head:], offset + head)]
    return [(part, place) for part, place in parts if part.numel()]
