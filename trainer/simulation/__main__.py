"""The dry run as a process of its own.

    python -m shardwise.trainer.simulation REQUEST.json RESULT.json      the result of one request
    python -m shardwise.trainer.simulation --explain REQUEST.json        the live set at the peak, as text
    python -m shardwise.trainer.simulation --trace REQUEST.json RESULT.json      the shape of a model, its blocks traced

A problem goes to stderr with the exit code of its error.
"""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shardwise.trainer.runtime.run.process import end_with_parent, report_progress, run_request
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import ExitCode, ShardwiseError
from shardwise.trainer.spec.messages.worker_requests import Simulation, SimulationRequest, TraceRequest
from shardwise.trainer.spec.value import Value


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    options = _parse(arguments)
    files = [str(path) for path in (options.request, options.result) if path is not None]
    if options.trace:
        return run_request(files, TraceRequest, _traced)
    if not options.explain:
        return run_request(files, SimulationRequest, lambda request: load_dry_run()(request))
    try:
        for line in _explained(load_dry_run()(codec.read(options.request, SimulationRequest))):
            report_progress(line)
    except ShardwiseError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return ExitCode.DONE


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m shardwise.trainer.simulation", description="The memory of one rank."
    )
    parser.add_argument("request", type=Path, help="request.json")
    parser.add_argument("result", type=Path, nargs="?", help="path of the result")
    parser.add_argument("--explain", action="store_true", help="print the live set at the peak instead")
    parser.add_argument("--trace", action="store_true", help="write the shape of a model with traced blocks")
    options = parser.parse_args(arguments)
    if options.result is None and not options.explain:
        parser.error("give REQUEST.json RESULT.json, or --explain REQUEST.json")
    return options


def load_dry_run() -> Callable[[SimulationRequest], Simulation]:
    """The dry run, with the libraries' notices silenced."""
    _silence()
    from shardwise.trainer.simulation.dry_run import simulate

    return simulate


def _silence() -> None:
    """Silences the libraries: nothing here is about a real device."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def _explained(simulation: Simulation) -> Iterator[str]:
    """Lines; bytes in full, because they are compared with other bytes."""
    yield f"peak      {simulation.peak_allocated_bytes:>16,} at {simulation.peak_event}"
    yield f"steady    {simulation.steady_allocated_bytes:>16,}"
    yield f"reserved  {simulation.peak_reserved_bytes:>16,}, expandable {simulation.expandable_reserved_bytes:,}"
    yield f"capacity  {simulation.min_capacity_bytes:>16,} at least"
    yield f"{simulation.num_parameters:,} parameters, {simulation.num_trained_parameters:,} trained"
    yield "events"
    for event, num_bytes in simulation.events.items():
        yield f"  {num_bytes:>16,}  {event}"
    yield "parts at the peak"
    for part, num_bytes in simulation.parts.items():
        yield f"  {num_bytes:>16,}  {part}"
    yield "alive at the peak: bytes, tensors, kind, module, operation"
    for group in simulation.live:
        yield (
            f"  {group.num_bytes:>16,}  {group.num_tensors:>5}  {group.kind:<16}  "
            f"{group.module or '-'}  {group.operation}"
        )
    yield from (f"checked: {check}" for check in simulation.checks)


def _traced(request: TraceRequest) -> Value:
    _silence()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nothing is compiled; bitsandbytes would load Inductor, 1 to 2 s
    from shardwise.trainer.simulation.describe import describe_traced

    return describe_traced(request, may_fork=True)


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
