"""Process groups of gloo ranks, and the reference that every engine has to equal."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from attempt_runs import metrics_of
from fp16_units import HAS_FP16_UNITS, NO_FP16_UNITS
from operator_cache import NO_LIBAIO, folder_with_operators, lacks_libaio
from plain_training import train_plainly
from rank_factory import NUM_STEPS, rank_plan, write_attempt, write_rows
from safetensors.torch import load_file

from shardwise.launch.engine.offload import check_nvme
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Precision

WORKER = Path(__file__).parent / "engine_worker.py"
TIMEOUT_S = 1200  # a group may run a hundred attempts


class Course(NamedTuple):
    """Losses and gradient norms by step, and the exported weights."""

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


class RunDirs:
    """Run directories by case; those of one list, library and number of ranks train in one group at the first request.

    A case that this machine cannot run is skipped: NVMe without libaio, fp16 under DeepSpeed without units for it.
    """

    def __init__(self, folder: Path, start_ranks: Callable[[Sequence[str], int], str], worker: Path) -> None:
        self._folder, self._start_ranks, self._worker = folder, start_ranks, worker
        self._plans: dict[Any, Plan] = {}
        self._groups: dict[Any, tuple[int, bool, int]] = {}
        self._trained: set[tuple[int, bool, int]] = set()

    def add(self, cases: Sequence[Any], plan_of: Callable[[Any, Path], Plan]) -> None:
        number = len(set(self._groups.values()))
        for case in cases:
            plan = self._plans[case] = plan_of(case, self._dir(case))
            self._groups[case] = (number, plan.chosen.strategy.sharding.uses_deepspeed, plan.chosen.num_ranks)

    def __call__(self, case: Any) -> Path:
        if reason := _missing(self._plans[case]):
            pytest.skip(reason)
        if (group := self._groups[case]) not in self._trained:
            self._trained.add(group)
            self._train([each for each in self._plans if self._groups[each] == group], group[-1])
        return self._dir(case)

    def _train(self, cases: Sequence[Any], num_ranks: int) -> None:
        plans = {case: self._plans[case] for case in cases if not _missing(self._plans[case])}
        if any(plan.chosen.strategy.offload.uses_nvme for plan in plans.values()):
            folder_with_operators("async_io")
        for plan in plans.values():
            check_nvme(plan)
        attempts = [str(write_attempt(self._dir(case), plan)) for case, plan in plans.items()]
        self._start_ranks([str(self._worker), *attempts], num_ranks)

    def _dir(self, case: Any) -> Path:
        return self._folder / "-".join(map(str, case if isinstance(case, tuple) else (case,)))


def _missing(plan: Plan) -> str | None:
    strategy = plan.chosen.strategy
    if strategy.offload.uses_nvme and lacks_libaio():
        return NO_LIBAIO
    is_zero_fp16 = strategy.sharding.uses_deepspeed and strategy.precision is Precision.FP16_MIXED
    return NO_FP16_UNITS if is_zero_fp16 and not HAS_FP16_UNITS else None


@pytest.fixture(scope="module")
def run_dirs(tmp_path_factory, start_ranks) -> Callable[..., RunDirs]:
    """Makes `RunDirs` of lists of cases, with the plan of a case and its run directory."""

    def make(plan_of: Callable[[Any, Path], Plan], *lists: Sequence[Any], worker: Path = WORKER) -> RunDirs:
        made = RunDirs(tmp_path_factory.mktemp("runs"), start_ranks, worker)
        for cases in lists:
            made.add(cases, plan_of)
        return made

    return make


@pytest.fixture(scope="session")
def reference(cache_dir: Path) -> Course:
    """Some steps in one process of plain PyTorch."""
    plain = train_plainly(rank_plan(cache_dir, num_steps=NUM_STEPS))
    return Course(list(plain.losses.values()), plain.grad_norms, plain.weights)


@pytest.fixture(scope="session")
def read_course() -> Callable[[Path], Course]:
    """Reads the files of a run."""
    return _read_course


def _read_course(run_dir: Path) -> Course:
    lines = metrics_of(run_dir)
    weights = load_file(run_dir / "export" / "model.safetensors")
    return Course([line["loss"] for line in lines], [line["grad_norm"] for line in lines], weights)
