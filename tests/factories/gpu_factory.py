"""Attempts of one GPU: a small Llama over full rows, planned for the card that is there, started as a run is."""

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from engine_plan_factory import engine_plan
from operator_cache import folder_with_operators
from rank_factory import NUM_EVAL_ROWS, write_rows

from shardwise.launch.engine.launcher import launch_command, launch_environment, prepare_attempt
from shardwise.trainer.planning.candidates import configuration_of
from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.device import device_of
from shardwise.trainer.planning.memory import estimate_memory
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.search.configurations import smallest_buckets
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.job.sections import GaloreJob, Job, Limits, LoraJob, TrainJob
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Report
from shardwise.trainer.spec.strategy import Attention, Checkpointing, Fp8Recipe, LossHead, Method, Precision

SEQ_LEN, MICRO_BATCH = 512, 4
NUM_STEPS, NUM_ROWS = 6, 64
DOCUMENT_TOKENS = 160  # of packed rows, whose last document is shorter
TIMEOUT_S = 600
# 160 million parameters: states of 2.5 GiB under AdamW, activations of as much, and every side a multiple of 128.
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": SEQ_LEN,
}  # fmt: skip
_MODULES = {
    "flash-attn": "flash_attn", "transformer-engine": "transformer_engine", "torchao": "torchao",
    "liger-kernel": "liger_kernel", "triton": "triton",
}  # fmt: skip


# So that gradients weigh more than activations.
_FEW_TOKENS: dict[str, Any] = {"checkpointing": Checkpointing.FULL, "micro_batch": 1}


class GpuCase(NamedTuple):
    """One technique: its row and settings, what it needs, and what must be seen of it."""

    name: str
    settings: dict[str, Any] = {}
    capability: tuple[int, int] = (8, 0)
    libraries: tuple[str, ...] = ()
    seen: tuple[tuple[str, str], ...] = ()  # (fact of the report, pattern)
    train: dict[str, Any] = {}
    learns: bool = True  # six steps lower the loss
    tolerance: float = 0.10  # of the predicted peak
    is_packed: bool = False  # rows of several documents

    @property
    def sharding(self) -> Sharding:
        return Sharding(self.settings.get("sharding", Sharding.NONE))

    @property
    def precision(self) -> Precision:
        return Precision(self.settings.get("precision", Precision.BF16_MIXED))


# Blocks with torchao's layers are compiled, and show no products.
_FP8_SEEN = {"transformer-engine": ("fp8 products", r"^[1-9]"), "torchao": ("fp8 layer class", r"^Float8Linear$")}


def _fp8(policy: Fp8Recipe, least: tuple[int, int], library: str, sharding: Sharding = Sharding.NONE) -> GpuCase:
    return GpuCase(
        f"fp8-{policy}" if sharding is Sharding.NONE else f"fp8-{policy}-{sharding}",
        {"precision": Precision.FP8, "fp8_recipe": policy, "sharding": sharding}, capability=least,
        libraries=(library,), seen=(_FP8_SEEN[library], ("fp8 recipe", policy), ("fp8 library", library)),
    )  # fmt: skip


def _optimizer(optimizer: Optimizer, *seen: tuple[str, str], lr: float = 1e-3, **more: Any) -> GpuCase:
    return GpuCase(f"optimizer-{optimizer}", {"optimizer": optimizer, "lr": lr}, seen=seen, **more)


def _galore(inner: Optimizer, *seen: tuple[str, str], layerwise: bool = False) -> GpuCase:
    galore = GaloreJob(rank=128, update_gap=4, layerwise=layerwise)
    name, settings = f"galore-{inner}{'-layerwise' * layerwise}", {"method": Method.GALORE, "optimizer": inner}
    return GpuCase(name, settings | _FEW_TOKENS, seen=(("projectors", "128"), *seen), train={"galore": galore})


def _adapters(name: str, method: Method, *seen: tuple[str, str], **settings: Any) -> GpuCase:
    settings = {"method": method, "checkpointing": Checkpointing.FULL, **settings}
    return GpuCase(name, settings, seen=seen, train={"lora": LoraJob(rank=16)})


def _fused_linear(name: str, sharding: Sharding = Sharding.NONE) -> GpuCase:
    settings = {"loss": LossHead.FUSED_LINEAR, "sharding": sharding}
    return GpuCase(f"loss-fused_linear{name}", settings, libraries=("liger-kernel",))


