"""Attempts that a rank can run: real tokens, a tiny Llama, and what a supervisor would write beside plan.json."""

import json
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from engine_plan_factory import TINY_LLAMA, engine_plan
from msgspec.structs import replace

from shardwise.launch.engine.launcher import deepspeed_config
from shardwise.trainer.runtime.data.cache import TokenRows
from shardwise.trainer.runtime.data.row_writer import RowShape, RowWriter
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.job.sections import Job, Limits, NvmeLimit, TrainJob
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.units import MIB

SEQ_LEN = 48
NUM_EVAL_ROWS = 24
SEED = 7
LR = 3e-3
LOCKABLE_BYTES = 12 * MIB  # so little that partitions are cut into several sub-groups
SWAPPED_LLAMA = {**TINY_LLAMA, "vocab_size": 8192}  # its tables are just large enough for DeepSpeed to swap them
NUM_STEPS = 6  # of runs that are held step by step against another: enough to learn, so that a difference shows


def write_rows(
    cache_dir: Path, *, num_rows: int = 400, seq_len: int = SEQ_LEN, shortest: int = 2, is_grouped: bool = True
) -> Path:
    """A token cache of bytes of the standard library's own text, in rows of very different length."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py"))[:6])
    lengths = np.random.default_rng(0).integers(shortest, seq_len + 1, size=num_rows)
    starts = np.cumsum(lengths) - lengths
    assert starts[-1] + lengths[-1] <= len(text), "the text is too short"
    rows = np.stack([starts, lengths], axis=1).astype(np.int64)
    cache_dir.mkdir(parents=True)
    np.frombuffer(text, np.uint8).astype("<u2")[: int(lengths.sum())].tofile(cache_dir / "tokens.bin")
    np.save(cache_dir / "eval_rows.npy", rows[:NUM_EVAL_ROWS])
    np.save(cache_dir / "train_rows.npy", rows[NUM_EVAL_ROWS:])
    layout = {
        "format": 1, "dtype": "uint16", "num_tokens": int(lengths.sum()), "seq_len": seq_len, "pad_id": 0,
        "is_packed": not is_grouped,
    }  # fmt: skip
    (cache_dir / "layout.json").write_text(json.dumps(layout))
    return cache_dir


def write_packed_rows(folder: Path, *, num_rows: int = 400) -> Path:
    """A token cache of rows packed from documents of 1 to 60 bytes of text, some of them longer than a row."""
    folder.mkdir()
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py"))[:6])
    lengths = np.random.default_rng(1).integers(1, 61, size=800)
    with RowWriter(folder, np.dtype("<u2"), RowShape(SEQ_LEN, is_packed=True, eos_id=0)) as writer:
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            writer.add(list(text[end - length : end]), opens_document=True, is_held_out=False, weight=1.0)
        rows = writer.finish()
    assert len(rows.train) >= num_rows
    np.save(folder / "eval_rows.npy", rows.train[:NUM_EVAL_ROWS])
    np.save(folder / "train_rows.npy", rows.train[NUM_EVAL_ROWS:num_rows])
    return folder


def ranks_of(sharding: Sharding) -> int:
    """Two ranks where there are several; of hybrid sharding four, on two machines."""
    return {Sharding.NONE: 1, Sharding.HSDP: 4}.get(sharding, 2)


def rank_plan(
    cache_dir: Path, sharding: Sharding = Sharding.NONE, offload: Offload = Offload.NONE, *, num_steps: int = 10,
    sequences_per_step: int = 8, eval_every_steps: int | None = None, checkpoint_every_steps: int | None = None,
    model_config: Mapping[str, Any] = TINY_LLAMA, clip: float = 1.0, lr: float = LR, train: Mapping[str, Any] = {},
    limits: Limits | None = None, **engine: Any,
) -> Plan:  # fmt: skip
    """`train` is of the job (lora, galore, ...), `engine` of the candidate (optimizer, method, precision, ...)."""
    settings = {"num_ranks": ranks_of(sharding), "seq_len": SEQ_LEN, "loss_chunk_tokens": 40, **engine}
    job = Job(train=TrainJob(seed=SEED, clip=clip, **train), limits=limits or Limits())
    plan = engine_plan(sharding, offload, job=job, **settings)
    steps: dict[str, Any] = {
        "num_steps": num_steps, "sequences_per_step": sequences_per_step, "warmup_steps": 3, "lr": lr,
        "eval_every_steps": eval_every_steps, "checkpoint_every_steps": checkpoint_every_steps,
        "checkpoint_every_s": None, "saving_max_share": None, "rehearses_save": False,  # nothing goes by the clock
    }  # fmt: skip
    rows: dict[str, Any] = {"num_rows": 376, "num_eval_rows": NUM_EVAL_ROWS, "is_packed": False}
    data = replace(plan.data, cache_dir=str(cache_dir), **rows)
    schedule = replace(plan.schedule, tokens_per_step=sequences_per_step * SEQ_LEN, **steps)
    fields = {**model_config, "max_position_embeddings": SEQ_LEN}
    return replace(plan, model_config=fields, data=data, schedule=schedule)


def offload_plan(cache_dir: Path, sharding: Sharding, offload: Offload, *, nvme: Path, **settings: Any) -> Plan:
    """A plan with a folder for NVMe, on a host that may lock little memory; `settings` are those of `rank_plan`."""
    settings = {"model_config": SWAPPED_LLAMA if offload.uses_nvme else TINY_LLAMA, **settings}
    plan = rank_plan(cache_dir, sharding, offload, limits=Limits(nvme=NvmeLimit(path=str(nvme))), **settings)
    chosen = plan.chosen
    if offload is Offload.NVME_OPTIMIZER:  # which the catalogue has for weights in 16 bit alone
        strategy = replace(chosen.strategy, base_config="ds_configs/zero3_nvme_optimizer.json")
        chosen = replace(chosen, strategy=strategy)
    host = replace(plan.hardware.host, memlock_limit_bytes=LOCKABLE_BYTES)
    return replace(
        plan, candidates=(chosen,), model_shape=read_model_shape(plan.model_config),
        hardware=replace(plan.hardware, host=host),
    )  # fmt: skip


def train_rows(plan: Plan) -> TokenRows:
    assert plan.data.cache_dir is not None
    return TokenRows.open(Path(plan.data.cache_dir), "train")


def write_attempt(run_dir: Path, plan: Plan, *, number: int = 1) -> Path:
    attempt_dir = run_dir / "attempts" / str(number)
    attempt_dir.mkdir(parents=True)
    codec.write(run_dir / "plan.json", plan)
    codec.write(attempt_dir / "plan.json", plan)
    if plan.chosen.strategy.sharding.uses_deepspeed:
        (attempt_dir / "ds_config.json").write_text(json.dumps(deepspeed_config(plan)))
    return attempt_dir / "plan.json"
