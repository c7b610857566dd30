"""Prediction cases: what is read, what is refused, and what the answer holds."""

from typing import Any

import msgspec
import pytest
from estimate_factory import config
from planning_factory import machine

from shardwise.trainer.planning.cases import estimate_case, read_case
from shardwise.trainer.planning.memory import estimate_memory
from shardwise.trainer.planning.tables.gpu_specs import GPU_SPECS
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import LinkKind
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Quant
from shardwise.trainer.spec.units import GIB

GPT_2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
DELETED = object()


def case_of(**changes):
    """A case that is answered; `train__seq_len=1` changes one field, DELETED leaves it out."""
    case = {
        "id": "a",
        "model": config(128256, 4096, 14336, 32, 32, 8),
        "hardware": {"gpu": "A100-SXM4-80GB", "gpus_per_node": 8, "nodes": 1},
        "train": {
            "method": "full", "sharding": "fsdp", "offload": "none", "precision": "bf16-mixed", "attention": "sdpa",
            "optimizer": "adamw_fused", "micro_batch": 1, "seq_len": 4096, "grad_accum": 1, "checkpointing": "full",
            "loss": "chunked",
        },
    }  # fmt: skip
    for path, value in changes.items():
        *sections, name = path.split("__")
        section: dict[str, Any] = case
        for step in sections:
            section = section.setdefault(step, {})
        if value is DELETED:
            del section[name]
        else:
            section[name] = value
    return case


def one_gpu(**changes):
    return case_of(**{"hardware__gpus_per_node": 1, "train__sharding": "none", **changes})


MALFORMED = [
    (case_of(id=DELETED), "id is missing"), (case_of(model=DELETED), "model is missing"),
    (case_of(model__model_type="alexnet"), 'model_type "alexnet"'),
    (case_of(model__num_hidden_layers=DELETED), "num_hidden_layers"),
    (case_of(model__hidden_size=10**12), "parameters"), (case_of(colour="red"), "colour"),
    (case_of(train__shardng="fsdp"), "sharding?"), (case_of(train__seq_len=DELETED), "train.seq_len is missing"),
    (case_of(train__seq_len="4k"), "train.seq_len"), (case_of(train__micro_batch=0), "train.micro_batch"),
    (case_of(train__micro_batch=10**30), "train.micro_batch"), (case_of(train__sharding="fdsp"), "none, ddp, zero1"),
    (case_of(recipe__residual_dtype="fp64"), "fp32, fp16, bf16"),
    (case_of(recipe__node_network_bytes_per_s=0), "recipe.node_network_bytes_per_s"),
    (case_of(hardware__gpu="A100-SXM4"), "A100-SXM4-40GB"), (case_of(hardware__gpu=DELETED), "hardware.gpu is missing"),
    (case_of(hardware__vram=1), "gpu, gpus_per_node, nodes, vram_bytes"),
    (case_of(hardware={"gpus": []}), "hardware.host is missing"),
]  # fmt: skip
PHYSICAL = [
    (case_of(train__precision="fp8"), "8.9; A100-SXM4-80GB has 8.0"),
    (case_of(train__checkpointing="every_n"), "every_n needs n"),
    (case_of(train__checkpointing="full", train__n=2), "checkpointing: every_n"),
    (case_of(train__checkpointing="every_n", train__n=33), "32 blocks"),
    (case_of(train__loss="eager", train__loss_chunk_tokens=256), "loss: chunked"),
    (case_of(train__sharding="fsdp", train__offload="nvme_all"), "zero3, not fsdp"),
    (one_gpu(train__layerwise=True), "layerwise is of method: galore"),
    (one_gpu(train__method="galore", train__optimizer="adamw", train__layerwise=True, train__grad_accum=2),
     "layerwise"),
    (one_gpu(train__optimizer_in_backward=True, train__grad_accum=2), "grad_accum 1, not 2"),
    (case_of(train__quant="nf4"), "method: qlora"),
    (case_of(train__fp8_recipe="delayed"), "precision: fp8"),
    (case_of(train__method="lora", train__lora_targets=["wq"]), "q_proj"),
    (case_of(train__method="lora", train__lora_targets=[]), "empty list"),
    (case_of(recipe__longest_seq=100), "train.seq_len 4096"),
    (one_gpu(model=GPT_2), "1024 positions"),
]  # fmt: skip
OURS = [
    (case_of(train__sharding="none"), "8 GPUs"),
    (one_gpu(train__method="galore", train__optimizer="paged_adamw_8bit"), "inside galore runs"),
    (case_of(train__method="lora", train__lora_targets=["q_proj", "lm_head"]), "'lm_head'"),
    (one_gpu(hardware__gpu="V100-32GB"), "8.0; V100-32GB has 7.0"), (case_of(train__sharding="hsdp"), "fsdp"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "fact"), [*MALFORMED, *PHYSICAL, *OURS], ids=lambda value: str(value)[:40])
