"""Where an engine holds model state: which elements are a rank's own, on which device, in which type, in which files.

Read off DeepSpeed's and FSDP2's own objects. DeepSpeed's are untyped; what is read of them (0.19.8):

    ZeRO-1, -2   single_partition_of_fp32_groups        the flat master partition of each parameter group
    ZeRO-3       fp32_partitioned_groups_flat           the same of each sub-group; empty while it is on NVMe
                 fp16_partitioned_groups_flat_numel     how many elements it has, wherever it is
    both         optimizer                              whose state is keyed by those partitions
    ZeRO-3       ds_tensor of a parameter               this rank's piece; `final_location` nvme where it is a file

The masters of ZeRO are called fp32 there also where they are bf16.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Placement

from shardwise.trainer.runtime.models.build import is_deepspeed
from shardwise.trainer.spec.strategy import Offload
from shardwise.trainer.spec.units import format_bytes

SMALLEST_SWAPPED_BYTES = 1 << 20  # DeepSpeed keeps what is smaller in RAM (MIN_AIO_BYTES)
_NVME = "nvme"


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


def updated_parameters(engine: Any) -> list[nn.Parameter]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """The parameters whose partitions the optimizer updates."""
    return [parameter for _, group in updated_groups(engine) for parameter in group]


def release_gathered(model: nn.Module) -> None:
    """Frees the whole weights that a forward left for a backward, where none follows.

    FSDP2 leaves its root, and under fsdp_grad_op every block. ZeRO-3 leaves what the next forward will use, up to
    `stage3_max_reuse_distance`, and forgets that it counts to the limit of live parameters.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    zero: Any = model.optimizer if is_deepspeed(model) else None
    if hasattr(zero, "empty_partition_cache"):  # ZeRO-3
        zero.empty_partition_cache()


def num_elements(parameter: Any) -> int:  # noqa: ANN401  # ZeRO-3 adds attributes to parameters
    """Elements of the whole parameter, however little of it is here."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def offload_of(model: nn.Module) -> Offload:
    """The offload of the engine: what it keeps off the device."""
    if isinstance(model, FSDPModule):
        states = (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
        groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
        is_moved = any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)
        return Offload.OPTIMIZER_PARAMS if is_moved else Offload.NONE
    if not is_deepspeed(model):
        return Offload.NONE
    zero: Any = model.optimizer
    if hasattr(zero, "cpu_offload"):  # ZeRO-1 and -2
        return Offload.OPTIMIZER if zero.cpu_offload else Offload.NONE
    moves = (zero.offload_optimizer, zero.swap_optimizer, zero.offload_param, zero.params_in_nvme_and_cpu)
    return {
        (True, False, False, False): Offload.OPTIMIZER,
        (True, False, True, False): Offload.OPTIMIZER_PARAMS,
        (True, True, False, False): Offload.NVME_OPTIMIZER,
        (True, True, True, True): Offload.NVME_ALL,
    }.get(moves, Offload.NONE)


def meshes(model: nn.Module) -> set[tuple[tuple[int, ...], tuple[Placement, ...]]]:
    """(size of each axis, placement on it) of the meshes that FSDP2's shards lie on."""
    return {(tuple(shard.device_mesh.shape), tuple(shard.placements)) for shard in _shards(model)}


def ranks_of_copy(model: nn.Module) -> list[tuple[int, ...]]:
    """The ranks that share one copy of the weights with this one, by FSDP2's shards; one entry unless they differ."""
    groups = {shard.device_mesh.get_group(shard.device_mesh.ndim - 1) for shard in _shards(model)}
    return sorted({tuple(dist.get_process_group_ranks(group)) for group in groups})


def swapped_partitions(engine: Any) -> tuple[int, int]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """(master partitions that lie on NVMe, those large enough to)."""
    sizes, width = partition_sizes(engine), partition_type(engine).itemsize
    large = sum(size * width >= SMALLEST_SWAPPED_BYTES for size in sizes)
    return sum(flat.numel() == 0 < size for flat, size in zip(partitions(engine), sizes, strict=True)), large


