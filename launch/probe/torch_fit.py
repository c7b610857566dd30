"""Check that the installed torch can use the GPUs of a run, by using them in a process of its own.

`trainer.runtime.tools.torch_check` allocates and computes on every card of the run, in the environment of the ranks.
Only a failure is explained: by the build, the card, the memory that others use, the driver. A card that works is
accepted with any driver, since CUDA has forward compatibility. If only expandable segments fail, as on a vGPU, the run
does without them. `make install` runs `python -m shardwise.launch.probe.torch_fit`.

Minimum drivers are NVIDIA's, from the compatibility table of the CUDA Toolkit release notes.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from msgspec.structs import replace

from shardwise.launch.probe.gpus import ALLOCATOR_VARIABLES, cuda_variables, name_gpus
from shardwise.launch.probe.machine import read_hardware
from shardwise.launch.worker import WorkerTimeoutError, ask, python_environment
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, ShardwiseError
from shardwise.trainer.spec.hardware import Gpu, Hardware
from shardwise.trainer.spec.messages.worker_requests import DeviceTrial, TorchFacts
from shardwise.trainer.spec.packages import CUDA_12_INDEX, TORCH_VERSION, pip_line
from shardwise.trainer.spec.value import Value

TIMEOUT_S = 120.0
MINIMUM_DRIVER = {12: "525.60.13", 13: "580.65.06"}
_REMOVED = pip_line("-y", "torch", command="uninstall")  # else pip finds it installed
BUILT_FOR_CUDA = f"{_REMOVED} && {pip_line(f'torch=={TORCH_VERSION}')}"
_ON_CUDA_12 = f"{_REMOVED} && {pip_line(f'torch=={TORCH_VERSION}', '--index-url', CUDA_12_INDEX)}"
_NO_EXPANDING = "expandable segments fail on this GPU: its runs use the allocator without them"
_ARCHITECTURE = re.compile(r"(?:sm|compute)_(\d+)(\d)[a-z]?")


class TorchResult(Value, frozen=True, kw_only=True):
    """The result of `torch_check`, or the reason why there is none."""

    facts: TorchFacts | None = None
    problem: str | None = None
    is_slow: bool = False  # it had not loaded within the time limit, which proves no fault
    refused: dict[str, str] = {}  # the user's allocator settings, if GPUs work only without them


def check_torch(hardware: Hardware, environment: Mapping[str, str] = os.environ) -> Hardware:
    """The hardware with the abilities of torch's allocator on it.

    Raises EnvironmentFaultError with the remedy if torch cannot use one of its GPUs.
    """
    if not hardware.gpus:
        return hardware
    result = run_torch_check(hardware, environment)
    if result.facts is None:
        raise EnvironmentFaultError(f"torch: {result.problem}; `shardwise doctor` shows more")
    fault = find_fault(hardware, result)
    if fault:
        raise EnvironmentFaultError("\n".join(fault))
    can_expand = result.facts.expands_segments
    if can_expand is None or can_expand is hardware.can_expand_segments:
        return hardware
    has_own_settings = any(name in environment for name in ALLOCATOR_VARIABLES)
    notes = () if can_expand or has_own_settings else (_NO_EXPANDING,)
    return replace(hardware, can_expand_segments=can_expand, notes=(*hardware.notes, *notes))


def run_torch_check(
    hardware: Hardware | None,
    environment: Mapping[str, str],
    *,
    python: str = sys.executable,
    timeout_s: float = TIMEOUT_S,
) -> TorchResult:
    """Result of `runtime.tools.torch_check` in the environment of the ranks; without hardware, of the GPUs torch sees.

    If a card fails, the check runs once more without the settings of the allocator, which may be the cause.
    """
    added = {} if hardware is None else cuda_variables(hardware, len(hardware.gpus), environment)
    given = {**environment, **added}
    result = _run_check(given, python, timeout_s)
    settings = {name: given[name] for name in ALLOCATOR_VARIABLES if name in given}
    if not settings or not _has_failed(result):
        return result
    plain = _run_check({name: given[name] for name in given if name not in settings}, python, timeout_s)
    if plain.facts is None or _has_failed(plain):
        return result
    return replace(plain, refused={name: value for name, value in settings.items() if name in environment})


def _run_check(environment: Mapping[str, str], python: str, timeout_s: float) -> TorchResult:
    try:
        facts = ask(
            "shardwise.trainer.runtime.tools.torch_check",
            None,
            TorchFacts,
            subject="its check",
            inherited=python_environment(environment),
            timeout_s=timeout_s,
            python=python,
        )
    except WorkerTimeoutError:
        return TorchResult(problem=f"it did not load within {timeout_s:g} s", is_slow=True)
    except ShardwiseError as error:
        return TorchResult(problem=str(error))
    return TorchResult(facts=facts)


def _has_failed(result: TorchResult) -> bool:
    """True if a card cannot be used, for another reason than that other processes use its memory."""
    trials = () if result.facts is None else result.facts.devices
    return any(trial.problem is not None and not trial.is_out_of_memory for trial in trials)


def find_fault(hardware: Hardware, result: TorchResult) -> tuple[str, ...]:
    """The reason why torch cannot use the GPUs of a run, then the remedy; empty if it can."""
    gpus, facts = hardware.gpus, result.facts
    if not gpus or facts is None:
        return ()
    if facts.cuda is None:
        return (
            f"torch {facts.version} was built without CUDA, and there is {_named(gpus[0])}",
            f"remedy: {BUILT_FOR_CUDA}",
        )
    if result.refused:
        setting = " ".join(f"{name}={value}" for name, value in result.refused.items())
        return (f"{_named(gpus[0])} cannot be used with {setting}", f"remedy: unset {' '.join(result.refused)}")
    failing = failing_gpus(gpus, facts)
    return () if not failing else _explained(*failing[0], facts, num_gpus=len(gpus))


def failing_gpus(gpus: Sequence[Gpu], facts: TorchFacts) -> list[tuple[Gpu, DeviceTrial | None]]:
    """The cards that torch cannot use, each with its trial; None: torch does not see it."""
    tried = zip_longest(gpus, facts.devices[: len(gpus)])
    return [(gpu, trial) for gpu, trial in tried if trial is None or trial.problem is not None]


def _explained(gpu: Gpu, trial: DeviceTrial | None, facts: TorchFacts, *, num_gpus: int) -> tuple[str, ...]:
    build = f"torch {facts.version} (CUDA {facts.cuda})"
    capability = gpu.compute_capability
    if capability is not None and facts.architectures and not runs_on(capability, facts.architectures):
        return (
            f"{gpu.name} has compute capability {capability[0]}.{capability[1]}; {build} has code for "
            f"{', '.join(facts.architectures)} only",
            *_other_build(capability, facts.architectures),
        )
    if trial is not None and trial.is_out_of_memory:
        return (
            f"GPU {gpu.index} ({gpu.name}) has no memory left: {trial.problem}",
            "remedy: `nvidia-smi` shows the process that uses it; end that, or name other cards with --gpus",
        )
    needed = MINIMUM_DRIVER.get(int(str(facts.cuda).partition(".")[0]))
    if needed is not None and gpu.driver is not None and _numbers(gpu.driver) < _numbers(needed):
        return (
            f"{_named(gpu)} cannot be used: {build} needs driver {needed} or newer",
            f"remedy: update the NVIDIA driver to {needed} or newer (for a data-centre card its package cuda-compat is "
            "enough)",
            f"or install a build for CUDA 12: {_ON_CUDA_12}",
        )
    if trial is None:
        reason = f": {facts.problem}" if facts.problem else ""
        return (
            f"{_named(gpu)} is not used: {build} sees {len(facts.devices)} of {num_gpus} GPUs{reason}",
            "remedy: check CUDA_VISIBLE_DEVICES and the permissions of /dev/nvidia*; in a container: --gpus all; "
            "`sudo dmesg | grep -i xid` names a card that failed",
        )
    return (
        f"GPU {gpu.index} ({_named(gpu)}) cannot be used by {build}: {trial.problem}",
        f"remedy: `sudo dmesg | grep -i xid` shows a fault, `nvidia-smi -i {gpu.index}` its processes; --gpus "
        "names other cards",
    )


def _other_build(capability: tuple[int, int], architectures: Sequence[str]) -> tuple[str, ...]:
    """Remedy for a card that this torch has no code for: another build."""
    built = [(int(found[1]), int(found[2])) for name in architectures if (found := _ARCHITECTURE.fullmatch(name))]
    if built and capability > max(built):
        return ("remedy: install a newer torch, which has code for this card",)
    return (
        f"remedy: a build for CUDA 12 has code for older cards: {_ON_CUDA_12}",
        "or train on the CPU: CUDA_VISIBLE_DEVICES= (empty)",
    )


def runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """True if binary code (same major, minor not above) or PTX (not above) fits the device."""
    for name in architectures:
        found = _ARCHITECTURE.fullmatch(name)
        if found is None:
            continue
        built = (int(found[1]), int(found[2]))
        if name.startswith("compute") and built <= capability:
            return True
        if name.startswith("sm") and built[0] == capability[0] and built[1] <= capability[1]:
            return True
    return False


def _named(gpu: Gpu) -> str:
    return f"{gpu.name} (driver {gpu.driver or 'unknown'})"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def main() -> ExitCode:
    """Exit code 4 if torch can use none of the GPUs of a run; names those that are left out."""
    try:
        hardware = read_hardware()
    except EnvironmentFaultError as error:  # a run stops with it; what needs no GPU works
        sys.stderr.write(f"{error}\n")
        return ExitCode.DONE
    for sentence in hardware.excluded:
        sys.stderr.write(f"left out: {sentence}\n")
    if not hardware.gpus:
        return ExitCode.DONE
    result = run_torch_check(hardware, os.environ)
    if result.facts is None:
        sys.stderr.write(f"torch: {result.problem}\n")
        return ExitCode.ENVIRONMENT
    fault = find_fault(hardware, result)
    failing = failing_gpus(hardware.gpus, result.facts)
    if 0 < len(failing) < len(hardware.gpus):
        sys.stderr.write(f"not usable: {name_gpus([gpu.index for gpu, _ in failing])}: {fault[0]}\n")
        return ExitCode.DONE
    sys.stderr.writelines(f"{line}\n" for line in fault)
    return ExitCode.ENVIRONMENT if fault else ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