def test_a_case_that_cannot_be_is_answered_with_a_sentence(case, fact):
    answer = estimate_case(case)
    assert set(answer) == {"id", "error"}
    assert answer["id"] == case.get("id")
    assert fact in answer["error"]
    assert "\n" not in answer["error"]


def test_other_software_is_refused_what_is_physically_impossible_and_not_what_only_our_runtime_cannot():
    assert [fact for case, fact in PHYSICAL if fact not in estimate_case({**case, "stack": "torchtune"})["error"]] == []
    assert not any("error" in estimate_case({**case, "stack": "some-other-trainer"}) for case, _ in OURS)
    assert estimate_case(case_of(stack="never-heard-of-it")) == estimate_case(case_of())


def test_paged_state_takes_what_the_card_has_left_and_no_more():
    """Published: 18.9 GiB peak, on a card of 24 GB, of full training whose state alone takes 15 GiB."""
    train = {
        "precision": "bf16", "optimizer": "paged_adamw_8bit", "optimizer_in_backward": True, "micro_batch": 2,
        "seq_len": 2048, "loss": "fused_linear",
    }  # fmt: skip
    fields = {f"train__{name}": value for name, value in train.items()}
    answer = estimate_case(one_gpu(stack="torchtune", hardware__gpu="RTX-4090", **fields))
    assert answer["fits"]
    assert answer["memory"]["peak_allocated_bytes"] / GIB == pytest.approx(18.9, rel=0.05)
    assert answer["memory"]["peak_reserved_bytes"] < answer["memory"]["device_bytes"] < 24 * GIB


def test_fits_compares_the_need_with_what_the_card_grants_and_with_the_host_ram_for_an_offload():
    read = read_case(case_of())
    need = estimate_memory(read.shape, read.configuration, read.device).need_bytes
    assert estimate_case(case_of(hardware__vram_bytes=need))["fits"]
    assert not estimate_case(case_of(hardware__vram_bytes=need - 1))["fits"]
    assert read_case(case_of(hardware__vram_bytes=10**15)).device == read.device, "a cap never raises what a card has"
    offload = {"train__sharding": "zero3", "train__offload": "optimizer", "train__optimizer": "adamw"}
    for ram_gib, fits in ((1024, True), (32, False)):
        hardware = msgspec.to_builtins(machine("8xA100-SXM4-80GB", ram_bytes=ram_gib * GIB))
        assert estimate_case(case_of(hardware=hardware, **offload))["fits"] is fits


def test_a_machine_of_the_catalogue_is_the_machine_of_its_spec_and_no_rate_may_be_zero():
    spec = msgspec.to_builtins(machine("2x8xA100-SXM4-80GB", ram_bytes=None))
    assert estimate_case(case_of(hardware__nodes=2)) == estimate_case(case_of(hardware=spec))
    many = {**msgspec.to_builtins(machine("2xCPU")), "num_cpu_devices": 10**12}
    with pytest.raises(InputError, match="memory_bytes_per_s of Test CPU would be 0"):
        read_case(case_of(hardware=many, train__sharding="ddp", train__precision="fp32"))


