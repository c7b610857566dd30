"""Saves checkpoints as other libraries do, in a rank of gloo: `foreign_worker.py MODEL_FOLDER OUT KIND ...`.

For each kind the ranks train the model of a folder for two steps under its engine and save what that engine saves, as
OUT/KIND. Rank 0 writes, beside it, the logits of a plain model with the trained weights, gathered by the engine itself.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

IDS = torch.arange(24).reshape(1, 24) % 251


def save_zero(stage: int, model: Any, out: Path) -> dict[str, torch.Tensor]:
    """DeepSpeed's own folder: two parameter groups, a frozen weight, and fp32 masters beside bf16 weights."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for a minute
    model.model.norm.weight.requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if (each.ndim > 1) is decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=config, dist_init_required=False
    )
    for _ in range(2):
        engine.backward(engine(input_ids=IDS, labels=IDS).loss)
        engine.step()
    engine.save_checkpoint(str(out), tag="global_step2", client_state={"epoch": 1})
    masters = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            masters[name] = safe_get_full_fp32_param(parameter).clone()
        else:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                masters[name] = parameter.detach().float().clone()
    return masters


def save_dcp(model: Any, out: Path) -> dict[str, Any]:
    """torch's own distributed checkpoint of model and optimizer, as torchtitan writes it."""
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    save_distributed({"model": weights, "optimizer": state, "step": 2}, checkpoint_id=out)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def save_accelerate(kind: str, model: Any, out: Path) -> dict[str, torch.Tensor]:
    """Accelerate's `save_state`, under DDP or FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    plugin = None
    if kind == "accelerate-fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type="SHARDED_STATE_DICT",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )  # fmt: skip
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if plugin is not None:
        from shardwise.trainer.runtime.engines.cpu_ranks import use_fsdp_branch

        use_fsdp_branch(accelerator, plugin, None)  # W1: Accelerate drops it for ranks on a CPU
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    train(model, optimizer)
    accelerator.save_state(str(out), safe_serialization=kind != "accelerate-bin")
    weights = accelerator.get_state_dict(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    return weights


def train(model: Any, optimizer: Any) -> None:
    for _ in range(2):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def save(kind: str, folder: str, out: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if kind.startswith("zero"):
        weights = save_zero(int(kind.removeprefix("zero")), model, out)
    elif kind == "dcp":
        weights = save_dcp(model, out)
    else:
        weights = save_accelerate(kind, model, out)
    if dist.get_rank() == 0:
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        plain_names = {name.removeprefix("module."): each for name, each in weights.items()}
        found = plain.load_state_dict(plain_names, strict=False)
        assert not found.unexpected_keys and {*found.missing_keys} <= {"lm_head.weight"}, found
        plain.tie_weights()
        with torch.no_grad():
            save_file({"logits": plain(input_ids=IDS).logits}, out.with_name(f"{out.name}.logits"))
    dist.barrier()


def main() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    dist.init_process_group("gloo")
    folder, out, *kinds = sys.argv[1:]
    for kind in kinds:
        save(kind, folder, Path(out, kind))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
