"""Two settings that exclude each other are one line that names both and the remedy."""

from typing import Any

import pytest

from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import InputProblemsError
from shardwise.trainer.spec.job.fields import BY_PATH
from shardwise.trainer.spec.job.reading import CLASHES, GALORE_OPTIMIZERS, Layer, read_job, read_layers
from shardwise.trainer.spec.optimizers import Optimizer

SCRATCH = {"config": "tiny-llama", "tokenizer": "train"}


def job(**settings: Any) -> dict[str, Any]:
    """A good job of two lines; a section that is given replaces its own."""
    return {"model": {"name": "org/model"}, "data": {"train": "text.txt"}, **settings}


def problems(tree: dict[str, Any]) -> tuple[str, ...]:
    try:
        read_job(tree, origin="job.yaml")
    except InputProblemsError as error:
        return error.problems
    return ()


BATCH = {"tokens_per_step": 65536}
CASES = [  # a job, what the line must name
    ({"data": {"train": "x"}}, ("model", "model.name", "model.config")),
    (job(model={"name": "a/b", "config": "c", "tokenizer": "t"}), ("model.name", "model.config")),
    (job(model={"config": "tiny-llama"}), ("model.tokenizer", "model.config")),
    (job(model={"name": "a/b", "tokenizer": "train"}), ("model.tokenizer: train", "model.name")),
    (job(model=SCRATCH, data={"train": "x", "format": "tokens"}), ("data.format: tokens", "model.tokenizer: train")),
    (job(model={"name": "a/b", "trust_remote_code": "a/c"}), ("model.trust_remote_code", "a/c", "a/b")),
    ({"model": {"name": "a/b"}}, ("data.train",)),
    (job(data={"train": ["a", "b"], "eval": "b"}), ("data.eval", "data.train")),
    (job(data={"train": "o/n", "eval": {"source": "o/n", "split": "train"}}), ("data.eval", "o/n", "data.train")),
    (job(data={"train": "x", "format": "text", "chat_template": "chatml"}),
     ("data.chat_template", "data.format: text")),
    (job(data={"train": "x", "format": "prompt_completion", "loss_on": "assistant"}),
     ("data.loss_on: assistant", "data.format: prompt_completion", "chat")),
    (job(data={"train": "x", "format": "text", "loss_on": "completion"}),
     ("data.loss_on: completion", "data.format: text", "prompt_completion or chat")),
    (job(data={"train": "x", "bad_rows_max": "1%"}), ("data.bad_rows_max", "data.bad_rows: skip")),
    (job(data={"train": "x", "streaming": True}), ("data.streaming", "train.epochs", "train.steps", "train.tokens")),
    (job(data={"train": "x", "format": "text"}, train={"objective": "dpo"}),
     ("train.objective: dpo", "data.format: text", "preference")),
    (job(data={"train": "x", "format": "preference"}, train={"objective": "sft"}),
     ("train.objective: sft", "data.format: preference")),
    (job(data={"train": "x", "format": "chat"}, train={"objective": "pretrain"}),
     ("train.objective: pretrain", "data.format: chat", "text or tokens")),
    (job(model=SCRATCH, train={"objective": "dpo"}), ("train.objective: dpo", "model.config", "model.name")),
    (job(model=SCRATCH, train={"method": "qlora"}), ("train.method: qlora", "model.config")),
    (job(model=SCRATCH, train={"method": "lora"}), ("train.method: lora", "model.config")),
    (job(train={"seq_len": 3000, "tokens_per_step": 65536}),
     ("train.tokens_per_step", "65536", "train.seq_len", "3000", "63000", "66000", "or auto")),
    (job(train={"seq_len": 2048, "tokens_per_step": 65000}),
     ("train.tokens_per_step", "65000", "train.seq_len", "2048", "63488", "65536")),
    (job(train={"seq_len": 2048, "tokens_per_step": 100}), ("train.tokens_per_step", "100", "train.seq_len", "2048")),
    (job(train={"steps": 5, "epochs": 1}), ("train.epochs", "train.steps")),
    (job(train={"steps": 5, "epochs": 1, "tokens": "1M"}), ("train.epochs", "train.steps", "train.tokens")),
    (job(train={"tokens": 1000, "tokens_per_step": 65536}), ("train.tokens", "1000", "65536", "train.tokens_per_step")),
    (job(train={"steps": 10, "warmup": 11}), ("train.warmup", "11", "10", "train.steps")),
    (job(train={"lora": {"targets": ["all-linear", "q_proj"]}}), ("train.lora.targets: all",)),
    (job(limits={"cost": 10}), ("limits.cost", "price_per_gpu_hour")),
    (job(limits={"nvme": {"size": "1TB"}}), ("limits.nvme.size", "limits.nvme.path")),
    (job(pin={"offload": "nvme_optimizer"}), ("pin.offload: nvme_optimizer", "limits.nvme.path")),
    (job(pin={"offload": "optimizer", "sharding": "ddp"}),
     ("pin.offload: optimizer", "pin.sharding: ddp", "zero1, zero2 or zero3")),
    (job(pin={"optimizer": "deepspeed_cpu_adam", "offload": "none"}),
     ("pin.optimizer: deepspeed_cpu_adam", "pin.offload: none")),
    (job(pin={"optimizer": "deepspeed_cpu_adam", "sharding": "fsdp"}),
     ("pin.optimizer: deepspeed_cpu_adam", "pin.sharding: fsdp", "zero1, zero2 or zero3")),
    (job(train={"method": "galore"}, pin={"optimizer": "lion"}),
     ("train.method: galore", "pin.optimizer: lion", "adamw, adamw_8bit or adafactor")),
    (job(pin={"fp8_recipe": "delayed"}), ("pin.fp8_recipe: delayed", "allow: [fp8]", "pin.precision: fp8")),
    (job(pin={"fp8_recipe": "delayed", "precision": "bf16"}, allow=["fp8"]),
     ("pin.fp8_recipe: delayed", "pin.precision: fp8")),
    (job(train=BATCH, pin={"micro_batch": 3}),
     ("pin.micro_batch", "3", "32", "is 2", "train.tokens_per_step", "train.seq_len")),
    (job(train=BATCH, pin={"micro_batch": 64}),
     ("pin.micro_batch", "64", "is 32", "train.tokens_per_step", "train.seq_len")),
    (job(train=BATCH, pin={"optimizer_in_backward": True, "micro_batch": 8, "sharding": "none"}),
     ("pin.optimizer_in_backward", "pin.micro_batch", "8", "4", "pin.micro_batch: 32")),
    (job(train=BATCH, pin={"optimizer": "lomo", "micro_batch": 16, "sharding": "none"}), ("pin.optimizer: lomo",)),
    (job(pin={"sharding": "fsdp", "shard_group": 4}), ("pin.shard_group: 4", "pin.sharding: hsdp")),
    (job(pin={"checkpointing_n": 4}), ("pin.checkpointing_n: 4", "pin.checkpointing: every_n")),
    (job(pin={"checkpointing": "full", "checkpointing_n": 2}),
     ("pin.checkpointing_n: 2", "pin.checkpointing: every_n")),
    (job(pin={"checkpointing": "selective", "activation_offload": True}),
     ("pin.activation_offload", "pin.checkpointing: selective")),
    (job(pin={"sharding": "none"}, slurm={"nodes": 2}),
     ("pin.sharding: none", "slurm.nodes", "2", "pin.sharding: ddp")),
    (job(data={"train": "x", "eval": "none"}, eval={"early_stop": 3}),
     ("eval.early_stop", "data.eval: none", "data.eval: 1%")),
    (job(data={"train": "x", "eval": "none"}, eval={"every": "5 steps"}),
     ("eval.every", "data.eval: none", "data.eval: 1%")),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "facts"), CASES, ids=["-".join(facts)[:60] for _, facts in CASES])
