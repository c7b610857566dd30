"""Plans a case like a user's job, and runs a few steps of it in separate processes, whether it fits or not.

The prediction uses the plan alone: records of earlier runs on the machine are hidden, and measurements do not affect
it. Without a GPU every case is rehearsed with a tiny version of its model.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from on_gpu.case import Case, CaseResult, Outcome, RowKind
from on_gpu.models import model_config, model_folder
from shardwise.launch.attempt.supervisor import StopKind, StopRequest
from shardwise.launch.inputs.prepare_data import prepare_data
from shardwise.launch.job import cache_home
from shardwise.launch.plan.gather import PlanInputs, plan_inputs, read_inputs, read_machine, recorded_versions
from shardwise.launch.run.ladder import plan_regardless, without_limits
from shardwise.launch.run.trials import ShortRun, run_short, short_plan
from shardwise.launch.rundir.metrics import Step as StepLine
from shardwise.launch.rundir.metrics import read_steps
from shardwise.launch.show.recorded_run import last_of_each
from shardwise.launch.terminal import Console
from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.device import device_of
from shardwise.trainer.planning.memory import estimate_memory
from shardwise.trainer.planning.search.configurations import smallest_buckets
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import ShardwiseError
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.report import Figures, predicted_figures

LEAST_ROWS = 32
TINY_SEQ_LEN, LEAST_SEQ_LEN = 64, 16  # a rehearsal shortens 4,096 tokens to 64, and shorter rows in proportion
START_S = 25.0  # of a run on a GPU: processes, libraries, the end
LOAD_BYTES_PER_S, WRITE_BYTES_PER_S = 1e9, 0.3e9  # to read weights, and to create them first
TIMED_FLOPS_PER_S = 2e14  # far below the rate of any step: a bound for its time
_SETTING_FIELDS = frozenset(field.name for field in msgspec.structs.fields(Configuration))


def job_of(case: Case, *, model: str, rows: str, seq_len: int) -> dict[str, str]:
    """The settings of a case's job on a model folder and a file of rows."""
    rows_per_example = 2 if case.rows is RowKind.PAIRS else 1
    settings = {
        "model.name": model,
        "data.train": rows,
        "data.format": "preference" if case.rows is RowKind.PAIRS else "tokens",
        "data.eval": "none",
        "train.seq_len": str(seq_len),
        "train.tokens_per_step": str(seq_len * rows_per_example * case.sequences_per_step),
        "train.steps": str(case.num_steps),
        "checkpoint.every": "100000 steps",
    }
    if case.micro_batch is not None:
        settings["pin.micro_batch"] = str(case.micro_batch)
    return settings | case.settings


