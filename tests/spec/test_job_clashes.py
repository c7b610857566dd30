"""Two settings that exclude each other are one line that says which, and what would do."""

from typing import Any

import pytest

from trainer.spec.errors import InputProblemsError
from trainer.spec.job_clashes import CLASHES, GALORE_OPTIMIZERS, OFFLOAD_SHARDINGS
from trainer.spec.job_fields import BY_PATH
from trainer.spec.job_file import Layer, read_job, read_layers
from trainer.spec.strategy import Offload, Optimizer, Sharding

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


CASES = [
    ({"data": {"train": "x"}}, "model is missing; write model.name (weights to start from) or model.config"),
    (
        job(model={"name": "a/b", "config": "c", "tokenizer": "t"}),
        "model.name and model.config exclude each other; name starts from weights, config from scratch",
    ),
    (job(model={"config": "tiny-llama"}), "model.tokenizer is missing; model.config starts from scratch"),
    (job(model={"name": "a/b", "tokenizer": "train"}), "model.tokenizer: train and model.name exclude each other"),
    (
        job(model=SCRATCH, data={"train": "x", "format": "tokens"}),
        "data.format: tokens and model.tokenizer: train exclude each other",
    ),
    (
        job(model={"name": "a/b", "trust_remote_code": "a/c"}),
        "model.trust_remote_code is a/c, but the model is a/b; only the model's own code can be trusted",
    ),
    ({"model": {"name": "a/b"}}, "data.train is missing; write a file, a folder or a list of them"),
    (job(data={"train": ["a", "b"], "eval": "b"}), "data.eval is b, which is also learned (data.train)"),
    (
        job(data={"train": "o/n", "eval": {"source": "o/n", "split": "train"}}),
        "data.eval is o/n, which is also learned (data.train)",
    ),
    (
        job(data={"train": "x", "format": "text", "chat_template": "chatml"}),
        "data.chat_template and data.format: text exclude each other",
    ),
    (
        job(data={"train": "x", "format": "prompt_completion", "loss_on": "assistant"}),
        "data.loss_on: assistant and data.format: prompt_completion exclude each other; it needs chat",
    ),
    (
        job(data={"train": "x", "format": "text", "loss_on": "completion"}),
        "data.loss_on: completion and data.format: text exclude each other; it needs prompt_completion or chat",
    ),
    (job(data={"train": "x", "bad_rows_max": "1%"}), "data.bad_rows_max counts only with data.bad_rows: skip"),
    (
        job(data={"train": "x", "streaming": True}),
        "data.streaming and train.epochs exclude each other; a stream has no length: write train.steps or train.tokens",
    ),
    (
        job(data={"train": "x", "format": "text"}, train={"objective": "dpo"}),
        "train.objective: dpo and data.format: text exclude each other; it learns from preference",
    ),
    (
        job(data={"train": "x", "format": "preference"}, train={"objective": "sft"}),
        "train.objective: sft and data.format: preference exclude each other",
    ),
    (
        job(data={"train": "x", "format": "chat"}, train={"objective": "pretrain"}),
        "train.objective: pretrain and data.format: chat exclude each other; it learns from text or tokens",
    ),
    (
        job(model=SCRATCH, train={"objective": "dpo"}),
        "train.objective: dpo and model.config exclude each other; it starts from a trained model: write model.name",
    ),
    (
        job(model=SCRATCH, train={"method": "qlora"}),
        "train.method: qlora and model.config exclude each other; qlora freezes weights that do not exist yet",
    ),
    (job(model=SCRATCH, train={"method": "lora"}), "train.method: lora and model.config exclude each other"),
    (
        job(train={"seq_len": 3000}),
        "train.tokens_per_step is 65536 (the default), not a multiple of train.seq_len 3000; "
        "the nearest are 63000 and 66000",
    ),
    (
        job(train={"seq_len": 2048, "tokens_per_step": 65000}),
        "train.tokens_per_step is 65000, not a multiple of train.seq_len 2048; the nearest are 63488 and 65536",
    ),
    (
        job(train={"seq_len": 2048, "tokens_per_step": 100}),
        "train.tokens_per_step is 100, not a multiple of train.seq_len 2048; the least is 2048",
    ),
    (job(train={"steps": 5, "epochs": 1}), "train.epochs and train.steps exclude each other; keep one"),
    (
        job(train={"steps": 5, "epochs": 1, "tokens": "1M"}),
        "train.epochs, train.steps and train.tokens exclude each other; keep one",
    ),
    (job(train={"epochs": None}), "train.epochs is empty; write train.epochs, train.steps or train.tokens"),
    (
        job(train={"tokens": 1000}),
        "train.tokens is 1000, less than the 65536 of one step (train.tokens_per_step)",
    ),
    (
        job(train={"steps": 10, "warmup": 11}),
        "train.warmup is 11 steps, longer than the run of 10 (train.steps)",
    ),
    (
        job(train={"lora": {"targets": ["all-linear", "q_proj"]}}),
        "train.lora.targets: all-linear stands alone; it already names every linear layer",
    ),
    (job(limits={"cost": 10}), "limits.cost needs price_per_gpu_hour"),
    (job(limits={"nvme": {"size": "1TB"}}), "limits.nvme.size needs limits.nvme.path, a folder on a local NVMe disk"),
    (job(pin={"offload": "nvme_optimizer"}), "pin.offload: nvme_optimizer needs limits.nvme.path"),
    (
        job(pin={"offload": "optimizer", "sharding": "ddp"}),
        "pin.offload: optimizer and pin.sharding: ddp exclude each other; it works with zero1, zero2 or zero3",
    ),
    (
        job(pin={"optimizer": "deepspeed_cpu_adam", "offload": "none"}),
        "pin.optimizer: deepspeed_cpu_adam and pin.offload: none exclude each other; it updates state in host RAM",
    ),
    (
        job(pin={"optimizer": "deepspeed_cpu_adam", "sharding": "fsdp"}),
        "pin.optimizer: deepspeed_cpu_adam and pin.sharding: fsdp exclude each other; "
        "it works with zero1, zero2 or zero3",
    ),
    (
        job(train={"method": "galore"}, pin={"optimizer": "lion"}),
        "train.method: galore and pin.optimizer: lion exclude each other; "
        "inside GaLore runs adamw, adamw_8bit or adafactor",
    ),
    (job(pin={"fp8_recipe": "delayed"}), "pin.fp8_recipe: delayed needs pin.precision: fp8"),
    (
        job(pin={"fp8_recipe": "delayed", "precision": "bf16"}),
        "pin.fp8_recipe: delayed needs pin.precision: fp8",
    ),
    (
        job(pin={"micro_batch": 3}),
        "pin.micro_batch is 3, which does not divide the 32 sequences of a step "
        "(train.tokens_per_step / train.seq_len); the nearest that does is 2",
    ),
    (
        job(pin={"micro_batch": 64}),
        "pin.micro_batch is 64, which does not divide the 32 sequences of a step "
        "(train.tokens_per_step / train.seq_len); the nearest that does is 32",
    ),
    (
        job(pin={"optimizer_in_backward": True, "micro_batch": 8, "sharding": "none"}),
        "pin.optimizer_in_backward leaves no gradients to add up, but pin.micro_batch 8 on one rank needs "
        "4 micro batches a step; write pin.micro_batch: 32",
    ),
    (
        job(pin={"optimizer": "lomo", "micro_batch": 16, "sharding": "none"}),
        "pin.optimizer: lomo leaves no gradients to add up",
    ),
    (job(pin={"checkpointing_n": 4}), "pin.checkpointing_n: 4 needs pin.checkpointing: every_n"),
    (
        job(pin={"checkpointing": "full", "checkpointing_n": 2}),
        "pin.checkpointing_n: 2 needs pin.checkpointing: every_n",
    ),
    (
        job(pin={"checkpointing": "selective", "activation_offload": True}),
        "pin.activation_offload and pin.checkpointing: selective exclude each other",
    ),
    (
        job(pin={"sharding": "none"}, slurm={"nodes": 2}),
        "pin.sharding: none runs on one device, but slurm.nodes is 2; write pin.sharding: ddp",
    ),
    (
        job(data={"train": "x", "eval": "none"}, eval={"early_stop": 3}),
        "eval.early_stop and data.eval: none exclude each other; write data.eval: 1%",
    ),
    (
        job(data={"train": "x", "eval": "none"}, eval={"every": "5 steps"}),
        "eval.every and data.eval: none exclude each other; write data.eval: 1%",
    ),
]


