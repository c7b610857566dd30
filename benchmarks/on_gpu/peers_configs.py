"""The files that a person writes for a trainer which is a program: YAML and TOML, generated for a contest, counted.

shardwise itself comes twice: with the settings of the contest pinned, and with the job and its precision alone, where
everything else is the planner's.
"""

from pathlib import Path
from typing import Any

import yaml

from on_gpu.peers_contests import BETAS, LORA_ALPHA, LORA_RANK, SEED, PeerJob, data_of

TORCHTITAN_FLAVORS = {"llama-3.1-8b": "8B"}  # what its llama3 has of the models that are compared
NO_CHECKPOINTS = "100000 steps"  # apart, as the others are told to save nothing


def planned_job(job: PeerJob) -> str:
    """shardwise, with nothing but the job, in the precision that all are compared in."""
    return job_file(_job_words(job) | {"pin.precision": job.contest.precision})


def pinned_job(job: PeerJob) -> str:
    """shardwise, with the settings that the others are given."""
    contest = job.contest
    pins = {
        "pin.sharding": "none",
        "pin.precision": contest.precision,
        "pin.optimizer": "adamw_fused",
        "pin.checkpointing": contest.checkpointing,
        "pin.attention": "sdpa",
        "pin.micro_batch": contest.micro_batch,
    }
    return job_file(_job_words(job) | pins)


def _job_words(job: PeerJob) -> dict[str, Any]:
    contest = job.contest
    lora = {"train.lora.rank": LORA_RANK, "train.lora.alpha": LORA_ALPHA} if contest.method != "full" else {}
    return {
        "model.name": str(job.model),
        **data_of(job.own_rows),
        "train.method": contest.method,
        **lora,
        "train.seq_len": job.seq_len,
        "train.tokens_per_step": job.tokens_per_step,
        "train.steps": job.num_steps,
        "train.lr": contest.lr,
        "train.schedule": "constant",
        "train.warmup": 0,
        "train.weight_decay": 0,
        "train.seed": SEED,
        "checkpoint.every": NO_CHECKPOINTS,
    }


def job_file(words: dict[str, Any]) -> str:
    """A job file from settings by their dotted names, a setting a line."""
    nested: dict[str, Any] = {}
    for name, value in words.items():
        *sections, key = name.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return _yaml(nested)


def axolotl_config(job: PeerJob) -> str:
    """Axolotl: rows that are tokenised already are a dataset without a `type`."""
    contest = job.contest
    adapters = {
        "adapter": contest.method,
        "lora_r": LORA_RANK,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "lora_target_linear": True,
    }
    return _yaml({
        "base_model": str(job.model_with_tokenizer),
        "datasets": [{"path": str(job.rows), "ds_type": "json"}],
        "shuffle_merged_datasets": False,
        "curriculum_sampling": True,
        "dataset_prepared_path": str(job.folder / "prepared"),
        "val_set_size": 0.0,
        "output_dir": str(job.folder / "out"),
        **(adapters if contest.method != "full" else {}),
        **({"load_in_4bit": True} if contest.method == "qlora" else {}),
        "sequence_len": job.seq_len,
        "sample_packing": False,
        "micro_batch_size": contest.micro_batch,
        "gradient_accumulation_steps": contest.accumulation,
        "max_steps": job.num_steps,
        "num_epochs": 1,
        "optimizer": "adamw_torch_fused",
        "adam_beta2": BETAS[1],
        "learning_rate": contest.lr,
        "lr_scheduler": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": "full" if contest.precision == "bf16" else True,
        "gradient_checkpointing": contest.checkpointing != "none",
        "seed": SEED,
        "logging_steps": 1,
        "save_strategy": "no",
    })  # fmt: skip


def llamafactory_config(job: PeerJob) -> str:
    """LLaMA-Factory: rows that are tokenised already are a folder that `datasets` saved."""
    contest = job.contest
    adapters = {"lora_rank": LORA_RANK, "lora_alpha": LORA_ALPHA, "lora_target": "all"}
    quantised = {"quantization_bit": 4, "quantization_type": "nf4", "double_quantization": True}
    return _yaml({
        "model_name_or_path": str(job.model_with_tokenizer),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full" if contest.method == "full" else "lora",
        **(adapters if contest.method != "full" else {}),
        **(quantised if contest.method == "qlora" else {}),
        "dataset": "rows",
        "tokenized_path": str(saved_rows(job)),
        "template": "default",
        "cutoff_len": job.seq_len,
        "disable_shuffling": True,
        "output_dir": str(job.folder / "out"),
        "per_device_train_batch_size": contest.micro_batch,
        "gradient_accumulation_steps": contest.accumulation,
        "max_steps": job.num_steps,
        "optim": "adamw_torch_fused",
        "adam_beta2": BETAS[1],
        "learning_rate": contest.lr,
        "lr_scheduler_type": "constant",
        "pure_bf16" if contest.precision == "bf16" else "bf16": True,
        "disable_gradient_checkpointing": contest.checkpointing == "none",
        "flash_attn": "sdpa",
        "seed": SEED,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    })  # fmt: skip


def torchtitan_config(job: PeerJob) -> str:
    """torchtitan: text of one word a token, which its tokenizer makes the same rows of; weights of its own."""
    contest = job.contest
    sections: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": str(job.folder / "out")},
        "model": {
            "name": "llama3",
            "flavor": TORCHTITAN_FLAVORS[contest.model],
            "hf_assets_path": str(job.model_with_tokenizer),
        },
        "optimizer": {"name": "AdamW", "lr": contest.lr, "beta2": BETAS[1], "weight_decay": 0.0},
        "lr_scheduler": {"warmup_steps": 0, "decay_ratio": 0.0},
        "training": {
            "local_batch_size": contest.micro_batch,
            "global_batch_size": job.sequences_per_step,
            "seq_len": job.seq_len,
            "max_norm": 1.0,
            "steps": job.num_steps,
            "dataset": "c4_test",
            "dataset_path": str(text_rows(job)),
            "dtype": "bfloat16" if contest.precision == "bf16" else "float32",
        },
        "metrics": {"log_freq": 1},
        "activation_checkpoint": {"mode": contest.checkpointing},
    }
    return "\n".join(line for name, values in sections.items() for line in _toml(name, values)) + "\n"


def saved_rows(job: PeerJob) -> Path:
    """Where the rows are as `datasets` saves them."""
    return job.rows.with_suffix(".saved")


def text_rows(job: PeerJob) -> Path:
    """Where the rows are as text, in a folder of its own."""
    return job.rows.with_suffix(".text")


def _yaml(settings: dict[str, Any]) -> str:
    return yaml.safe_dump(settings, sort_keys=False, default_flow_style=False, width=10_000)


def _toml(section: str, values: dict[str, Any]) -> list[str]:
    written = {str: lambda value: f'"{value}"', bool: lambda value: str(value).lower()}
    return [
        f"[{section}]",
        *(f"{name} = {written.get(type(value), str)(value)}" for name, value in values.items()),
        "",
    ]
