"""Settings and devices for the tests of the two estimates: each factory names only what its test is about."""

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from shardwise.trainer.planning.configuration import Configuration, PolicyChoices
from shardwise.trainer.planning.device import Device, device_of
from shardwise.trainer.planning.policy.reference_trainers import REFERENCE_TRAINERS
from shardwise.trainer.planning.tables.gpu_names import hardware_from_spec
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.hardware import DeviceKind, Host
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision, Strategy
from shardwise.trainer.spec.units import GIB

UNKNOWN_HOST = Host(cpu_name=None, num_cores=None, ram_bytes=None, ram_available_bytes=None)
CPU_HOST = Host(cpu_name="a CPU", num_cores=4, ram_bytes=64 * GIB, ram_available_bytes=60 * GIB)
CUBLAS_BYTES = 2 * 8_519_680  # both handles of a card before Hopper


def config(
    vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, *, is_tied: bool = False, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "tie_word_embeddings": is_tied, **more,
    }  # fmt: skip


LLAMA_8B = read_model_shape(config(128256, 4096, 14336, 32, 32, 8))
LLAMA_1B = read_model_shape(config(128256, 2048, 8192, 16, 32, 8, is_tied=True))
LLAMA_2_7B = read_model_shape(config(32000, 4096, 11008, 32, 32, 32))
MISTRAL_7B = read_model_shape(config(32000, 4096, 14336, 32, 32, 8))
QWEN_HALF_B = read_model_shape(config(151936, 896, 4864, 24, 14, 2, is_tied=True, model_type="qwen2"))
TINY = read_model_shape(config(4096, 192, 512, 4, 6, 2, is_tied=True))


def shape_of(fields: dict[str, Any]) -> ModelShape:
    return read_model_shape(fields)


def gpu(spec: str = "8xA100-SXM4-80GB") -> Device:
    return device_of(hardware_from_spec(spec, local_host=lambda: UNKNOWN_HOST))


def cpu(num_ranks: int = 1, *, flags: tuple[str, ...] = ()) -> Device:
    host = replace(CPU_HOST, cpu_flags=flags)
    device = device_of(hardware_from_spec(f"{num_ranks}xCPU", local_host=lambda: host))
    assert device.kind is DeviceKind.CPU
    return device


def configuration(
    sharding: Sharding = Sharding.NONE, *, precision: Precision = Precision.BF16_MIXED,
    optimizer: Optimizer = Optimizer.ADAMW_FUSED, offload: Offload = Offload.NONE, num_ranks: int = 1,
    ranks_per_node: int = 8, **more: Any,
) -> Configuration:  # fmt: skip
    fields: dict[str, Any] = {
        "method": Method.FULL, "micro_batch": 1, "accumulation": 1, "seq_len": 2048,
        "checkpointing": Checkpointing.NONE, "attention": Attention.SDPA, "loss": LossHead.EAGER, **more,
    }  # fmt: skip
    strategy = Strategy(
        name="test", sharding=sharding, offload=offload, optimizer=optimizer, precision=precision, is_exact=True
    )
    return Configuration(
        strategy=strategy, num_ranks=num_ranks, ranks_per_node=min(num_ranks, ranks_per_node), **fields
    )


OFFLOADS = {
    Sharding.ZERO2: [Offload.NONE, Offload.OPTIMIZER],
    Sharding.ZERO3: list(Offload),
    Sharding.FSDP: [Offload.NONE, Offload.OPTIMIZER_PARAMS],
}


@st.composite
def configurations_of(draw: st.DrawFn) -> Configuration:
    sharding = draw(st.sampled_from(list(Sharding)))
    num_ranks = 1 if sharding is Sharding.NONE else draw(st.sampled_from([2, 8, 64]))

    def drawn(**choices: Iterable[object]) -> dict[str, Any]:
        return {name: draw(st.sampled_from(list(values))) for name, values in choices.items()}

    fields = drawn(method=Method, precision=Precision, optimizer=Optimizer, checkpointing=Checkpointing)
    fields |= drawn(attention=Attention, loss=LossHead, reference=REFERENCE_TRAINERS, loss_chunk_tokens=(None, 128))
    fields |= drawn(micro_batch=(1, 2, 7, 32), seq_len=(128, 1000, 4096), accumulation=(1, 4))
    fields |= drawn(offload=OFFLOADS.get(sharding, [Offload.NONE]), activation_offload=(False, True))
    fields |= drawn(optimizer_in_backward=(False, True), compile=(False, True))
    policy = drawn(residual_bytes=(None, 4), adapter_bytes=(None, 2, 4), reduce_bytes=(None, 2, 4))
    policy |= drawn(reduces_every_micro_batch=(None, True, False))
    return configuration(sharding, num_ranks=num_ranks, checkpoint_every_n=2, policy=PolicyChoices(**policy), **fields)
