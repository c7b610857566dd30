"""The trainer's model and engine on a device that is not there, built as a rank builds them.

The model is built on torch's `meta` device, with adapters and quantised layers where the method has them, and then
given tensors on the fake device; under FSDP2 it is cut without memory first, as a rank cuts it. The engine is that of
the runtime's own Accelerator, in a process group whose collectives do nothing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from shardwise.trainer.runtime import engines, loss
from shardwise.trainer.runtime.engines.engine import EngineChoice
from shardwise.trainer.runtime.memory.host_embedding import tensors_on_host
from shardwise.trainer.runtime.models.build import Installed, make_trainable, model_from_config
from shardwise.trainer.runtime.models.configs import faults_of_config, refuse_padding
from shardwise.trainer.runtime.models.fused_adapters import fuse_adapters
from shardwise.trainer.runtime.models.methods import add_adapters, base_type
from shardwise.trainer.runtime.models.model_code import faults_of, load_model_code
from shardwise.trainer.runtime.run import operators
from shardwise.trainer.runtime.run.types import compute_type
from shardwise.trainer.simulation.fake_device import replaced
from shardwise.trainer.simulation.kernels import LigerLoss
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.messages.worker_requests import SimulationRequest
from shardwise.trainer.spec.model.shape import ModelCode
from shardwise.trainer.spec.strategy import Attention, Method

# Set in the environment by a launch of ranks, read by Accelerate and torch.
_OF_LAUNCH = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "LOCAL_RANK", "RANK", "WORLD_SIZE")


def build_on_meta(request: SimulationRequest) -> tuple[PreTrainedModel, Installed]:
    """The model of a request without any tensor behind it, ready to be trained."""
    dtype = base_type(request.method, request.precision)
    if request.sharding.uses_deepspeed:
        dtype = compute_type(request.precision)  # the engine casts the model before it moves it
    model = base_on_meta(request.model_config, request.model_code, dtype=dtype, attention=request.attention)
    with torch.device("meta"):
        if request.method is Method.QLORA:
            from shardwise.trainer.simulation.nf4 import quantise  # bitsandbytes takes a second

            quantise(model, request.quant, dtype)
        if request.method.freezes_base:
            add_adapters(model, request.lora, request.precision)
        if request.fused_adapters:
            fuse_adapters(model)
    with (
        replaced(loss, liger_loss=lambda _: LigerLoss()),
        replaced(operators, check_triton_compiler=lambda _: None),
    ):
        installed = make_trainable(
            model,
            request.checkpointing,
            request.loss,
            loss_chunk_tokens=request.loss_chunk_tokens,
            activation_offload=request.activation_offload,
            embedding_on_host=request.embedding_on_host,
        )
    return model, installed


def base_on_meta(
    config: dict[str, Any],
    code: ModelCode | None,
    *,
    dtype: torch.dtype,
    attention: Attention,
    origin: str = "the model's config.json",
) -> PreTrainedModel:
    """The model of a config without any tensor behind it; InputError for a config that transformers does not build.

    `origin` names the config in the message.
    """
    load_model_code(code)
    with faults_of_config(config, origin=origin), faults_of(code), torch.device("meta"), no_init_weights():
        model = model_from_config(config, dtype=dtype, attention=attention)
        model.tie_weights()
    refuse_padding(model, origin=origin)
    return model


def materialise(model: nn.Module, device: str, *, buffers_on: str | None = None) -> None:
    """Gives parameters and buffers tensors on `device`; what is shared stays shared. Under a fake tensor mode.

    Those of modules that stay in host RAM get them there.
    """
    made: dict[int, Tensor] = {}
    on_host = tensors_on_host(model)
    for module in model.modules():
        for tensors, place in ((module._parameters, device), (module._buffers, buffers_on or device)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = _like(tensor, "cpu" if tensor in on_host else place)
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
def engine_of(
    request: SimulationRequest, model: PreTrainedModel, ds_config: dict[str, Any] | None
) -> Iterator[Accelerator]:
    """The runtime's Accelerator for a request, as on the first of ranks that are not there; outside a fake tensor mode.

    What it adds to the process, Accelerate's state, variables of the environment and the group, is removed after it.
    """
    environment, is_alone = dict(os.environ), request.sharding.facts.is_one_rank
    for name in [name for name in environment if name.startswith(_OF_LAUNCH)]:
        del os.environ[name]
    _forget_engine()
    if not is_alone:
        os.environ["LOCAL_RANK"] = "0"
        dist.init_process_group("fake", rank=0, world_size=request.num_ranks, store=FakeStore())
    try:
        accelerator = engines.engine_of(request.sharding).accelerator(_choice(request, model), ds_config)
        mesh = None if is_alone else init_device_mesh("cuda", (request.num_ranks,))  # reads the numbers of its ranks
        with (
            replaced(_fully_shard, _init_default_mesh=lambda *_, **__: mesh),
            replaced(nn.parallel, DistributedDataParallel=_QuietDdp),
        ):
            yield accelerator
    finally:
        _forget_engine()
        if not is_alone:
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)


def _forget_engine() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _choice(request: SimulationRequest, model: PreTrainedModel) -> EngineChoice:
    group = request.shard_group or request.ranks_per_node
    return EngineChoice(
        sharding=request.sharding,
        precision=request.precision,
        num_ranks=request.num_ranks,
        accumulation=request.accumulation,
        device_kind=request.device_kind,
        block_class=type(blocks_of(model)[0]).__name__,
        reduces_every_micro_batch=request.reduce_every_micro_batch,
        reduces_in_bf16=request.bf16_reduction,
        hybrid_mesh=(request.num_ranks // group, group) if request.sharding.facts.shards_within_group else None,
    )


def keep_in_place(model: PreTrainedModel) -> None:
    """Makes moves and casts no operations on the model, which has its device and its type.

    The fake mode cannot swap a tensor that something else refers to.
    """
    seam: Any = model
    seam.to = lambda *_, **__: model
    seam.bfloat16 = seam.float = lambda: model


class _QuietDdp(DistributedDataParallel):
    """DDP without its first synchronisation, which reads the parameters' values; a bucket is reduced in place."""

    def __init__(self, module: nn.Module, **options: Any) -> None:  # noqa: ANN401  # torch's
        super().__init__(module, init_sync=False, **options)
        self.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))
        seam: Any = self
        seam.logger = SimpleNamespace(set_runtime_stats_and_log=lambda: None)  # it reads a timer of a CUDA build
        seam.reducer = _KeepsBuckets(self.reducer)


class _KeepsBuckets:
    """DDP's reducer without the new order of its buckets after the first step, which reads values; sizes stay alike."""

    def __init__(self, reducer: Any) -> None:  # noqa: ANN401  # torch's
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any attribute of the reducer
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _done(reduced: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(reduced)
    return future
