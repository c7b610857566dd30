"""The files that a user writes to train with shardwise, TRL, Unsloth, Axolotl and plain Accelerate, for a contest.

All have the same model, rows in the same order, precision, recomputation, optimizer and learning rate. Only plain
Accelerate holds the logits of a whole micro batch: with the same settings, shardwise, TRL and Axolotl compute the loss
in chunks, and Unsloth, which has no other, in its fused head. shardwise is compared twice: with these settings pinned,
and with everything except the job and its precision chosen by the planner. The others are too: the best settings are
those of their own documentation for speed on a large card.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from msgspec.structs import replace

from shardwise.trainer.spec.value import Value

SEED, LORA_RANK, LORA_ALPHA = 0, 16, 32
PLANNED_STEPS = 1000  # in ten steps a compilation would not pay
BETAS = (0.9, 0.95)  # those of shardwise
LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # of a Llama's block


class Contest(Value, frozen=True, kw_only=True):
    """One comparison."""

    name: str
    model: str  # a preset of trainer/presets
    method: str  # full, lora, qlora
    precision: str  # bf16: weights, state and computation; bf16-mixed: autocast, frozen weights in bf16
    micro_batch: int
    lr: float
    seq_len: int = 2048
    num_steps: int = 10
    checkpointing: str = "full"


class PeerJob(NamedTuple):
    """A contest with the paths for a trainer."""

    contest: Contest
    seq_len: int
    model: Path
    rows: Path  # lines of {"input_ids": [...], "labels": [...], "attention_mask": [...]}, in the order of training
    own_rows: Path  # the rows for shardwise, which makes that order itself
    folder: Path
    is_cuda: bool

    @property
    def has_adapters(self) -> bool:
        return self.contest.method != "full"

    @property
    def is_quantised(self) -> bool:
        return self.contest.method == "qlora"


class Code(str):
    """An expression: its repr is itself, also inside another value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def planned_job(job: PeerJob) -> str:
    """shardwise with the job and its precision, planned for a run of usual length and ended like the others."""
    return _job_file(_job_settings(job) | {"pin.precision": job.contest.precision, "train.steps": PLANNED_STEPS})


def pinned_job(job: PeerJob) -> str:
    """shardwise with the settings of the others."""
    contest = job.contest
    pins = {
        "pin.sharding": "none",
        "pin.precision": contest.precision,
        "pin.optimizer": "adamw_fused",
        "pin.checkpointing": contest.checkpointing,
        "pin.loss": "chunked",
        "pin.attention": "sdpa",
        "pin.micro_batch": contest.micro_batch,
        "pin.compile": False,
    }
    return _job_file(_job_settings(job) | pins)


def _job_settings(job: PeerJob) -> dict[str, Any]:
    contest = job.contest
    lora = {"train.lora.rank": LORA_RANK, "train.lora.alpha": LORA_ALPHA} if job.has_adapters else {}
    return {
        "model.name": str(job.model),
        "data.train": str(job.own_rows),
        "data.format": "tokens",
        "data.eval": "none",
        "allow": ["offload_cpu", "bf16_weights"],
        "train.method": contest.method,
        **lora,
        "train.seq_len": job.seq_len,
        "train.tokens_per_step": job.seq_len * contest.micro_batch,
        "train.steps": contest.num_steps,
        "train.lr": contest.lr,
        "train.schedule": "constant",
        "train.warmup": 0,
        "train.weight_decay": 0,
        "train.seed": SEED,
        "log.device_time": False,  # a sampled step is slower
    }


def _job_file(settings: Mapping[str, Any]) -> str:
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, key = name.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return _yaml(nested)


def _yaml(settings: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(settings), sort_keys=False, default_flow_style=False, width=10_000)


def trl_script(job: PeerJob, **more: bool) -> str:
    """TRL's SFTTrainer; `more` are further arguments of its config."""
    kwargs = {"dtype": "bfloat16"} | ({"quantization_config": Code("quantization")} if job.is_quantised else {})
    settings = _trainer_arguments(job) | {"model_init_kwargs": kwargs, "max_length": job.seq_len, **more}
    trainer = {
        "model": str(job.model),
        "train_dataset": Code("rows"),
        "args": Code(_call("SFTConfig", settings, indent=4)),
        **({"peft_config": Code(_lora())} if job.has_adapters else {}),
    }
    return _script(
        ["import torch"] if job.is_quantised else [],
        ["from datasets import load_dataset"],
        ["from peft import LoraConfig"] if job.has_adapters else [],
        ["from transformers import BitsAndBytesConfig"] if job.is_quantised else [],
        ["from trl import SFTConfig, SFTTrainer", ""],
        _quantisation(job),
        [f'rows = load_dataset("json", data_files={str(job.rows)!r}, split="train")'],
        [f"trainer = {_call('SFTTrainer', trainer)}", "trainer.train()"],
    )