def _checkpointing(checkpointing: Checkpointing, num_blocks: int, **more: Any) -> GpuCase:
    seen = (("checkpointing", rf"{num_blocks} of 8 blocks"),)
    return GpuCase(f"checkpointing-{checkpointing}", {"checkpointing": checkpointing, **more}, seen=seen)


def _packed(name: str, kept_apart_by: str, **settings: Any) -> GpuCase:
    return GpuCase(f"packed-{name}", settings, seen=(("documents", kept_apart_by),), is_packed=True)


def _offload(sharding: Sharding, offload: Offload, method: Method = Method.FULL) -> GpuCase:
    is_zero = sharding.uses_deepspeed
    optimizer = Optimizer.DEEPSPEED_CPU_ADAM if is_zero else Optimizer.ADAMW_FUSED
    name = f"{sharding}+{offload}" if method is Method.FULL else f"{sharding}+{offload}-{method}"
    return GpuCase(name, {"sharding": sharding, "offload": offload, "optimizer": optimizer, "method": method})


# Engines that one rank can run; DistributedDataParallel wraps nothing there.
ENGINES_OF_ONE = (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3, Sharding.FSDP, Sharding.FSDP_GRAD_OP)
EIGHT_BIT, NF4 = ("optimizer_state", r"uint8"), ("4-bit layers", r"nf4")
INSIDE = ("updates", r"inside the backward pass")
GPU_CASES: tuple[GpuCase, ...] = (
    GpuCase("fp32", {"precision": Precision.FP32}),
    GpuCase("bf16-mixed", {}),
    GpuCase("fp16-mixed", {"precision": Precision.FP16_MIXED}, capability=(7, 0), seen=(("loss scale", r"^[0-9]"),)),
    GpuCase("bf16", {"precision": Precision.BF16}),
    GpuCase("flash", {"attention": Attention.FLASH}, libraries=("flash-attn",)),
    GpuCase("few-tokens", _FEW_TOKENS),
    _checkpointing(Checkpointing.FULL, 8),
    _checkpointing(Checkpointing.SELECTIVE, 8),
    _checkpointing(Checkpointing.ATTENTION, 8),
    _checkpointing(Checkpointing.EVERY_N, 4, checkpoint_every_n=2),
    GpuCase("activation_offload", {"activation_offload": True}, seen=(("activation_offload", r"tensors of 7 blocks"),)),
    GpuCase(  # what the compiler saves is its own decision
        "compile", {"compile": True}, libraries=("triton",), seen=(("compile", r"8 of 8 blocks"),), tolerance=0.15,
    ),
    GpuCase("loss-eager", {"loss": LossHead.EAGER}),
    GpuCase("loss-fused", {"loss": LossHead.FUSED}),
    _fused_linear(""),
    *(_fused_linear(f"-{sharding}", sharding) for sharding in ENGINES_OF_ONE),
    _optimizer(Optimizer.ADAMW_8BIT, EIGHT_BIT),
    _optimizer(Optimizer.PAGED_ADAMW, ("optimizer_state", r"paged")),
    _optimizer(Optimizer.PAGED_ADAMW_8BIT, EIGHT_BIT, ("optimizer_state", r"paged")),
    _optimizer(Optimizer.LION_8BIT, EIGHT_BIT, lr=1e-4),
    _optimizer(Optimizer.ADEMAMIX_8BIT, EIGHT_BIT),
    _optimizer(Optimizer.LAMB_8BIT, EIGHT_BIT, lr=1e-2),
    _optimizer(Optimizer.ADAFACTOR, lr=1e-2),
    _optimizer(Optimizer.LION, lr=1e-4),
    _optimizer(Optimizer.MUON),
    _optimizer(Optimizer.LOMO, INSIDE, lr=1e-2, learns=False),
    _optimizer(Optimizer.ADALOMO, INSIDE, lr=1e-2),
    GpuCase("optimizer_in_backward", {"optimizer_in_backward": True, **_FEW_TOKENS}, seen=(INSIDE,)),
    _adapters("lora", Method.LORA, ("adapters", r"float32")),
    _adapters("qlora", Method.QLORA, NF4, ("checkpointing", r"8 of 8 blocks"), optimizer=Optimizer.PAGED_ADAMW),
    _adapters(
        "qlora-table-on-host", Method.QLORA, NF4, ("embedding table", r"in host RAM; lookups: \d+$"),
        optimizer=Optimizer.PAGED_ADAMW, embedding_on_host=True,
    ),
    _galore(Optimizer.ADAMW),
    _galore(Optimizer.ADAMW_8BIT, EIGHT_BIT),
    _galore(Optimizer.ADAFACTOR),
    _galore(Optimizer.ADAMW, INSIDE, layerwise=True),
    _fp8(Fp8Recipe.DELAYED, (8, 9), "transformer-engine"),
    _fp8(Fp8Recipe.CURRENT, (8, 9), "transformer-engine"),
    *(_fp8(Fp8Recipe.CURRENT, (8, 9), "transformer-engine", sharding) for sharding in ENGINES_OF_ONE),
    _fp8(Fp8Recipe.BLOCK, (9, 0), "transformer-engine"),
    _fp8(Fp8Recipe.MXFP8, (10, 0), "transformer-engine"),
    _fp8(Fp8Recipe.NVFP4, (10, 0), "transformer-engine"),
    _fp8(Fp8Recipe.TORCHAO_TENSORWISE, (8, 9), "torchao"),
    _fp8(Fp8Recipe.TORCHAO_ROWWISE, (9, 0), "torchao"),
    *(_packed(sharding, "varlen_attn", sharding=sharding) for sharding in (Sharding.NONE, *ENGINES_OF_ONE)),
    _packed("fp32", "by document", precision=Precision.FP32),
    _packed("recomputed", "varlen_attn", checkpointing=Checkpointing.FULL),
    _packed("qlora", "varlen_attn", method=Method.QLORA, checkpointing=Checkpointing.FULL),
    _offload(Sharding.ZERO2, Offload.OPTIMIZER),
    _offload(Sharding.ZERO3, Offload.OPTIMIZER),
    _offload(Sharding.ZERO3, Offload.OPTIMIZER_PARAMS),
    *(_offload(Sharding.FSDP, Offload.OPTIMIZER_PARAMS, method) for method in (Method.FULL, Method.LORA, Method.QLORA)),
)  # fmt: skip
# (a technique, what it is held against): the first needs less.
SAVINGS = (
    ("activation_offload", "bf16-mixed"), ("checkpointing-full", "bf16-mixed"),
    ("checkpointing-selective", "bf16-mixed"), ("checkpointing-every_n", "bf16-mixed"),
    ("loss-fused_linear", "loss-eager"), ("loss-fused", "loss-eager"), ("optimizer-adamw_8bit", "bf16-mixed"),
    ("optimizer_in_backward", "few-tokens"), ("lora", "checkpointing-full"), ("qlora", "lora"),
    ("qlora-table-on-host", "qlora"),
    ("galore-adamw", "few-tokens"), ("galore-adamw-layerwise", "galore-adamw"), ("zero2+optimizer", "bf16-mixed"),
    ("zero3+optimizer+params", "zero3+optimizer"), ("fsdp+optimizer+params", "bf16-mixed"),
)  # fmt: skip