@pytest.mark.parametrize(("tree", "sentence"), CASES, ids=[sentence[:60] for _, sentence in CASES])
def test_each_clash_is_one_line_with_what_would_do(tree, sentence):
    (line,) = problems(tree)
    assert line.startswith(f"job.yaml: {sentence}")
    assert len(line) < 200


@pytest.mark.parametrize("clash", CLASHES, ids=lambda clash: clash.sentence.__name__)
def test_every_rule_is_met_by_a_case(clash):
    jobs = [read_layers([Layer(tree, "job")], origin="job", checks_clashes=False).job for tree, _ in CASES]
    assert any(clash.sentence(value) for value in jobs)


@pytest.mark.parametrize("clash", CLASHES, ids=lambda clash: clash.sentence.__name__)
def test_every_rule_names_settings_that_exist(clash):
    assert set(clash.paths) <= set(BY_PATH)


@pytest.mark.parametrize("offload", Offload)
@pytest.mark.parametrize("sharding", Sharding)
def test_offload_goes_with_the_shardings_of_its_row_only(offload, sharding):
    tree = job(pin={"offload": offload.value, "sharding": sharding.value}, limits={"nvme": {"path": "/nvme"}})
    assert (problems(tree) == ()) is (offload is Offload.NONE or sharding in OFFLOAD_SHARDINGS[offload])


