"""The Python that a person writes for a trainer which is a library: generated for a contest, run as it is, counted.

Nothing of a benchmark is in them: the clock comes from outside (peer_scripts/with_clock.py). Of the bare loop it takes
the line that it prints.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from on_gpu.peers_contests import BETAS, LORA_ALPHA, LORA_RANK, SEED, PeerJob


class Code(str):
    """An expression, which is written as it is, also inside of another value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def trl_script(job: PeerJob) -> str:
    """TRL's SFTTrainer."""
    kwargs = {"dtype": _dtype(job)} | ({"quantization_config": Code("quantization")} if _is_quantised(job) else {})
    settings = _arguments(job) | {"model_init_kwargs": kwargs, "max_length": job.seq_len}
    trainer = {
        "model": str(job.model_with_tokenizer),
        "train_dataset": Code("rows"),
        "args": Code(_call("SFTConfig", settings, indent=4)),
    }
    peft = ["LoraConfig"] if _has_adapters(job) else []
    return _script(
        ["import torch"] if _is_quantised(job) else [],
        ["from datasets import load_dataset"],
        [f"from peft import {', '.join(peft)}"] if peft else [],
        ["from transformers import BitsAndBytesConfig"] if _is_quantised(job) else [],
        ["from trl import SFTConfig, SFTTrainer", ""],
        _quantisation(job),
        [_rows(job)],
        [f"trainer = {_call('SFTTrainer', trainer | _peft_config(job))}", "trainer.train()"],
    )


def transformers_script(job: PeerJob) -> str:
    """transformers' Trainer, which is Accelerate underneath."""
    trainer = {
        "model": Code("model"),
        "train_dataset": Code("rows"),
        "data_collator": Code("default_data_collator"),
        "args": Code(_call("TrainingArguments", _arguments(job), indent=4)),
    }
    names = ["AutoModelForCausalLM", "Trainer", "TrainingArguments", "default_data_collator"]
    return _script(
        *_imports(job, ["import json", ""], names),
        _quantisation(job),
        [f"with open({str(job.rows)!r}) as file:", "    rows = [json.loads(line) for line in file]"],
        _model(job),
        [f"trainer = {_call('Trainer', trainer)}", "trainer.train()"],
    )


def bare_script(job: PeerJob) -> str:
    """A loop by hand: the model of transformers with its own loss, torch's AdamW."""
    contest, device = job.contest, "cuda" if job.is_cuda else "cpu"
    is_mixed = contest.precision == "bf16-mixed"
    forward = "loss = model(input_ids=ids, labels=ids, use_cache=False).loss / " + str(contest.accumulation)
    optimizer = {"lr": contest.lr, "betas": BETAS, "weight_decay": 0.0, "fused": True}
    return _script(
        *_imports(job, ["import json", "", "import torch"], ["AutoModelForCausalLM"]),
        _quantisation(job),
        _model(job, to=device),
        _checkpointing(job),
        [
            "model.train()",
            "weights = [weight for weight in model.parameters() if weight.requires_grad]",
            f"optimizer = {_call('torch.optim.AdamW', {'': Code('weights')} | optimizer, is_short=True)}",
            f"with open({str(job.rows)!r}) as file:",
            "    rows = torch.tensor([json.loads(line)['input_ids'] for line in file])",
            f"for step, batch in enumerate(rows.split({job.sequences_per_step}), start=1):",
            "    total = 0.0",
            f"    for ids in batch.split({contest.micro_batch}):",
            f"        ids = ids.to({device!r})",
            *([f"        with torch.autocast({device!r}, torch.bfloat16):"] if is_mixed else []),
            f"        {'    ' if is_mixed else ''}{forward}",
            "        loss.backward()",
            "        total += loss.detach()",
            "    torch.nn.utils.clip_grad_norm_(weights, 1.0)",
            "    optimizer.step()",
            "    optimizer.zero_grad()",
            "    print(step, float(total))",
        ],
    )


def unsloth_script(job: PeerJob) -> str:
    """Unsloth, which patches the model and TRL's trainer."""
    contest = job.contest
    load = {
        "model_name": str(job.model_with_tokenizer),
        "max_seq_length": job.seq_len,
        "dtype": Code("torch.bfloat16"),
        "load_in_4bit": _is_quantised(job),
        "full_finetuning": not _has_adapters(job),
        "use_gradient_checkpointing": contest.checkpointing != "none",
    }
    adapters = {
        "": Code("model"),
        "r": LORA_RANK,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0,
        "target_modules": [
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        ],
        "use_gradient_checkpointing": contest.checkpointing != "none",
        "random_state": SEED,
    }  # fmt: skip
    trainer = {
        "model": Code("model"),
        "processing_class": Code("tokenizer"),
        "train_dataset": Code("rows"),
        "args": Code(_call("SFTConfig", _arguments(job) | {"max_length": job.seq_len}, indent=4)),
    }
    return _script(
        ["from unsloth import FastLanguageModel", "", "import torch"],
        ["from datasets import load_dataset", "from trl import SFTConfig, SFTTrainer", ""],
        [_rows(job)],
        [f"model, tokenizer = {_call('FastLanguageModel.from_pretrained', load)}"],
        [f"model = {_call('FastLanguageModel.get_peft_model', adapters)}"] if _has_adapters(job) else [],
        [f"trainer = {_call('SFTTrainer', trainer)}", "trainer.train()"],
    )