def case_named(name: str) -> GpuCase:
    return next(case for case in GPU_CASES if case.name == name)


def missing_for(case: GpuCase) -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability < case.capability:
        return f"needs compute capability {case.capability[0]}.{case.capability[1]}"
    absent = [name for name in case.libraries if importlib.util.find_spec(_MODULES[name]) is None]
    return f"needs {', '.join(absent)}" if absent else None


def write_full_rows(cache_dir: Path, *, are_packed: bool = False) -> Path:
    """A token cache of the standard library's own text in rows that are all full, so that every step is alike."""
    write_rows(cache_dir, num_rows=NUM_ROWS + NUM_EVAL_ROWS, seq_len=SEQ_LEN, shortest=SEQ_LEN)
    if are_packed:
        layout = json.loads((cache_dir / "layout.json").read_text())
        rows = np.arange(0, layout["num_tokens"], SEQ_LEN)
        starts = np.add.outer(rows, np.arange(0, SEQ_LEN, DOCUMENT_TOKENS)).flatten()
        starts.astype("<i8").tofile(cache_dir / "starts.bin")
        (cache_dir / "layout.json").write_text(json.dumps(layout | {"is_packed": True, "num_starts": len(starts)}))
    return cache_dir


def gpu_plan(case: GpuCase, cache_dir: Path, hardware: Hardware, *, config: dict[str, Any] = LLAMA) -> Plan:
    settings = {
        "sharding": Sharding.NONE, "offload": Offload.NONE, "precision": Precision.BF16_MIXED,
        "optimizer": Optimizer.ADAMW_FUSED, "loss": LossHead.CHUNKED, "loss_chunk_tokens": 1024,
        "micro_batch": MICRO_BATCH, "accumulation": 1, "lr": 1e-3, **case.settings,
    }  # fmt: skip
    lr, num_rows = settings.pop("lr"), settings["micro_batch"] * settings["accumulation"]
    if settings["loss"] is not LossHead.CHUNKED:
        settings["loss_chunk_tokens"] = None
    job = Job(train=TrainJob(seq_len=SEQ_LEN, tokens_per_step=SEQ_LEN * num_rows, **case.train), limits=Limits())
    plan = engine_plan(
        settings.pop("sharding"), settings.pop("offload"), kind=hardware.device_kind, hardware=hardware, job=job,
        seq_len=SEQ_LEN, **settings,
    )  # fmt: skip
    data = msgspec.structs.replace(
        plan.data, cache_dir=str(cache_dir), num_rows=NUM_ROWS, num_tokens=NUM_ROWS * SEQ_LEN, longest_row=SEQ_LEN,
        num_eval_rows=NUM_EVAL_ROWS, is_packed=case.is_packed,
    )  # fmt: skip
    schedule = msgspec.structs.replace(
        plan.schedule, num_steps=NUM_STEPS, sequences_per_step=num_rows, tokens_per_step=num_rows * SEQ_LEN, lr=lr,
        warmup_steps=1,
    )  # fmt: skip
    plan = msgspec.structs.replace(  # a trial is a few steps, nothing scored, saved or exported
        plan, model_config=config, model_shape=read_model_shape(config), data=data, schedule=schedule, is_trial=True
    )
    configuration = setting_of_case(plan)
    memory = estimate_memory(plan.model_shape, configuration, device_of(hardware))
    chosen = msgspec.structs.replace(plan.chosen, memory=memory, buckets=configuration.buckets)
    return msgspec.structs.replace(plan, candidates=(chosen,))