@pytest.mark.parametrize("optimizer", Optimizer)
def test_galore_runs_its_own_optimizers_only(optimizer):
    tree = job(train={"method": "galore"}, pin={"optimizer": optimizer.value})
    assert (problems(tree) == ()) is (optimizer in GALORE_OPTIMIZERS)


@pytest.mark.parametrize(
    "tree",
    [
        job(model=SCRATCH),
        job(data={"train": "o/n", "eval": {"source": "o/n", "split": "dev"}}),
        job(model={"config": "folder", "tokenizer": "org/tokenizer"}),
        job(model={"name": "a/b", "trust_remote_code": "a/b"}),
        job(train={"method": "full", "lora": {"rank": 8}, "galore": {"rank": 8}}),
        job(train={"method": "qlora", "lora": {"dora": True}}),
        job(train={"steps": 10, "warmup": 10}),
        job(train={"seq_len": 131072, "tokens_per_step": 131072}),
        job(data={"train": "x", "streaming": True}, train={"steps": 10}),
        job(data={"train": "x", "eval": "none"}, checkpoint={"best": "eval_loss"}),
        job(limits={"cost": 10}, price_per_gpu_hour=2),
        job(pin={"optimizer": "deepspeed_cpu_adam"}),
        job(pin={"optimizer": "deepspeed_cpu_adam", "sharding": "zero2", "offload": "optimizer"}),
        job(pin={"optimizer_in_backward": True, "micro_batch": 32, "sharding": "none"}),
        job(pin={"optimizer_in_backward": True, "micro_batch": 8, "sharding": "ddp"}),
        job(pin={"fp8_recipe": "mxfp8", "precision": "fp8"}),
        job(pin={"sharding": "none"}, slurm={"nodes": 1}),
    ],
    ids=lambda tree: str({key: value for key, value in tree.items() if value != job().get(key)})[:60],
)
def test_settings_that_go_together_are_no_clash(tree):
    assert problems(tree) == ()


def test_a_clash_of_a_setting_that_could_not_be_read_is_not_shown():
    assert problems(job(train={"seq_len": "long", "tokens_per_step": 65001})) == (
        'job.yaml: train.seq_len is "long"; expected a number of tokens of at least 8',
    )
