"""Starts an attempt on one machine of several: everything that is this machine's own, then the launcher.

Of its own it has: folders that must be there, operators compiled for its CPU, a folder on its NVMe disk, cores, and the
network interface that leads to the others. What the plan says is the same everywhere.
"""

import contextlib
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml

from launch.attempt.local_ranks import LocalRanks
from launch.engine.accelerate_config import accelerate_config, accelerate_file
from launch.engine.command import launch_command, launch_environment
from launch.engine.nvme_folder import check_nvme, held_folder, nvme_folder
from launch.engine.operators import build_needed, remove_stale_locks
from launch.inputs.flash_kernel import fetch_flash_kernel
from launch.inputs.staging import copy_staged
from launch.nodes.channel import Start
from launch.probe.surroundings import interface_of, read_host
from launch.rundir.recorded_environment import write_environment
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.hardware import DeviceKind
from trainer.spec.plan import Plan

_INTERFACE_SETTINGS = {
    DeviceKind.CPU: ("GLOO_SOCKET_IFNAME",),
    DeviceKind.CUDA: ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
}


class NodeAttempt(NamedTuple):
    """An attempt as one machine runs it."""

    ranks: LocalRanks
    held: contextlib.ExitStack  # what goes with its end
    attempt_dir: Path
    mine: range  # ranks

    def files(self) -> tuple[str, ...]:
        """What this machine's ranks left in the attempt's folder for the supervisor to read."""
        names = [f"report-rank-{rank}.json" if rank else "report.json" for rank in self.mine]
        return tuple(name for name in names if (self.attempt_dir / name).is_file())

    def end(self) -> None:
        """Ends whatever is alive."""
        with self.held:
            self.ranks.end()


def start_on_node(
    start: Start,
    *,
    node_rank: int,
    environment: Mapping[str, str],
    on_progress: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> NodeAttempt:
    """Starts this machine's ranks; a ShardwiseError says what is missing here."""
    attempt_dir, cache = Path(start.attempt_dir), Path(start.cache)
    plan = codec.read(attempt_dir / "plan.json", Plan)
    host = read_host()
    _check_folders(plan)
    copy_staged(plan.staged, on_progress=on_progress)
    check_nvme(plan)
    fetch_flash_kernel(plan, on_progress=on_progress, should_stop=should_stop)
    here = msgspec.structs.replace(plan, hardware=msgspec.structs.replace(plan.hardware, host=host))
    extensions = build_needed(here, cache_home=cache, on_progress=on_progress, should_stop=should_stop)
    remove_stale_locks(extensions, on_progress=on_progress)  # a rank before may have left one
    settings = accelerate_config(plan, attempt_dir=attempt_dir, node_rank=node_rank, head=start.head, port=start.port)
    file = accelerate_file(attempt_dir, node_rank)
    codec.write_bytes(file, yaml.safe_dump(settings, sort_keys=False).encode())
    argv = launch_command(attempt_dir, log_dir=attempt_dir / "logs", python=sys.executable, node_rank=node_rank)
    variables = launch_environment(environment, plan, extensions_dir=extensions, cores=host.num_cores or 1)
    interfaces = interface_settings(environment, start, _INTERFACE_SETTINGS[plan.device_kind])
    write_environment(attempt_dir, variables | interfaces, node_rank=node_rank)
    mine, way = _ranks_of(plan, node_rank), " ".join(f"{name}={value}" for name, value in interfaces.items())
    on_progress(f"ranks {mine.start} to {mine.stop - 1} meet at {start.head}:{start.port}{' by ' + way if way else ''}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(held_folder(nvme_folder(plan, attempt_dir.parent.parent, int(attempt_dir.name))))
        ranks = LocalRanks(
            argv, attempt_dir=attempt_dir, environment=variables | interfaces, node_rank=node_rank, ranks=mine
        )
        return NodeAttempt(ranks, stack.pop_all(), attempt_dir, mine)


def interface_settings(environment: Mapping[str, str], start: Start, settings: Sequence[str]) -> dict[str, str]:
    """The interface for gloo, and for NCCL's first contact: the one on the way to rank 0. What a person set stays.

    Left alone gloo takes whatever the machine's own name means, on many machines 127.0.1.1, and NCCL may take the
    bridge of a container engine.
    """
    name = interface_of(_address_towards(start.head, start.port))
    own = {setting: environment[setting] for setting in settings if setting in environment}
    return own if name in (None, "lo") else {setting: str(name) for setting in settings} | own


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((host, port))
        address: str = route.getsockname()[0]
    return address


def _ranks_of(plan: Plan, node_rank: int) -> range:
    on_each = plan.chosen.num_ranks // plan.num_machines
    return range(node_rank * on_each, (node_rank + 1) * on_each)


def _check_folders(plan: Plan) -> None:
    """EnvironmentFaultError names what this machine does not see."""
    needed = {
        "the model": plan.model_path,
        "the tokenizer": plan.tokenizer_path,
        "the prepared data": plan.data.cache_dir,
    }
    for what, path in needed.items():
        if path is not None and not Path(path).exists():
            raise EnvironmentFaultError(
                f"{what} is not there: {path}\nkeep it on a file system that every machine sees, "
                "such as folders.cache and folders.huggingface in config.yaml name"
            )