def best_trl_script(job: PeerJob) -> str:
    """TRL's SFTTrainer with the fastest settings of a large card: Liger's kernels and head, nothing recomputed."""
    return trl_script(_without_recomputation(job), use_liger_kernel=True)


def unsloth_script(job: PeerJob) -> str:
    """Unsloth's model in TRL's SFTTrainer, as in its notebooks; its kernels and fused loss are always in use."""
    contest, is_recomputed = job.contest, job.contest.checkpointing != "none"
    load = {
        "model_name": str(job.model),
        "max_seq_length": job.seq_len,
        "dtype": Code("torch.bfloat16"),
        "load_in_4bit": job.is_quantised,
        "load_in_16bit": contest.method == "lora",
        "full_finetuning": not job.has_adapters,
        "use_gradient_checkpointing": is_recomputed,
        "random_state": SEED,
    }
    adapters = {
        "": Code("model"),
        "r": LORA_RANK,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0,
        "target_modules": LINEAR_LAYERS,
        "use_gradient_checkpointing": is_recomputed,
        "random_state": SEED,
    }
    settings = _trainer_arguments(job) | {"max_length": job.seq_len}
    trainer = {
        "model": Code("model"),
        "processing_class": Code("tokenizer"),
        "train_dataset": Code("rows"),
        "args": Code(_call("SFTConfig", settings, indent=4)),
    }
    return _script(
        ["from unsloth import FastLanguageModel  # before the libraries that it changes", ""],
        ["import torch", "from datasets import load_dataset", "from trl import SFTConfig, SFTTrainer", ""],
        [f"model, tokenizer = {_call('FastLanguageModel.from_pretrained', load)}"],
        [f"model = {_call('FastLanguageModel.get_peft_model', adapters)}"] if job.has_adapters else [],
        [f'rows = load_dataset("json", data_files={str(job.rows)!r}, split="train")'],
        [f"trainer = {_call('SFTTrainer', trainer)}", "trainer.train()"],
    )


def best_unsloth_script(job: PeerJob) -> str:
    """Unsloth with nothing recomputed: its offloaded recomputation saves memory, which a large card has."""
    return unsloth_script(_without_recomputation(job))


def axolotl_config(job: PeerJob) -> str:
    """Axolotl with the settings of the others: chunked loss, without its kernels for adapters."""
    kernels = dict.fromkeys(_AXOLOTL_LORA_KERNELS, False) if job.has_adapters else {}
    return _yaml(_axolotl_settings(job) | {"chunked_cross_entropy": True} | kernels)


def best_axolotl_config(job: PeerJob) -> str:
    """Axolotl with the fastest settings of a large card: Liger's kernels and head, its own kernels for adapters."""
    fused = {
        "plugins": ["axolotl.integrations.liger.LigerPlugin"],
        "liger_rope": True,
        "liger_rms_norm": True,
        "liger_glu_activation": not job.has_adapters,  # with adapters Axolotl's own kernel computes the MLP
        "liger_fused_linear_cross_entropy": True,
    }
    kernels = dict.fromkeys(_AXOLOTL_LORA_KERNELS, True) if job.has_adapters else {}
    return _yaml(_axolotl_settings(_without_recomputation(job)) | fused | kernels)


_AXOLOTL_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")  # on by default where they can be


def _axolotl_settings(job: PeerJob) -> dict[str, Any]:
    contest, is_recomputed = job.contest, job.contest.checkpointing != "none"
    adapters = {
        "adapter": contest.method,
        "load_in_4bit": job.is_quantised,
        "lora_r": LORA_RANK,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "lora_target_modules": LINEAR_LAYERS,
    }
    return {
        "base_model": str(job.model),
        **(adapters if job.has_adapters else {}),
        "datasets": [{"path": str(job.rows), "ds_type": "json", "type": None}],  # no type: the rows are tokens already
        "dataset_prepared_path": str(job.folder / "prepared"),
        "shuffle_merged_datasets": False,
        "curriculum_sampling": True,  # the order of the file
        "val_set_size": 0,
        "sequence_len": job.seq_len,
        "sample_packing": False,
        "pad_to_sequence_len": False,
        "micro_batch_size": contest.micro_batch,
        "gradient_accumulation_steps": 1,
        "max_steps": contest.num_steps,
        "num_epochs": 1,
        "optimizer": "adamw_torch_fused",
        "adam_beta2": BETAS[1],
        "learning_rate": contest.lr,
        "lr_scheduler": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": job.is_cuda,  # weights in bf16 and autocast; Axolotl has no bf16 without autocast, nor any on a CPU
        "tf32": False,
        "gradient_checkpointing": is_recomputed,
        **({"gradient_checkpointing_kwargs": {"use_reentrant": False}} if is_recomputed else {}),
        "attn_implementation": "sdpa",
        "seed": SEED,
        "logging_steps": 1,
        "save_strategy": "no",
        "output_dir": str(job.folder / "out"),
    }


