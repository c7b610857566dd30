"""Measured rates of this machine: devices, links, disks.

Devices and links are measured by torch in processes of their own, which are killed after a time limit:

    device   one of the chosen GPUs, or the CPU: products, attention, copies, the host's AdamW
    peers    a copy from each GPU to each other one, and a check of what arrived           (two GPUs and more)
    gather   an all-gather over all devices, by nccl or gloo                               (two devices and more)
    between  the same over all devices of several machines, on each of which a probe runs  (two machines and more)

If one fails (no torch, no memory on the card) the plan uses the datasheet's figure and a note gives the reason. A link
that hangs or delivers other values is a finding (`judged_links`).

Disks are measured as NVMe offload uses them: large blocks, in order, past the page cache. The file is unlinked at once,
so nothing is left behind even by SIGKILL. O_DIRECT is used if the file system accepts it; else the file is flushed
before the clock stops and dropped from the cache before it is read. One thread and one block in flight: a lower bound.
"""

import contextlib
import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import asdict, replace

from shardwise.launch.probe.gpus import visible_devices
from shardwise.launch.worker import run_together
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind, Disk, Gpu, Hardware, Link, LinkKind, MeasuredRates, PeerCopy
from shardwise.trainer.spec.messages.worker_requests import GatherResult, Measurement
from shardwise.trainer.spec.units import GIB, MIB
from shardwise.trainer.spec.value import Value

TIMEOUT_S = 120.0  # mostly for the import of torch from a cold disk; the measurement itself takes some 15 s
MODULE = "shardwise.trainer.runtime.tools.measure"
PEERS_TIMEOUT_S = 90.0  # torch, a context on every card, and at most half a second for each pair
GATHER_TIMEOUT_S = 90.0  # the same, and NCCL's own start
BETWEEN_TIMEOUT_S = 300.0  # the same, and what one machine measures longer than another
WITHOUT_PEERS = {"NCCL_P2P_DISABLE": "1"}
BLOCK_BYTES = 8 * MIB  # a multiple of every disk's sector, as O_DIRECT requires
FILE_BYTES = GIB
BUDGET_S = 2.0  # for writing and for reading, each
_LARGEST_SHARE_OF_FREE = 0.1


class DiskSpeed(Value, frozen=True, kw_only=True):
    """Bytes per second in each direction."""

    write_bytes_per_s: int
    read_bytes_per_s: int


class Meeting(NamedTuple):
    """The place of this machine among several, and where their ranks meet."""

    num_nodes: int
    node_rank: int
    host: str
    port: int


class _Gathered(NamedTuple):
    """Result of an all-gather: bytes per second of the slowest rank, or the failure."""

    bytes_per_s: int | None = None
    failure: str = ""
    is_unfinished: bool = False


def measure_rates(hardware: Hardware) -> Measurement:
    """Measured rates of the devices of `hardware` and of the links between them."""
    device = measure_device(hardware)
    peers = measure_peers(hardware)
    gather = measure_gather(hardware)
    rates = replace(
        device.rates,
        peer_copies=peers.rates.peer_copies,
        all_gather_bytes_per_s=gather.rates.all_gather_bytes_per_s,
        gathers_only_without_peers=gather.rates.gathers_only_without_peers,
    )
    return Measurement(rates=rates, notes=(*device.notes, *peers.notes, *gather.notes))


def measure_device(hardware: Hardware, *, timeout_s: float = TIMEOUT_S, module: str = MODULE) -> Measurement:
    """Measured rates of one device of `hardware`; a note names what is missing."""
    is_cpu = hardware.device_kind is DeviceKind.CPU
    environment = measuring_environment(hardware.gpus[:1], num_threads=hardware.host.num_cores if is_cpu else None)
    result, has_ended, error = _run_measurement(module, [hardware.device_kind], environment, timeout_s)
    found = result or Measurement()
    reason = error or "it wrote nothing" if has_ended else f"it took more than {timeout_s:g} s"
    if has_ended and not error and found != Measurement():
        return found
    return replace(found, notes=(*found.notes, f"the device was not measured: {reason}"))


def measure_peers(hardware: Hardware, *, timeout_s: float = PEERS_TIMEOUT_S, module: str = MODULE) -> Measurement:
    """Copies from each GPU to each other one, by index; empty if there are fewer than two."""
    if len(hardware.gpus) < 2 or any(gpu.is_mig_on for gpu in hardware.gpus):
        return Measurement()
    found, has_ended, error = _run_measurement(module, ["peers"], measuring_environment(hardware.gpus), timeout_s)
    if found is None:
        reason = error or ("it wrote nothing" if has_ended else f"it took more than {timeout_s:g} s")
        return Measurement(notes=(f"copies between GPUs were not measured: {reason}",))
    gpus, copies = hardware.gpus, found.rates.peer_copies
    named = tuple(replace(copy, a=gpus[copy.a].index, b=gpus[copy.b].index) for copy in copies)
    notes = _peer_notes(named, timeout_s, error)
    notes = notes or ((f"not all copies between GPUs were measured: {error}",) if error else ())
    return Measurement(rates=MeasuredRates(peer_copies=named), notes=notes)


