"""Entry point of each rank, started by `accelerate launch`: plan.json in, metrics and a report out.

    python -m shardwise.trainer RUN/attempts/N/plan.json [--log-dir DIR]

The rank registers itself and accepts stop requests before anything heavy is imported. It ends with exit code 0 after
any orderly end (out of memory is one): `accelerate launch` does not pass codes on, the ending stands in report.json.
"""

import argparse
import math
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Never, Self

from shardwise.trainer.runtime.run import process
from shardwise.trainer.runtime.run.cores import bind_to_cores
from shardwise.trainer.runtime.run.state import (
    ReportWriter,
    RunPaths,
    installed_versions,
    run_paths,
    start_of_launch,
)
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import ExitCode, ShardwiseError
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending, Report, Sample, predicted_figures
from shardwise.trainer.spec.secrets import redacted_output

if TYPE_CHECKING:
    from shardwise.trainer.runtime.run.state import RunState


def main() -> None:
    """Runs this rank to its end and exits."""
    arguments = _parse()
    rank, world_size = process.rank_of_this_process(), process.world_size_of_launch()
    stop = process.install_stop_flag()
    paths = run_paths(arguments.plan, started_at=start_of_launch(world_size=world_size))
    process.die_with_launcher(paths.plan_dir)
    process.dump_stacks_on_request()
    process.volunteer_for_oom_kill()
    paths.attempt_dir.mkdir(parents=True, exist_ok=True)
    try:
        companion = _registered(paths, stop, rank=rank)
    except ShardwiseError as error:
        sys.stderr.write(f"{error}\n")
        _exit_at_once(error.exit_code)
    if arguments.log_dir is not None:
        process.redirect_output(arguments.log_dir, rank=rank)
    with redacted_output():
        _run(arguments.plan, paths, ReportWriter(paths, rank=rank), stop, companion)


def _registered(paths: RunPaths, stop: process.StopFlag, *, rank: int) -> process.Companion | None:
    """Registers the rank; of a start by hand, rank 0 starts the process that does what a supervisor would."""
    process.write_pid_record(paths.attempt_dir, rank=rank)
    if rank:
        return None
    if paths.is_again:
        print(f"this attempt has ended before: writing to {paths.attempt_dir} instead, without trackers")  # noqa: T201
        return None
    if process.is_supervised() or not paths.plan_dir.name.isdigit():  # or not of a run directory
        return None
    stop.companion = process.Companion(paths.attempt_dir)
    return stop.companion


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shardwise.trainer", description="One rank of a run.")
    parser.add_argument("plan", type=Path, help="plan.json of an attempt")
    parser.add_argument("--log-dir", type=Path, default=None, help="where rank-R.log goes; without it, to stdout")
    return parser.parse_args()


def _run(
    plan_path: Path,
    paths: RunPaths,
    writer: ReportWriter,
    stop: process.StopFlag,
    companion: process.Companion | None,
) -> None:
    writer.write_status("importing the libraries")
    plan = codec.read(plan_path, Plan)
    bind_to_cores(plan)  # before torch starts its threads
    from shardwise.trainer.runtime.run.state import RunState

    with _RankEnd(plan, RunState(), writer, companion) as end:
        with process.importing_libraries():
            from shardwise.trainer.runtime.loop.course import (
                train,  # a library that cannot be imported is an end with a report, too
            )

        ending = train(plan, paths, writer, end.state, lambda: stop.is_set)
        # Only the supervisor knows of a Ctrl-C; a signal to a rank itself is a preemption.
        end.ending = Ending.PREEMPTED if ending is Ending.STOPPED else ending


