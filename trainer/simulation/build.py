"""The trainer's model and engine on a device that is not there, built as a rank builds them.

The model is built on torch's `meta` device, with adapters and quantised layers where the method has them, and then
given tensors on the fake device: under FSDP2 on the host, from where each group moves to the device before it is cut.
FSDP2 is applied by Accelerate's own function, DDP is torch's own, both in a process group whose collectives do nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import convert_outputs_to_fp32
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from trainer.runtime.accelerator import fsdp_plugin
from trainer.runtime.adapters import add_adapters, base_type
from trainer.runtime.model import make_trainable, model_from_config
from trainer.runtime.model_code import faults_of, load_model_code
from trainer.runtime.precision import accelerate_precision, compute_type
from trainer.simulation.fake_device import replaced
from trainer.spec.errors import InputError
from trainer.spec.simulation import SimulationRequest
from trainer.spec.strategy import Method, Sharding

_MESH_AXES = {Sharding.HSDP: ("dp_replicate", "dp_shard")}


def build_on_meta(request: SimulationRequest) -> PreTrainedModel:
    """The model of a request without any tensor behind it, ready to be trained."""
    dtype = base_type(request.method, request.precision)
    if request.sharding.uses_deepspeed:
        dtype = compute_type(request.precision)  # the engine casts the model before it moves it
    load_model_code(request.model_code)
    try:
        with faults_of(request.model_code), torch.device("meta"), no_init_weights():
            model = model_from_config(request.model_config, dtype=dtype, attention=request.attention)
            model.tie_weights()
            if request.method is Method.QLORA:
                from trainer.simulation.nf4 import quantise

                quantise(model, request.quant, dtype)
            if request.method.freezes_base:
                add_adapters(model, request.lora, request.precision)
    except _CONFIG_ERRORS as error:
        what = request.model_config.get("model_type", "model_type missing")
        sentence = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()  # the cause comes last
        raise InputError(f"model config ({what}): {sentence}") from error
    make_trainable(model, request.checkpointing, request.loss, loss_chunk_tokens=request.loss_chunk_tokens)
    return model


# What transformers raises for a config with fields missing, of a wrong type or that do not go together.
_CONFIG_ERRORS = (
    *(KeyError, ValueError, TypeError, AttributeError, ZeroDivisionError, RuntimeError),
    StrictDataclassError,
)


def materialise(model: nn.Module, device: str) -> None:
    """Gives parameters and buffers tensors on `device`; what is shared stays shared. Under a fake tensor mode."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = _like(tensor, device)
                    tensors[name] = made[id(tensor)]  # type: ignore[assignment]  # a parameter for a parameter


def _like(tensor: Tensor, device: str) -> Tensor:
    fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: the list of modules that holds the most parameters."""
    lists: list[nn.Module] = [found for found in model.modules() if isinstance(found, nn.ModuleList) and len(found)]
    if not lists:
        raise InputError(f"{type(model).__name__} has no list of blocks; its memory cannot be simulated")
    return list(max(lists, key=num_parameters).children())


def num_parameters(module: nn.Module) -> int:
    """Elements of all parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def process_group(request: SimulationRequest) -> Iterator[DeviceMesh | None]:
    """The mesh of a process group of which only this rank exists; None for a single device."""
    if request.sharding is Sharding.NONE:
        yield None
        return
    dist.init_process_group("fake", rank=0, world_size=request.num_ranks, store=FakeStore())
    try:
        axes = _MESH_AXES.get(request.sharding, ("dp_shard",))
        nodes = -(-request.num_ranks // request.ranks_per_node)
        sizes = (nodes, request.num_ranks // nodes) if len(axes) == 2 else (request.num_ranks,)
        yield init_device_mesh("cuda", sizes, mesh_dim_names=axes)
    finally:
        dist.destroy_process_group()


def prepare_engine(model: PreTrainedModel, request: SimulationRequest, mesh: DeviceMesh | None) -> nn.Module:
    """The model in its engine, as Accelerate's `prepare` leaves it."""
    if request.sharding.uses_fsdp:
        assert mesh is not None
        return _with_fsdp(model, request, mesh)
    precision = accelerate_precision(request.precision)
    if precision != "no":
        _autocast_forward(model, request.device_kind.value, compute_type(request.precision))
    if request.sharding is Sharding.DDP:
        return _with_ddp(model)
    return model


def _with_ddp(model: PreTrainedModel) -> nn.Module:
    """Without the first synchronisation, which reads the parameters' values; a bucket is reduced in place."""
    wrapped = DistributedDataParallel(
        model, device_ids=[0], output_device=0, gradient_as_bucket_view=True, init_sync=False
    )
    wrapped.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))
    seam: Any = wrapped
    seam.logger = SimpleNamespace(set_runtime_stats_and_log=lambda: None)  # it reads a timer of a CUDA build
    seam.reducer = _KeepsBuckets(wrapped.reducer)
    return wrapped


class _KeepsBuckets:
    """DDP's reducer without the new order of its buckets after the first step, which reads values; sizes stay alike."""

    def __init__(self, reducer: Any) -> None:  # noqa: ANN401  # torch's
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever the reducer has
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _done(reduced: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(reduced)
    return future


def _autocast_forward(model: PreTrainedModel, device: str, dtype: torch.dtype) -> None:
    """Accelerate's `prepare_model`: the forward under autocast, its outputs in fp32."""
    seam: Any = model
    casting = torch.autocast(device_type=device, dtype=dtype)
    seam.forward = MethodType(convert_outputs_to_fp32(casting(seam.forward.__func__)), model)


def _with_fsdp(model: PreTrainedModel, request: SimulationRequest, mesh: DeviceMesh) -> nn.Module:
    axes = mesh.mesh_dim_names
    plugin = fsdp_plugin(
        sharding=request.sharding,
        precision=request.precision,
        block_class=type(blocks_of(model)[0]).__name__,
        keeps_shards_on_host=False,
    )
    accelerator = SimpleNamespace(  # what the function reads of an Accelerator
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh={axes: mesh},
        parallelism_config=SimpleNamespace(fsdp_dim_names=axes),
        mixed_precision=accelerate_precision(request.precision),
        device=torch.device("cuda"),
        is_main_process=False,
    )
    with replaced(_fsdp_init, _move_states_to_device=_move):
        prepared = fsdp2_prepare_model(accelerator, model)
    assert isinstance(prepared, nn.Module)
    return prepared


def _move(parameters: Sequence[Tensor], buffers: Sequence[Tensor], device: torch.device) -> None:
    """FSDP2's own move of a group to its device; a fake tensor has to be told its new device."""
    for tensor in (*parameters, *buffers):
        seam: Any = tensor
        if seam.fake_device != device:
            seam.data = tensor.to(device)
            seam.fake_device = device