def _arguments(job: PeerJob) -> dict[str, Any]:
    """What transformers' Trainer is told, and whatever is built on it."""
    contest, is_checkpointed = job.contest, job.contest.checkpointing != "none"
    return {
        "output_dir": str(job.folder / "out"),
        "per_device_train_batch_size": contest.micro_batch,
        **({"gradient_accumulation_steps": contest.accumulation} if contest.accumulation > 1 else {}),
        "max_steps": job.num_steps,
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


def _imports(job: PeerJob, first: list[str], names: list[str]) -> Iterable[list[str]]:
    is_torch_missing = _is_quantised(job) and "import torch" not in first
    names = sorted([*names, "BitsAndBytesConfig"] if _is_quantised(job) else names)
    peft = ["LoraConfig", "get_peft_model"] if _has_adapters(job) else []
    peft += ["prepare_model_for_kbit_training"] if _is_quantised(job) else []
    yield first
    yield ["import torch"] if is_torch_missing else []
    yield [f"from peft import {', '.join(peft)}"] if peft else []
    yield [f"from transformers import {', '.join(names)}", ""]


def _model(job: PeerJob, *, to: str | None = None) -> list[str]:
    """The lines that load the model and put adapters on it."""
    load = {"": str(job.model_with_tokenizer), "dtype": _dtype(job)}
    if _is_quantised(job):
        load |= {"quantization_config": Code("quantization"), "device_map": {"": 0 if job.is_cuda else "cpu"}}
    moved = "" if to is None or _is_quantised(job) else f".to({to!r})"
    lines = [f"torch.manual_seed({SEED})"] if to is not None else []
    lines += [f"model = {_call('AutoModelForCausalLM.from_pretrained', load, is_short=True)}{moved}"]
    if _is_quantised(job):
        is_checkpointed = job.contest.checkpointing != "none"
        lines += [f"model = prepare_model_for_kbit_training(model, use_gradient_checkpointing={is_checkpointed})"]
    if _has_adapters(job):
        lines += [f"model = get_peft_model(model, {_lora()})"]
    return lines


def _checkpointing(job: PeerJob) -> list[str]:
    if job.contest.checkpointing == "none":
        return []
    lines = ["model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"]
    return lines + (["model.enable_input_require_grads()"] if _has_adapters(job) else [])


def _quantisation(job: PeerJob) -> list[str]:
    if not _is_quantised(job):
        return []
    settings = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": Code("torch.bfloat16"),
    }
    return [f"quantization = {_call('BitsAndBytesConfig', settings)}"]


def _peft_config(job: PeerJob) -> dict[str, Any]:
    return {"peft_config": Code(_lora())} if _has_adapters(job) else {}


def _lora() -> str:
    return f'LoraConfig(r={LORA_RANK}, lora_alpha={LORA_ALPHA}, target_modules="all-linear", task_type="CAUSAL_LM")'


def _dtype(job: PeerJob) -> str:
    """What is frozen is in bf16; what is trained under autocast is in fp32."""
    return "float32" if job.contest.precision == "bf16-mixed" and not _has_adapters(job) else "bfloat16"


def _rows(job: PeerJob) -> str:
    return f'rows = load_dataset("json", data_files={str(job.rows)!r}, split="train")'


def _has_adapters(job: PeerJob) -> bool:
    return job.contest.method != "full"


def _is_quantised(job: PeerJob) -> bool:
    return job.contest.method == "qlora"


def _call(name: str, settings: Mapping[str, Any], *, indent: int = 0, is_short: bool = False) -> str:
    """A call, an argument a line or all in one; an argument without a name is by position."""
    words = [f"{key}={value!r}" if key else repr(value) for key, value in settings.items()]
    if is_short:
        return f"{name}({', '.join(words)})"
    room = " " * indent
    return "\n".join([f"{name}(", *(f"{room}    {word}," for word in words), f"{room})"])


def _script(*parts: Iterable[str]) -> str:
    return "\n".join(line for part in parts for line in part) + "\n"