def measure_gather(hardware: Hardware, *, timeout_s: float = GATHER_TIMEOUT_S, module: str = MODULE) -> Measurement:
    """An all-gather over all devices, repeated without peer access if GPUs fail; empty for one device."""
    num_ranks = hardware.num_devices_per_node
    if num_ranks < 2 or any(gpu.is_mig_on for gpu in hardware.gpus):  # slices of one card have no links
        return Measurement()
    first = _gathered(hardware, timeout_s, module, {})
    if first.bytes_per_s is not None:
        return Measurement(rates=MeasuredRates(all_gather_bytes_per_s=first.bytes_per_s))
    failure = f"an all-gather over {num_ranks} devices {first.failure}"
    if hardware.device_kind is DeviceKind.CPU:
        return Measurement(notes=(failure,), is_unfinished=first.is_unfinished)
    second = _gathered(hardware, timeout_s, module, WITHOUT_PEERS)
    if second.bytes_per_s is None:
        note = f"{failure}, and so without peer access: training on several GPUs will as well"
        return Measurement(notes=(note,), is_unfinished=first.is_unfinished and second.is_unfinished)
    return Measurement(
        rates=MeasuredRates(all_gather_bytes_per_s=second.bytes_per_s, gathers_only_without_peers=True),
        notes=(f"{failure}, and works without peer access: plans set NCCL_P2P_DISABLE=1",),
    )


def measure_between_nodes(
    hardware: Hardware, meeting: Meeting, *, timeout_s: float = BETWEEN_TIMEOUT_S, module: str = MODULE
) -> Measurement:
    """An all-gather over all devices of several equal machines; every one of them calls it."""
    found = _gathered(hardware, timeout_s, module, {}, meeting)
    if found.bytes_per_s is not None:
        return Measurement(rates=MeasuredRates(between_nodes_bytes_per_s=found.bytes_per_s))
    note = (
        f"the network was not measured: an all-gather over {meeting.num_nodes} machines {found.failure}; start this "
        f"probe on each of them within {timeout_s:g} s, and let them reach {meeting.host}:{meeting.port}"
    )
    return Measurement(notes=(note,), is_unfinished=found.is_unfinished)


def with_network(hardware: Hardware, meeting: Meeting) -> Hardware:
    """Several machines like this one, with the rate of collectives between them, or a note why it is not known."""
    found = measure_between_nodes(hardware, meeting)
    rates = replace(hardware.rates, between_nodes_bytes_per_s=found.rates.between_nodes_bytes_per_s)
    return replace(hardware, num_nodes=meeting.num_nodes, rates=rates, notes=(*hardware.notes, *found.notes))


