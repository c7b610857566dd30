"""Process groups of gloo ranks, and the reference that every engine has to equal."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from operator_cache import folder_with_operators
from rank_factory import LR, NUM_STEPS, SEED, rank_plan, write_rows
from safetensors.torch import load_file
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.trainer.runtime.data.batches import step_micro_batches
from shardwise.trainer.runtime.data.cache import TokenRows
from shardwise.trainer.spec.plan import Plan, learning_rate

WORKER = Path(__file__).parent / "engine_worker.py"
TIMEOUT_S = 1200  # a group may run a hundred attempts


class Course(NamedTuple):
    """What a training came to."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> Path:
    """No rank's gradient reaches 1 in these steps, where fp16 would skip a step at its first loss scale."""
    return write_rows(tmp_path_factory.mktemp("data") / "rows", shortest=16, is_grouped=False)


@pytest.fixture(scope="session")
def start_ranks() -> Callable[[Sequence[str], int], str]:
    """Runs a program on ranks of one process group and returns what they print."""
    extensions = str(folder_with_operators("cpu_adam"))

    def start(argv: Sequence[str], num_ranks: int) -> str:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": extensions,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # one ninja for all
            "PYTHONPATH": os.pathsep.join([str(WORKER.parents[2]), os.environ.get("PYTHONPATH", "")]),
        }
        launcher = [sys.executable]  # one rank is a process without a group, as a launch of one is
        if num_ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
        done = subprocess.run(
            [*launcher, *argv],
            env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        return done.stdout

    return start


@pytest.fixture(scope="session")
def run_ranks(start_ranks) -> Callable[[Sequence[Path], int], None]:
    """Runs attempts one after another in one group of ranks."""
    return lambda plan_paths, num_ranks: start_ranks([str(WORKER), *map(str, plan_paths)], num_ranks) and None


@pytest.fixture(scope="session")
def reference(cache_dir: Path) -> Course:
    """Some steps in one process of plain PyTorch: no Accelerate, no accumulation, transformers' own logits."""
    torch.manual_seed(SEED)
    plan = rank_plan(cache_dir, num_steps=NUM_STEPS)
    config = {name: value for name, value in plan.model_config.items() if name != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**config))
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=LR, betas=(0.9, 0.95)
    )
    rows = TokenRows.open(cache_dir, "train")
    losses, norms = [], []
    for step in range(plan.schedule.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan.schedule, plan.job.train, step + 1)
        loss = _mean_loss(model, rows, plan, step)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), plan.job.train.clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Course(losses, norms, {name: value.clone() for name, value in model.state_dict().items()})


def _mean_loss(model: LlamaForCausalLM, rows: TokenRows, plan: Plan, step: int) -> torch.Tensor:
    """The mean over the targets of the global batch, in one forward."""
    (batch,), num_targets = step_micro_batches(
        rows, step=step, seed=SEED, sequences_per_step=plan.schedule.sequences_per_step, rank=0, num_ranks=1,
        micro_batch=plan.schedule.sequences_per_step, accumulation=1,
    )  # fmt: skip
    logits = model(input_ids=batch.input_ids, use_cache=False).logits
    total = functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), batch.labels[:, 1:].reshape(-1), reduction="sum"
    )
    return total / num_targets


@pytest.fixture(scope="session")
def read_course() -> Callable[[Path], Course]:
    """Reads what a run left behind."""
    return _read_course


def _read_course(run_dir: Path) -> Course:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    weights = load_file(run_dir / "export" / "model.safetensors")
    return Course([line["loss"] for line in lines], [line["grad_norm"] for line in lines], weights)
