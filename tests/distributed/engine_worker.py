"""One rank that runs attempts one after another in one process, as `trainer.__main__` runs one.

    rank_launch.py NUM_RANKS engine_worker.py PLAN.json[@RUN_DIR[~STEP]][#STEP][:note | :spikes | :FAULT] [...]

Of `PLAN.json@RUN_DIR` the newest checkpoint of RUN_DIR, or that of a step, is loaded and saved again at once, by the
engine of this plan, in the plan's own run directory; then the plan is trained on from there. With `#STEP` the last
rank, and no other, asks for a stop after that step. It leaves `engaged-RANK.json` beside each plan, `incidents.json` in
the run directory, and with `:note` what reached the model (`Notes`). With a fault (`faults_of_ranks`) it leaves
`ended-RANK.json`: the last step, the lines on the first steps, and the error. Importing the libraries takes longer than
training, so attempts share a process.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from faults_of_ranks import FAULTS, RANK, WORLD_SIZE
from rank_process import assert_as_planned, attempt, end_group
from spikes_of_ranks import spoilt_steps
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from shardwise.trainer.runtime.loop.course import train
from shardwise.trainer.runtime.run.state import IncidentKind, ReportWriter, RunPaths, RunState, run_paths
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending

LIMIT_S = 120  # of an attempt; ranks that wait for each other for ever end with their group


def main(arguments: list[str]) -> None:
    for argument in arguments:
        name, _, kind = argument.partition(":")
        name, _, last = name.partition("#")
        plan_path, _, source = name.partition("@")
        path, plan = Path(plan_path), codec.read(Path(plan_path), Plan)
        paths = run_paths(path, started_at=datetime.now(UTC))
        if kind in FAULTS:
            run_with_fault(kind, plan, paths)
            continue
        if source:
            run(plan, msgspec.structs.replace(paths, resume_dir=left(*source.split("~"))), last=0)
        around = {"note": partial(noting, path), "spikes": partial(spoilt_steps, plan, path)}.get(kind, nullcontext)
        with around():
            run(plan, paths, last=int(last) if last else plan.schedule.num_steps)
    end_group()


def left(run_dir: str, step: str = "") -> Path:
    """The run directory; with a step, one of this rank that has the checkpoint of that step and nothing else."""
    if not step:
        return Path(run_dir)
    retained, name = Path(f"{run_dir} left for {RANK}"), f"checkpoints/step-{int(step):08d}"
    if not retained.exists():
        shutil.copytree(Path(run_dir, name), retained / name, copy_function=os.link)
    return retained


def run(plan: Plan, paths: RunPaths, *, last: int) -> None:
    """Runs the plan until step `last`, or at least to its first step boundary."""
    state = RunState()
    signal.alarm(LIMIT_S)
    with attempt():
        ending = train(
            plan, paths, ReportWriter(paths, rank=RANK), state, lambda: RANK == WORLD_SIZE - 1 and state.step >= last
        )
    signal.alarm(0)
    assert ending is (Ending.FINISHED if last == plan.schedule.num_steps else Ending.STOPPED)
    assert_as_planned(state)
    assert state.verified is not None
    codec.write(paths.plan_dir / f"engaged-{RANK}.json", state.verified)
    if RANK == 0:
        retained = paths.run_dir / "incidents.json"
        known = json.loads(retained.read_text()) if retained.exists() else []
        retained.write_text(json.dumps(known + state.incidents))


def run_with_fault(fault: str, plan: Plan, paths: RunPaths) -> None:
    state, error = RunState(), ""
    with attempt(), FAULTS[fault]():
        try:
            train(plan, paths, ReportWriter(paths, rank=RANK), state, lambda: False)
        except EnvironmentFaultError as raised:
            error = str(raised)
    ended = {"step": state.step, "lines": state.log.texts_of(IncidentKind.FIRST_STEPS), "error": error}
    (paths.plan_dir / f"ended-{RANK}.json").write_text(json.dumps(ended))


class Notes:
    """Records the inputs of each forward that has a backward, and the gradients that the optimizer receives.

    rows         of each forward, the rows, each with its ids up to the last label
    collectives  of each forward, those of the default group before it; and those after the first update
    gradients    of each forward, the largest gradient of the embeddings' output
    in_16_bit    the share of the elements of the first update's gradients that bf16 could hold
    te           counts of the stand-in for Transformer Engine

    If the run directory has a file `overflows`, one element of the first gradient becomes infinite, on rank 1 alone: a
    gradient of one row of the embeddings, which under FSDP2 is rank 0's.
    """

    def __init__(self, path: Path) -> None:
        self.overflows = RANK == 1 and (path.parents[2] / "overflows").exists()
        self.rows: list[list[list[int]]] = []
        self.collectives: list[int] = []
        self.gradients: list[float] = []
        self.in_16_bit: list[float] = []

    def on_forward(self, module: nn.Module, _inputs: object, named: dict[str, Any], output: object) -> None:
        if isinstance(module, PreTrainedModel) and "labels" in named and torch.is_grad_enabled():
            self.rows.append(learned(named["input_ids"], named["labels"]))
        if isinstance(module, nn.Embedding) and isinstance(output, torch.Tensor) and output.requires_grad:
            self.collectives.append(num_collectives())
            output.register_hook(self.on_gradient)

    def on_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        self.gradients.append(grad.abs().max().item())
        if self.overflows and len(self.gradients) == 1:
            grad = grad.clone()
            grad[0, 0, 0] = torch.inf
        return grad

    def on_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        grads = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        local = [getattr(grad, "to_local", lambda grad=grad: grad)().float().flatten() for grad in grads]
        if not self.in_16_bit and any(each.numel() for each in local):
            values = torch.cat(local)
            self.in_16_bit.append((values == values.bfloat16().float()).float().mean().item())
            self.collectives.append(num_collectives())


@contextmanager
def noting(path: Path) -> Iterator[None]:
    notes = Notes(path)
    hooks = [
        register_module_forward_hook(notes.on_forward, with_kwargs=True),
        register_optimizer_step_pre_hook(notes.on_update),
    ]
    yield
    for hook in hooks:
        hook.remove()
    content = {name: value for name, value in vars(notes).items() if name != "overflows"}
    path.with_name(f"notes-{RANK}.json").write_text(json.dumps(content | {"te": counted()}))


def learned(ids: Any, labels: Any) -> list[list[int]]:
    ends = [int((row >= 0).nonzero()[-1]) + 1 if (row >= 0).any() else 0 for row in labels]
    return [row[:end].tolist() for row, end in zip(ids, ends, strict=True)]


def num_collectives() -> int:
    group: Any = dist.distributed_c10d._get_default_group() if WORLD_SIZE > 1 else None  # private
    return 0 if group is None else int(group._get_sequence_number_for_group())


def counted() -> dict[str, int]:
    """Counts of the stand-in since the last attempt; empty if it was not used."""
    te = sys.modules.get("transformer_engine.pytorch")
    if te is None:
        return {}
    counts = dict(te.COUNTS)
    te.COUNTS.clear()
    return counts


if __name__ == "__main__":
    main(sys.argv[1:])