def _run_measurement(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> tuple[Measurement | None, bool, str]:
    """Result of a module, also of one that failed later; true if it ended in time; the error of a failure."""
    with tempfile.TemporaryDirectory(prefix="shardwise-measure-") as name:
        result = Path(name, "result.json")
        has_ended, error = run_together(
            module, [[str(result), *arguments]], environment=environment, folder=Path(name), timeout_s=timeout_s
        )
        try:
            return codec.read(result, Measurement), has_ended, error
        except InputError:
            return None, has_ended, error


def judged_links(links: Sequence[Link], rates: MeasuredRates) -> tuple[Link, ...]:
    """`links` without the peer access that does not work.

    A failed copy affects its own link, a failed all-gather every link over PCIe, since the bad one is not known.
    """
    bad = {frozenset((copy.a, copy.b)) for copy in rates.peer_copies if not copy.is_correct}

    def is_bad(link: Link) -> bool:
        over_pcie = rates.gathers_only_without_peers and link.kind is not LinkKind.NVLINK
        return over_pcie or frozenset((link.a, link.b)) in bad

    return tuple(replace(link, has_peer_access=False) if is_bad(link) else link for link in links)


def _peer_notes(copies: Sequence[PeerCopy], timeout_s: float, error: str) -> tuple[str, ...]:
    ended = f"failed ({error})" if error else f"did not end within {timeout_s:g} s"
    return tuple(
        f"a copy from GPU {copy.a} to GPU {copy.b} "
        f"{ended if copy.bytes_per_s is None else 'arrived with other values'}: plans set NCCL_P2P_DISABLE=1"
        for copy in copies
        if not copy.is_correct
    )


def _gathered(
    hardware: Hardware, timeout_s: float, module: str, more: dict[str, str], meeting: Meeting | None = None
) -> _Gathered:
    here = hardware.num_devices_per_node
    num_ranks = here if meeting is None else here * meeting.num_nodes
    first = 0 if meeting is None else here * meeting.node_rank
    address = [] if meeting is None else [f"tcp://{meeting.host}:{meeting.port}"]
    ranks = range(first, first + here)
    with tempfile.TemporaryDirectory(prefix="shardwise-gather-") as name:
        folder = Path(name)
        has_ended, error = run_together(
            module,
            [
                [str(folder), "gather", str(rank), str(num_ranks), hardware.device_kind]
                + [text for each in address for text in (str(rank - first), each)]
                for rank in ranks
            ],
            environment=measuring_environment(hardware.gpus, num_threads=1, **more),
            folder=folder,
            timeout_s=timeout_s,
        )
        if not has_ended:
            return _Gathered(failure=f"did not end within {timeout_s:g} s", is_unfinished=True)
        try:
            results = [codec.read(folder / f"{rank}.json", GatherResult) for rank in ranks]
        except InputError:
            return _Gathered(failure=f"failed ({error or 'a rank wrote nothing'})")
    if not all(result.is_correct for result in results):
        return _Gathered(failure="delivered other values")
    return _Gathered(bytes_per_s=min(result.bytes_per_s for result in results))


def measure_disks(disks: Sequence[Disk], folders: Sequence[Path]) -> tuple[tuple[Disk, ...], tuple[str, ...]]:
    """The disks with their speeds, and a sentence for each that could not be measured."""
    measured, notes = [], []
    for disk in disks:
        folder = writable_folder(disk, folders)
        speed = measure_folder(folder) if folder is not None else None
        if speed is None:
            notes.append(f"disk {disk.path}: not measured, no folder of it is writable with enough free space")
            measured.append(disk)
            continue
        measured.append(replace(disk, **asdict(speed)))
    return tuple(measured), tuple(notes)


def writable_folder(disk: Disk, folders: Sequence[Path]) -> Path | None:
    """The disk's mount point or, if that is not writable, the first of `folders` on the same disk."""
    with contextlib.suppress(OSError):
        device = Path(disk.path).stat().st_dev
        for folder in (Path(disk.path), *folders):
            with contextlib.suppress(OSError):
                if folder.stat().st_dev == device and os.access(folder, os.W_OK | os.X_OK):
                    return folder
    return None


def measure_folder(folder: Path, *, file_bytes: int = FILE_BYTES, budget_s: float = BUDGET_S) -> DiskSpeed | None:
    """Speeds of a temporary file in `folder`; None if it has no space or permission for one."""
    try:
        space = os.statvfs(folder)
        num_blocks = min(file_bytes, int(space.f_frsize * space.f_bavail * _LARGEST_SHARE_OF_FREE)) // BLOCK_BYTES
        if not num_blocks:
            return None
        with tempfile.TemporaryFile(dir=folder, prefix=".shardwise-measure-", buffering=0) as file:
            return _measure_file(file.fileno(), num_blocks, budget_s)
    except OSError:
        return None


def _measure_file(descriptor: int, num_blocks: int, budget_s: float) -> DiskSpeed:
    block = mmap.mmap(-1, BLOCK_BYTES)  # page-aligned, as O_DIRECT requires
    block.write(os.urandom(BLOCK_BYTES))  # not compressible
    _bypass_page_cache(descriptor)
    written, write_s = _timed(lambda number: os.pwrite(descriptor, block, number * BLOCK_BYTES), num_blocks, budget_s)
    started = time.perf_counter()
    os.fsync(descriptor)
    write_s += time.perf_counter() - started
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    blocks_written = written // BLOCK_BYTES
    read, read_s = _timed(lambda number: os.preadv(descriptor, [block], number * BLOCK_BYTES), blocks_written, budget_s)
    return DiskSpeed(write_bytes_per_s=round(written / write_s), read_bytes_per_s=round(read / read_s))


def _bypass_page_cache(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # tmpfs and some network file systems refuse it
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)


def _timed(transfer: Callable[[int], int], num_blocks: int, budget_s: float) -> tuple[int, float]:
    """Bytes moved and seconds taken by whole blocks until all are done or the time is up."""
    moved = 0
    started = time.perf_counter()
    for number in range(num_blocks):
        moved += transfer(number)
        if time.perf_counter() - started > budget_s:
            break
    return moved, time.perf_counter() - started


def measuring_environment(gpus: Sequence[Gpu], *, num_threads: int | None = None, **more: str) -> dict[str, str]:
    """This process's environment, with exactly these GPUs in it."""
    environment = {**os.environ, **more, "CUDA_VISIBLE_DEVICES": visible_devices(gpus)}
    if num_threads:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    return environment
