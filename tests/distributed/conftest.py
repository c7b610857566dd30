"""Process groups of gloo ranks, and the reference that every engine has to equal."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from attempt_runs import metrics_of
from operator_cache import NO_LIBAIO, folder_with_operators, lacks_libaio
from plain_training import train_plainly
from programs import printed_by
from rank_factory import NUM_STEPS, rank_plan, write_attempt, write_rows
from safetensors.torch import load_file

from shardwise.launch.engine.offload import check_nvme
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Precision

HERE = Path(__file__).parent
FEW = 3  # tests of a file
Kind = str | Callable[[Any], str]  # what follows the plan among the arguments of a worker, or that of each case


class Course(NamedTuple):
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]

    def check(self, expected: "Course", *, tolerance: float = 1e-5, of_weights: float = 1e-4) -> None:
        assert self.losses == pytest.approx(expected.losses, abs=tolerance)
        assert self.grad_norms == pytest.approx(expected.grad_norms, abs=tolerance)
        torch.testing.assert_close(self.weights, expected.weights, rtol=0, atol=of_weights)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> Path:
    """No rank's gradient reaches 1 in these steps, where fp16 would skip a step at its first loss scale."""
    return write_rows(tmp_path_factory.mktemp("data") / "rows", shortest=16, is_grouped=False)


@pytest.fixture(scope="session")
def start_ranks() -> Callable[[Sequence[str], int], str]:
    extensions = str(folder_with_operators("cpu_adam"))

    def start(argv: Sequence[str], num_ranks: int) -> str:
        # One rank is a process without a group, as a launch of one is.
        launcher = [HERE / "rank_launch.py", num_ranks] if num_ranks > 1 else []
        return printed_by(
            *launcher, *argv, OMP_NUM_THREADS="1", TORCH_EXTENSIONS_DIR=extensions,
            PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # one ninja for all
            PYTHONPATH=os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        )  # fmt: skip

    return start


@pytest.fixture(scope="session")
def run_ranks(start_ranks) -> Callable[[Sequence[Path], int], None]:
    return lambda plans, num_ranks: start_ranks([str(HERE / "engine_worker.py"), *map(str, plans)], num_ranks) and None


class RunDirs:
    """Run directories by case; those of one list, library and number of ranks train in one group at the first request.

    The libraries meet in one group where little is trained (`loading_worker`).
    Where few tests run, each case trains when it is requested. A case that this machine cannot run is skipped: NVMe
    without libaio, fp16 under DeepSpeed without units for it.
    """

    def __init__(
        self, folder: Path, start: Callable[[Sequence[str], int], str], worker: str, kind: Kind, *, is_few: bool
    ) -> None:
        self._folder, self._start, self._worker, self._kind, self._is_few = folder, start, worker, kind, is_few
        self._plans: dict[Any, Plan] = {}
        self._groups: dict[Any, tuple[int, bool, int]] = {}
        self._trained = set[Any]()

    def add(self, cases: Sequence[Any], plan_of: Callable[[Any, Path], Plan]) -> None:
        number = len(set(self._groups.values()))
        for case in cases:
            plan = self._plans[case] = plan_of(case, self._dir(case))
            is_apart = plan.chosen.strategy.sharding.uses_deepspeed and self._worker != "loading_worker.py"
            self._groups[case] = (number, is_apart, plan.chosen.num_ranks)

    def __call__(self, case: Any) -> Path:
        if reason := _missing(self._plans[case]):
            pytest.skip(reason)
        group = self._groups[case]
        wanted = [case] if self._is_few else [each for each in self._plans if self._groups[each] == group]
        if case not in self._trained:
            self._trained.update(wanted)
            self._train(wanted, group[-1])
        return self._dir(case)

    def _train(self, cases: Sequence[Any], num_ranks: int) -> None:
        plans = {case: self._plans[case] for case in cases if not _missing(self._plans[case])}
        if any(plan.chosen.strategy.offload.uses_nvme for plan in plans.values()):
            folder_with_operators("async_io")
        for plan in plans.values():
            check_nvme(plan)
        kinds = [self._kind(case) if callable(self._kind) else self._kind for case in plans]
        paths = [write_attempt(self._dir(case), plan) for case, plan in plans.items()]
        attempts = [f"{path}{kind}" for path, kind in zip(paths, kinds, strict=True)]
        self._start([str(HERE / self._worker), *attempts], num_ranks)

    def _dir(self, case: Any) -> Path:
        return self._folder / "-".join(map(str, case if isinstance(case, tuple) else (case,)))


def _missing(plan: Plan) -> str | None:
    strategy = plan.chosen.strategy
    if strategy.offload.uses_nvme and lacks_libaio():
        return NO_LIBAIO
    is_zero_fp16 = strategy.sharding.uses_deepspeed and strategy.precision is Precision.FP16_MIXED
    # As `CPU_Accelerator.is_fp16_supported` of DeepSpeed.
    lacks_units = not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return "DeepSpeed refuses fp16 on a CPU without avx512_fp16" if is_zero_fp16 and lacks_units else None


@pytest.fixture(scope="module")
def run_dirs(tmp_path_factory, start_ranks, request) -> Callable[..., RunDirs]:
    """Makes `RunDirs` of lists of cases, with the plan of a case and its run directory; `kind` is the worker's."""
    is_few = sum(item.path == request.path for item in request.session.items) <= FEW

    def make(
        plan_of: Callable[[Any, Path], Plan], *lists: Sequence[Any], worker="engine_worker.py", kind: Kind = ""
    ) -> RunDirs:
        made = RunDirs(tmp_path_factory.mktemp("runs"), start_ranks, worker, kind, is_few=is_few)
        for cases in lists:
            made.add(cases, plan_of)
        return made

    return make


@pytest.fixture(scope="session")
def notes_of() -> Callable[..., dict[str, Any]]:

    def read(run_dir: Path, rank: int = 0) -> dict[str, Any]:
        return json.loads((run_dir / "attempts" / "1" / f"notes-{rank}.json").read_text())

    return read


@pytest.fixture(scope="session")
def reference(cache_dir: Path) -> Course:
    plain = train_plainly(rank_plan(cache_dir, num_steps=NUM_STEPS))
    return Course(list(plain.losses.values()), plain.grad_norms, plain.weights)


@pytest.fixture(scope="session")
def read_course() -> Callable[[Path], Course]:

    def read(run_dir: Path) -> Course:
        lines = metrics_of(run_dir)
        weights = load_file(run_dir / "export" / "model.safetensors")
        return Course([line["loss"] for line in lines], [line["grad_norm"] for line in lines], weights)

    return read
