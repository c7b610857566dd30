"""Plans that differ in what decides a launch: engine, precision, devices; everything else is the least there can be."""

from typing import Any

from report_factory import make_candidate

from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.hardware import DeviceKind, Gpu, Hardware, Host
from shardwise.trainer.spec.job.sections import Job
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Calibration, Candidate, Plan, Schedule
from shardwise.trainer.spec.strategy import Precision, Strategy

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def gpus(count: int) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(index=index, name="NVIDIA H100", spec_name=None, memory_bytes=80 * 2**30, uuid=f"GPU-{index}")
        for index in range(count)
    )


def engine_plan(
    sharding: Sharding, offload: Offload = Offload.NONE, *, optimizer: Optimizer | None = None,
    precision: Precision = Precision.FP32, num_ranks: int = 1, kind: DeviceKind = DeviceKind.CPU,
    hardware: Hardware | None = None, job: Job | None = None, **candidate: object,
) -> Plan:  # fmt: skip
    """A plan whose only candidate runs on `num_ranks` devices of `kind`, under hybrid sharding those of two nodes."""
    num_nodes = 2 if sharding is Sharding.HSDP and "shard_group" not in candidate else 1
    on_each = num_ranks // num_nodes
    cards = gpus(on_each) if kind is DeviceKind.CUDA else ()
    host = Host(cpu_name=None, num_cores=8, ram_bytes=2**36, ram_available_bytes=2**36)
    if optimizer is None:
        is_on_host = sharding.uses_deepspeed and offload is not Offload.NONE
        optimizer = Optimizer.DEEPSPEED_CPU_ADAM if is_on_host else Optimizer.ADAMW
    strategy = Strategy(
        name=f"{sharding}+{offload}/{precision}", sharding=sharding, offload=offload, optimizer=optimizer,
        precision=precision, is_exact=True, base_config=sharding.facts.base_configs.get(offload),
    )  # fmt: skip
    chosen: Candidate = make_candidate(strategy=strategy, num_ranks=num_ranks, **candidate)
    return Plan(
        name="tiny", job=job or Job(), device_kind=kind,
        hardware=hardware or Hardware(gpus=cards, host=host, num_nodes=num_nodes, num_cpu_devices=on_each),
        model_shape=read_model_shape(TINY_LLAMA), model_config=TINY_LLAMA, model_path=None, tokenizer_path=None,
        data=DataProfile(
            source="prepared", num_rows=64, num_tokens=4096, longest_row=64, is_packed=True, fingerprint="",
            vocab_size=256,
        ),
        schedule=Schedule(
            num_steps=2, sequences_per_step=chosen.micro_batch * chosen.accumulation * num_ranks, tokens_per_step=1024,
            warmup_steps=0, lr=1e-3, lr_source="test", eval_every_steps=None, checkpoint_every_steps=None,
        ),
        candidates=(chosen,), rejections=(), methods=(), fallbacks=(), calibration=Calibration(),
        versions={"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "python": "3.11.2"},
    )  # fmt: skip