class Bench:
    """The machine with the first of its cards, and a work folder for models, rows and runs."""

    def __init__(
        self,
        work: Path,
        *,
        is_tiny: bool,
        console: Console,
        stop: StopRequest,
        environment: Mapping[str, str] = os.environ,
        is_listed: bool = False,
        peers: Path | None = None,
    ) -> None:
        hardware = read_machine(None)
        self.work, self.console, self.stop = work, console, stop
        self.peers = peers  # of the packages of other trainers, a folder each
        self.environment = {**environment, "XDG_STATE_HOME": str(work / "no-earlier-runs")}
        self.hardware = replace(hardware, gpus=hardware.gpus[:1])
        self.is_tiny = (is_tiny or not self.hardware.gpus) and not is_listed  # a list is of the real models
        self.versions = recorded_versions()
        self._plans: dict[bytes, Plan | ShardwiseError] = {}
        self._created: set[str] = set()  # models whose creation a step's bound contains

    @property
    def device_name(self) -> str:
        """`NVIDIA H200`, or the CPU's name."""
        host = self.hardware.host
        return self.hardware.gpus[0].name if self.hardware.gpus else (host.cpu_name or "CPU")

    @property
    def card_bytes(self) -> int:
        """Memory for concurrent runs; 0 without a GPU, where they run one after the other."""
        return device_of(self.hardware).usable_bytes if self.hardware.gpus else 0

    def seq_len_of(self, case: Case) -> int:
        """Tokens of a row; few in a rehearsal, but in the same order as in the cases."""
        if not self.is_tiny or case.rows is RowKind.PAIRS:  # the chat template of pairs alone has a dozen tokens
            return case.seq_len
        return max(LEAST_SEQ_LEN, min(case.seq_len, case.seq_len * TINY_SEQ_LEN // 4096))

    def model_of(self, name: str) -> Path:
        """The folder of a model with random weights."""
        return model_folder(name, self.work / "models", is_tiny=self.is_tiny)

    def rows_of(self, case: Case, num_rows: int = LEAST_ROWS) -> Path:
        """A file of rows. A few tokens of the vocabulary dominate, so that the loss can decrease."""
        vocab, seq_len = int(model_config(case.model, is_tiny=self.is_tiny)["vocab_size"]), self.seq_len_of(case)
        path = self.work / "rows" / f"{vocab}-{seq_len}-{num_rows}-{case.rows}.jsonl"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text("".join(json.dumps(row) + "\n" for row in _rows(case.rows, vocab, seq_len, num_rows)))
            partial.rename(path)
        return path

    def plan_of(self, case: Case) -> Plan:
        """The plan of a case, whether it fits or not; ShardwiseError if it cannot run on this device at all."""
        key = msgspec.json.encode(case)
        if key not in self._plans:
            try:
                self._plans[key] = self._plan(case)
            except ShardwiseError as error:
                self._plans[key] = error
        plan = self._plans[key]
        if isinstance(plan, ShardwiseError):
            raise plan
        return plan

    def need_bytes(self, case: Case) -> int:
        """Planned bytes of a case on the card; 0 if it is refused."""
        try:
            return self.plan_of(case).chosen.memory.need_bytes
        except ShardwiseError:
            return 0

    def expected_s(self, case: Case) -> float:
        """Upper bound of the seconds of a case on a card; the first with a model includes creating its weights."""
        shape = read_model_shape(model_config(case.model, is_tiny=self.is_tiny))
        weight_bytes = 2 * shape.num_parameters
        flops = 8 * shape.num_parameters * case.seq_len * case.sequences_per_step * case.num_steps
        is_there = case.model in self._created or (self.work / "models" / case.model).is_dir()
        self._created.add(case.model)
        load_s = weight_bytes / LOAD_BYTES_PER_S + (0.0 if is_there else weight_bytes / WRITE_BYTES_PER_S)
        return START_S + load_s + flops / TIMED_FLOPS_PER_S

    def inputs_of(self, case: Case) -> tuple[PlanInputs, DataProfile]:
        """The inputs of the plan of a case: the job without time limits, and its prepared rows."""
        rows = self.rows_of(case, max(LEAST_ROWS, case.sequences_per_step))
        settings = job_of(case, model=str(self.model_of(case.model)), rows=str(rows), seq_len=self.seq_len_of(case))
        inputs = read_inputs(
            None,
            [f"{key}={value}" for key, value in settings.items()],
            machines=self.hardware,
            vram_cap_bytes=case.vram_bytes,
            environment=self.environment,
        )
        job = inputs.resolved.job
        resolved = replace(inputs.resolved, job=replace(job, limits=without_limits(job.limits)))
        inputs = inputs._replace(resolved=resolved)
        return inputs, prepare_data(inputs.request, on_progress=lambda _: None)

    def _plan(self, case: Case) -> Plan:
        inputs, data = self.inputs_of(case)
        make_plan = plan_inputs if case.must_fit else plan_regardless
        plan = make_plan(inputs, data, environment=self.environment)
        if case.engine is not None:
            plan = with_engine(plan, Sharding(case.engine))
        if case.cap_share is None:
            return plan
        cap = round(case.cap_share * plan.chosen.memory.need_bytes)
        return replace(plan, hardware=replace(plan.hardware, vram_cap_bytes=cap))

    def run(self, case: Case) -> CaseResult:
        """Plans and runs a case."""
        started = time.monotonic()
        try:
            plan = self.plan_of(case)
        except ShardwiseError as error:
            reason = " ".join(str(error).removeprefix("command line: ").split())
            return CaseResult(name=case.name, outcome=Outcome.REFUSED, reason=reason)
        return self._run(case, plan, started=started)

    def _run(self, case: Case, plan: Plan, *, started: float) -> CaseResult:
        """Runs the chosen candidate of a plan."""
        self.work.joinpath("runs").mkdir(parents=True, exist_ok=True)
        run_dir = Path(tempfile.mkdtemp(dir=self.work / "runs"))
        try:
            run = run_short(
                short_plan(plan, plan.chosen, num_steps=case.num_steps),
                run_dir,
                cache=cache_home(self.environment),
                console=self.console,
                stop=self.stop,
                environment=self.environment,
            )
            steps = tuple(last_of_each(read_steps(run_dir / "metrics.jsonl").steps))
        finally:
            shutil.rmtree(run_dir, ignore_errors=True)
        return _result_of(case, plan.chosen, run, steps, time.monotonic() - started)

    def end(self) -> None:
        """Ends all runs at once, like a second Ctrl-C."""
        self.stop.kind, self.stop.num_interrupts = self.stop.kind or StopKind.INTERRUPT, 2


def _rows(kind: RowKind, vocab: int, seq_len: int, num_rows: int) -> list[dict[str, object]]:
    draw = np.random.default_rng(0)

    def tokens(length: int) -> list[int]:
        return [min(2 + int(token), vocab - 1) for token in draw.geometric(0.05, size=length)]

    if kind is RowKind.FULL:
        return [{"input_ids": tokens(seq_len)} for _ in range(num_rows)]
    if kind is RowKind.SHORT:
        lengths = draw.integers(max(2, seq_len // 8), seq_len + 1, size=8 * num_rows)
        return [{"input_ids": tokens(int(length))} for length in lengths]

    def text() -> str:
        return " ".join(f"t{token}" for token in tokens(max(2, seq_len // 4)))

    return [{"prompt": text(), "chosen": text(), "rejected": text()} for _ in range(num_rows)]


def with_engine(plan: Plan, sharding: Sharding) -> Plan:
    """The plan with another engine, which the planner refuses on one rank because it has nothing to shard."""
    chosen = plan.chosen
    strategy = replace(
        chosen.strategy,
        name=f"{sharding}/{chosen.strategy.precision}/{chosen.strategy.optimizer}",
        sharding=sharding,
        base_config=sharding.facts.base_configs.get(chosen.strategy.offload),
    )
    chosen = replace(chosen, strategy=strategy, buckets=smallest_buckets(plan.model_shape, strategy))
    shared = {name: getattr(chosen, name) for name in chosen.__struct_fields__ if name in _SETTING_FIELDS}
    configuration = Configuration(**shared, ranks_per_node=1, lora=plan.job.train.lora, galore=plan.job.train.galore)
    memory = estimate_memory(plan.model_shape, configuration, device_of(plan.hardware))
    return replace(plan, candidates=(replace(chosen, memory=memory),))


def portable_hardware(hardware: Hardware) -> Hardware:
    """The machine without identifying facts: disks, networks, serial numbers, processes of other users."""
    host = replace(hardware.host, disks=(), interfaces=(), slurm=None)
    gpus = tuple(replace(gpu, uuid=None, processes=()) for gpu in hardware.gpus)
    return replace(hardware, gpus=gpus, host=host, excluded=(), notes=())


def _result_of(case: Case, chosen: Candidate, run: ShortRun, steps: Sequence[StepLine], seconds: float) -> CaseResult:
    result = CaseResult(
        name=case.name,
        outcome=Outcome.FAILED,
        reason=run.problem,
        strategy=chosen.strategy.name,
        micro_batch=chosen.micro_batch,
        accumulation=chosen.accumulation,
        checkpointing=str(chosen.checkpointing),
        predicted=_short_figures(predicted_figures(chosen)),
        peak_event=chosen.memory.peak_event,
        need_bytes=chosen.memory.need_bytes,
        usable_bytes=chosen.memory.usable_bytes,
        wall_s=round(seconds, 1),
    )
    if run.report is None:
        return result
    return replace(
        result,
        outcome=Outcome.OUT_OF_MEMORY if run.ran_out_of_memory else Outcome.RAN,
        reason=run.report.error,
        measured=_short_figures(run.report.measured),
        facts=run.report.verified.facts if run.report.verified is not None else {},
        losses=tuple(round(step.loss, 4) for step in steps if step.loss is not None),
    )


def _short_figures(figures: Figures) -> Figures:
    """The figures without their parts, which would dominate a results file."""
    memory = replace(figures.memory, parts={}, peaks={}, timeline=())
    return Figures(memory=memory, speed=replace(figures.speed, parts={}))