def test_an_offloaded_state_is_counted_in_host_ram_or_on_nvme_and_its_adam_is_deepspeeds():
    offload = {"train__sharding": "zero3", "train__offload": "optimizer"}
    host, disk = (
        estimate_case(case_of(**{**offload, "train__offload": each}, train__optimizer="adamw"))["memory"]
        for each in ("optimizer", "nvme_all")
    )
    assert host["host_bytes"] > 12 * 8.03e9 and host["nvme_bytes"] == 0
    assert disk["nvme_bytes"] > 12 * 8.03e9
    for optimizer in ("adamw", "adamw_fused", "deepspeed_cpu_adam"):
        read = read_case(case_of(**offload, train__optimizer=optimizer))
        assert read.configuration.strategy.optimizer is Optimizer.DEEPSPEED_CPU_ADAM


def test_a_recipe_reaches_the_estimates():
    policy = {
        "longest_seq": 8192, "residual_dtype": "fp32", "adapter_dtype": "bf16", "reduce_dtype": "fp16",
        "reduce_every_micro_batch": True, "flash_generation": 3, "loops_over_experts": True,
        "node_network_bytes_per_s": 25e9, "pcie_p2p": False,
    }  # fmt: skip
    read = read_case(case_of(recipe=policy, hardware__gpu="RTX-A6000"))
    choices = read.configuration.policy
    assert (choices.longest_seq, choices.reduces_every_micro_batch) == (8192, True)
    assert (choices.residual_bytes, choices.adapter_bytes, choices.reduce_bytes) == (4, 2, 2)
    assert (read.device.network_bytes_per_s, read.device.has_peer_access) == (25_000_000_000, False)
    over_nvlink = read_case(case_of(recipe__pcie_p2p=False)).device
    assert (over_nvlink.link_kind, over_nvlink.has_peer_access) == (LinkKind.NVLINK, True)


def test_what_runs_reaches_the_estimates():
    train = {
        "method": "qlora", "quant": "nf4", "lora_rank": 64, "lora_targets": ["q_proj", "v_proj"], "n": 4,
        "checkpointing": "every_n", "loss_chunk_tokens": 256, "compile": True, "activation_offload": True,
        "optimizer_in_backward": True,
    }  # fmt: skip
    configuration = read_case(one_gpu(**{f"train__{name}": value for name, value in train.items()})).configuration
    lora = configuration.lora
    assert (configuration.quant, lora.rank, lora.targets) == (Quant.NF4, 64, ("q_proj", "v_proj"))
    assert (configuration.checkpoint_every_n, configuration.loss_chunk_tokens) == (4, 256)
    assert configuration.compile and configuration.activation_offload and configuration.optimizer_in_backward
    galore = read_case(one_gpu(train__method="galore", train__optimizer="adamw", train__galore_rank=512)).configuration
    assert galore.galore.rank == 512


def test_a_size_without_a_speed_is_no_answer():
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 8}
    neox = {"model_type": "gpt_neox", "vocab_size": 50304, **sizes}
    assert "memory" in estimate_case(one_gpu(model=neox))
    assert "error" in estimate_case(one_gpu(model={**neox, "rotary_pct": 1e300}))


# What a prediction case may name; more may be known.
GPUS = tuple(
    """V100-16GB V100-32GB T4 RTX-2080Ti RTX-3060-12GB RTX-3070-8GB RTX-3090 RTX-4060-8GB RTX-4060Ti-16GB
RTX-4070-12GB RTX-4080 RTX-4090 RTX-5070Ti RTX-5090 A10G A10 A30 L4 L40S RTX-A5000 RTX-A6000 RTX-6000-Ada
A100-SXM4-40GB A100-SXM4-80GB A100-PCIe-80GB A800-SXM4-80GB H100-SXM5-80GB H100-PCIe-80GB H100-96GB-HBM2e H200 GH200
B200 B300 GB200""".split()  # noqa: SIM905 - as many lines as names otherwise
)


def test_every_gpu_that_a_case_may_name_is_a_row():
    assert set(GPUS) <= set(GPU_SPECS)