def test_each_clash_is_one_line_with_what_would_do(tree, facts):
    (line,) = problems(tree)
    assert line.startswith(f"job.yaml: {facts[0]}") and all(fact in line for fact in facts), line
    assert len(line) < 200


def test_every_rule_is_met_by_a_case_and_names_settings_that_exist():
    jobs = [read_layers([Layer(tree, "job")], origin="job", checks_clashes=False).job for tree, _ in CASES]
    assert [clash.sentence.__name__ for clash in CLASHES if not any(map(clash.sentence, jobs))] == []
    assert {path for clash in CLASHES for path in clash.paths} <= set(BY_PATH)


@pytest.mark.parametrize("offload", Offload)
def test_offload_goes_with_the_shardings_of_its_row_only(offload):
    for sharding in Sharding:
        tree = job(pin={"offload": offload.value, "sharding": sharding.value}, limits={"nvme": {"path": "/nvme"}})
        goes = offload is Offload.NONE or offload in sharding.facts.offloads
        assert (problems(tree) == ()) is goes, sharding


@pytest.mark.parametrize("optimizer", Optimizer)
def test_galore_runs_its_own_optimizers_only(optimizer):
    tree = job(train={"method": "galore"}, pin={"optimizer": optimizer.value})
    assert (problems(tree) == ()) is (optimizer in GALORE_OPTIMIZERS)


@pytest.mark.parametrize(
    "tree",
    [
        job(model=SCRATCH), job(data={"train": "o/n", "eval": {"source": "o/n", "split": "dev"}}),
        job(model={"config": "folder", "tokenizer": "org/tokenizer"}),
        job(model={"name": "a/b", "trust_remote_code": "a/b"}),
        job(train={"method": "full", "lora": {"rank": 8}, "galore": {"rank": 8}}),
        job(train={"method": "qlora", "lora": {"dora": True}}), job(train={"steps": 10, "warmup": 10}),
        job(train={"seq_len": 131072, "tokens_per_step": 131072}),
        job(data={"train": "x", "streaming": True}, train={"steps": 10}),
        job(data={"train": "x", "eval": "none"}, checkpoint={"best": "eval_loss"}),
        job(limits={"cost": 10}, price_per_gpu_hour=2), job(pin={"optimizer": "deepspeed_cpu_adam"}),
        job(pin={"optimizer": "deepspeed_cpu_adam", "sharding": "zero2", "offload": "optimizer"}),
        job(train=BATCH, pin={"optimizer_in_backward": True, "micro_batch": 32, "sharding": "none"}),
        job(pin={"optimizer_in_backward": True, "micro_batch": 8, "sharding": "none"}), job(pin={"micro_batch": 3}),
        job(train={"seq_len": 3000}), job(train={"epochs": None}), job(train={"tokens": 1000}),
        job(pin={"optimizer_in_backward": True, "micro_batch": 8, "sharding": "ddp"}),
        job(pin={"fp8_recipe": "mxfp8", "precision": "fp8"}), job(pin={"fp8_recipe": "torchao_rowwise"}, allow=["fp8"]),
        job(pin={"sharding": "none"}, slurm={"nodes": 1}),
    ],
    ids=lambda tree: str({key: value for key, value in tree.items() if value != job().get(key)})[:60],
)  # fmt: skip
def test_settings_that_go_together_are_no_clash(tree):
    assert problems(tree) == ()


def test_a_clash_of_a_setting_that_could_not_be_read_is_not_shown():
    (line,) = problems(job(train={"seq_len": "long", "tokens_per_step": 65001}))
    assert line.startswith('job.yaml: train.seq_len is "long"')