def setting_of_case(plan: Plan) -> Configuration:
    buckets = smallest_buckets(plan.model_shape, plan.chosen.strategy)
    return msgspec.structs.replace(configuration_of(context_of(plan), plan.chosen), buckets=buckets)


class GpuRun(NamedTuple):
    plan: Plan
    report: Report
    losses: list[float]
    skipped: list[int]  # indices of `losses`: after such a step the weights are what they were


def run_on_gpu(plan: Plan, run_dir: Path) -> GpuRun:
    """Starts the plan as the supervisor would, and reads what it wrote; fails with the end of its output."""
    run_dir.mkdir(parents=True, exist_ok=True)
    codec.write(run_dir / "plan.json", plan)
    attempt_dir = prepare_attempt(plan, plan.chosen, run_dir=run_dir, resume=False)
    extensions_dir = _operators(plan)
    environment = launch_environment(
        os.environ, plan, extensions_dir=extensions_dir, cores=plan.hardware.host.num_cores or 1
    )
    argv = launch_command(attempt_dir, log_dir=None, python=sys.executable)
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    path = attempt_dir / "report.json"
    assert path.exists(), f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    report = codec.read(path, Report)
    assert report.error is None, f"{report.error}\n{done.stderr[-4000:]}"
    return finished_run(run_dir)


def finished_run(run_dir: Path) -> GpuRun:
    report = codec.read(next((run_dir / "attempts").glob("*/report.json")), Report)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    skipped = [index for index, row in enumerate(rows) if row.get("skipped")]
    return GpuRun(codec.read(run_dir / "plan.json", Plan), report, [row["loss"] for row in rows], skipped)


@contextmanager
def held(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _operators(plan: Plan) -> Path:
    """Where built operators lie; CPU Adam is built where a plan needs it."""
    if plan.chosen.strategy.optimizer is Optimizer.DEEPSPEED_CPU_ADAM:
        return Path(folder_with_operators("cpu_adam"))
    folder = Path(plan.data.cache_dir or ".").parent / "extensions"
    folder.mkdir(exist_ok=True)
    return folder