class _RankEnd:
    """Ends the process at the end of its block, also on an error, with a report of its progress."""

    def __init__(
        self, plan: Plan, state: "RunState", writer: ReportWriter, companion: process.Companion | None
    ) -> None:
        self.state = state
        self.ending = Ending.FAILED
        self._plan = plan
        self._writer = writer
        self._companion = companion
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Never:
        if error is None:
            self._write_report(ExitCode.DONE if self.ending is Ending.FINISHED else ExitCode.REQUEUE, error=None)
            _close_process_group()
            _exit_at_once(0)
        from shardwise.trainer.runtime.loop.memory_profile import held_when_out_of_memory, is_out_of_memory, lift_cap

        data_limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        lift_cap()
        traceback.print_exception(kind, error, trace)
        if is_out_of_memory(error):
            from shardwise.trainer.runtime.loop.memory_profile import write_memory_state

            self.ending = Ending.OUT_OF_MEMORY
            folder, rank = self._writer.attempt_dir, self._writer.rank
            write_memory_state(folder, rank=rank, step=self.state.step, data_limit=data_limit)
            self.state.memory = held_when_out_of_memory(self.state.memory)
            self._write_report(ExitCode.OUT_OF_MEMORY, error=error_line(error))
            _exit_at_once(0)
        code = error.exit_code if isinstance(error, ShardwiseError) else ExitCode.INTERNAL
        self._write_report(code, error=error_line(error))
        _exit_at_once(1)

    def _write_report(self, exit_code: ExitCode, *, error: str | None) -> None:
        report = _report(
            self._plan,
            self.state,
            self.ending,
            error=error,
            exit_code=exit_code,
            duration_s=time.monotonic() - self._started,
        )
        self._writer.write_report(report)
        self._writer.write_status(str(self.ending), step=self.state.step)
        if self._companion is not None:
            self._companion.wait()


def error_line(error: BaseException) -> str:
    """The message of a ShardwiseError, all of it; of another error its type and first line, with what may mend it."""
    if isinstance(error, ShardwiseError):
        return str(error)
    line = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    is_mapping = "CUDA driver error" in line and "expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", "")
    return f"{line}; without expandable segments it may work: {_NO_EXPANDING}" if is_mapping else line


# torch maps memory through the driver for expandable segments, which not every driver can (WSL, vGPU).
_NO_EXPANDING = "export PYTORCH_ALLOC_CONF=expandable_segments:False"


def _report(
    plan: Plan, state: "RunState", ending: Ending, *, error: str | None, exit_code: ExitCode, duration_s: float
) -> Report:
    from shardwise.trainer.planning.schedule import longest_row_decides
    from shardwise.trainer.runtime.run.state import measured_figures

    sample = None
    if state.prompt is not None:
        sample = Sample(prompt=state.prompt, before=state.sample_before, after=state.sample_after)
    finite = tuple(done for done in state.evaluations if math.isfinite(done.loss) and math.isfinite(done.perplexity))
    not_finite = [done for done in state.evaluations if done not in finite]
    return Report(
        ending=ending,
        exit_code=int(exit_code),
        plan=plan.chosen,
        predicted=predicted_figures(plan.chosen),
        measured=measured_figures(state, plan),
        verified=state.verified,
        incidents=(*state.incidents, *(f"the held-out loss at step {each.step} is not finite" for each in not_finite)),
        roll_backs=tuple(state.roll_backs),
        versions=installed_versions(),
        step=state.step,
        num_steps=plan.schedule.num_steps,
        tokens=state.tokens_seen,
        targets=state.targets_seen,
        duration_s=duration_s,
        saved_bytes=state.saved_bytes,
        final_loss=state.final_loss if state.final_loss is not None and math.isfinite(state.final_loss) else None,
        evaluations=finite,
        sample=sample,
        checkpoint=state.checkpoint,
        export=state.export,
        resumed_from_step=state.resumed_from_step,
        predicts_longest_row=longest_row_decides(plan.data),
        error=error,
        device_time=state.device_time,
    )


def _close_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _exit_at_once(code: int) -> Never:
    """Ends the process at once: other ranks may wait in a collective that a tidy exit would join."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