def _without_recomputation(job: PeerJob) -> PeerJob:
    return job._replace(contest=replace(job.contest, checkpointing="none"))


def accelerate_script(job: PeerJob) -> str:
    """A loop by hand with Accelerate: the model of transformers with its own loss, torch's AdamW."""
    contest = job.contest
    mixed = "bf16" if contest.precision == "bf16-mixed" else "no"
    optimizer = {"lr": contest.lr, "betas": BETAS, "weight_decay": 0.0, "fused": True}
    load: dict[str, Any] = {"": str(job.model), "dtype": "bfloat16"}
    if job.is_quantised:
        load |= {"quantization_config": Code("quantization"), "device_map": {"": 0 if job.is_cuda else "cpu"}}
    peft = ["LoraConfig", "get_peft_model"] if job.has_adapters else []
    peft += ["prepare_model_for_kbit_training"] if job.is_quantised else []
    names = ["AutoModelForCausalLM", *(["BitsAndBytesConfig"] if job.is_quantised else [])]
    return _script(
        ["import json", "", "import torch", "from accelerate import Accelerator"],
        [f"from peft import {', '.join(peft)}"] if peft else [],
        [f"from transformers import {', '.join(names)}", ""],
        [f"torch.manual_seed({SEED})", f"accelerator = Accelerator(mixed_precision={mixed!r})"],
        _quantisation(job),
        [f"model = {_call('AutoModelForCausalLM.from_pretrained', load)}"],
        ["model = prepare_model_for_kbit_training(model)"] if job.is_quantised else [],
        [f"model = get_peft_model(model, {_lora()})"] if job.has_adapters else [],
        _checkpointing(job),
        [
            "weights = [weight for weight in model.parameters() if weight.requires_grad]",
            f"optimizer = {_call('torch.optim.AdamW', {'': Code('weights')} | optimizer)}",
            f"with open({str(job.rows)!r}) as file:",
            "    rows = [torch.tensor(json.loads(line)['input_ids']) for line in file]",
            f"batches = torch.utils.data.DataLoader(rows, batch_size={contest.micro_batch})",
            "model, optimizer, batches = accelerator.prepare(model, optimizer, batches)",
            "model.train()",
            "for step, ids in enumerate(batches, start=1):",
            "    loss = model(input_ids=ids, labels=ids, use_cache=False).loss",
            "    accelerator.backward(loss)",
            "    accelerator.clip_grad_norm_(weights, 1.0)",
            "    optimizer.step()",
            "    optimizer.zero_grad()",
            "    print(step, float(loss))",
        ],
    )


def _trainer_arguments(job: PeerJob) -> dict[str, Any]:
    """Arguments of transformers' Trainer, which TRL is based on."""
    contest, is_checkpointed = job.contest, job.contest.checkpointing != "none"
    return {
        "output_dir": str(job.folder / "out"),
        "per_device_train_batch_size": contest.micro_batch,
        "max_steps": contest.num_steps,
        "learning_rate": contest.lr,
        "lr_scheduler_type": "constant",
        "adam_beta2": BETAS[1],
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": is_checkpointed,
        **({"gradient_checkpointing_kwargs": {"use_reentrant": False}} if is_checkpointed else {}),
        "bf16": contest.precision == "bf16-mixed",
        "train_sampling_strategy": "sequential",
        "seed": SEED,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        **({} if job.is_cuda else {"use_cpu": True}),
    }


def _checkpointing(job: PeerJob) -> list[str]:
    if job.contest.checkpointing == "none":
        return []
    lines = ["model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"]
    return lines + (["model.enable_input_require_grads()"] if job.has_adapters else [])


def _quantisation(job: PeerJob) -> list[str]:
    if not job.is_quantised:
        return []
    settings = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": Code("torch.bfloat16"),
    }
    return [f"quantization = {_call('BitsAndBytesConfig', settings)}"]


def _lora() -> str:
    return f'LoraConfig(r={LORA_RANK}, lora_alpha={LORA_ALPHA}, target_modules="all-linear", task_type="CAUSAL_LM")'


def _call(name: str, settings: Mapping[str, Any], *, indent: int = 0) -> str:
    """A call, an argument per line; an argument without a name is positional."""
    arguments = [f"{key}={value!r}" if key else repr(value) for key, value in settings.items()]
    room = " " * indent
    return "\n".join([f"{name}(", *(f"{room}    {argument}," for argument in arguments), f"{room})"])


def _script(*parts: Iterable[str]) -> str:
    return "\n".join(line for part in parts for line in part) + "\n"