def swapped_weights(plain: nn.Module) -> tuple[int, int]:
    """(weights whose piece of this rank is a file, those large enough to be)."""
    parted = _parted(plain)
    large = sum(each.ds_tensor.ds_numel * each.element_size() >= SMALLEST_SWAPPED_BYTES for each in parted)
    return sum(_is_on_nvme(each) for each in parted), large


def taken_buckets(engine: Any) -> dict[str, int]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """Sizes of ZeRO's buffers as DeepSpeed took them, in elements, by the name they have in a plan."""
    zero = engine.optimizer
    taken = {"reduce_elements": int(zero.reduce_bucket_size)}
    offload = getattr(zero, "parameter_offload", None)
    if offload is not None:
        taken |= {
            "prefetch_elements": int(offload._prefetch_bucket_sz),
            "live_parameters": int(offload._max_available_parameters_in_numel),
            "persistence_elements": int(offload.param_numel_persistence_threshold),
        }
    return taken


def engine_facts(model: nn.Module, optimizer: Any) -> dict[str, str]:  # noqa: ANN401  # torch's, inside the wrappers
    """Where state is seen to lie after a step, in words; of this rank alone."""
    states = (value for state in optimizer.state.values() for value in state.values())
    moments = [(each, each.numel(), False) for each in states if isinstance(each, torch.Tensor) and each.ndim > 0]
    if isinstance(model, FSDPModule):
        shards = [parameter.to_local() for parameter in _shards(model)]
        copies = {shape[0] for shape, _ in meshes(model) if len(shape) > 1}
        local = [each.to_local() if isinstance(each, DTensor) else each for each, _, _ in moments]
        return {
            **({"copies of the weights": ", ".join(map(str, copies))} if copies else {}),
            "shards": _places((each, each.numel(), False) for each in shards),
            "place of optimizer state": _places((each, each.numel(), False) for each in local),
        }
    if not is_deepspeed(model):
        return {}
    masters = list(zip(partitions(model), partition_sizes(model), strict=True))
    facts = {
        "partitions": f"{sum(size for _, size in masters):,} elements in {len(masters)}",
        "master weights": _places((flat, size, flat.numel() < size, partition_type(model)) for flat, size in masters),
        "place of optimizer state": _places(moments),
    }
    parted = _parted(model)
    if parted:
        facts["weights"] = _places(
            (each.ds_tensor, each.ds_tensor.ds_numel, _is_on_nvme(each), each.dtype) for each in parted
        )
    return facts | _swap_files(model, parted)


def _shards(model: nn.Module) -> list[DTensor]:
    return [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]


def _parted(model: nn.Module) -> list[Any]:
    """The parameters that ZeRO-3 has cut."""
    return [parameter for parameter in model.parameters() if hasattr(parameter, "ds_tensor")]


def _is_on_nvme(parameter: Any) -> bool:  # noqa: ANN401  # a parameter that ZeRO-3 has cut
    place = parameter.ds_tensor.final_location
    return str(getattr(place, "value", place)) == _NVME


def _places(pieces: Iterable[tuple[Any, ...]]) -> str:
    """`float32 on cpu 1.2 MiB; float32 on nvme 12 MiB`, of (tensor, elements, is on NVMe[, type]) each.

    What is on NVMe is an empty tensor meanwhile, or one of another type.
    """
    totals: Counter[str] = Counter()
    for tensor, size, is_on_nvme, *types in pieces:
        dtype = types[0] if types else tensor.dtype
        place = _NVME if is_on_nvme else _device(tensor)
        totals[f"{str(dtype).removeprefix('torch.')} on {place}"] += size * dtype.itemsize
    return "; ".join(f"{words} {format_bytes(totals[words])}" for words in sorted(totals)) or "none"


def _device(tensor: torch.Tensor) -> str:
    return f"pinned {tensor.device.type}" if tensor.device.type == "cpu" and tensor.is_pinned() else tensor.device.type


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
