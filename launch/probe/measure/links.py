"""Measures the links between the devices of a machine, and judges them: is what arrives right, and does it arrive?

Machines exist whose GPUs announce peer access over PCIe and then hang in the first collective, or deliver other bytes.
`python -m trainer.runtime.tools.measure_peers` finds the pair, `measure_gather` finds out whether NCCL works as
training would use it; where it does not, it is tried once more through host memory. What is found goes into
`Hardware.needs_p2p_disabled`, which every plan for the machine carries.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from launch.probe.measure.process import measuring_environment, run_modules
from trainer.spec import codec
from trainer.spec.errors import InputError
from trainer.spec.hardware import DeviceKind, Hardware, Link, LinkKind, MeasuredRates, PeerCopy
from trainer.spec.messages.measurement import GatherResult, Measurement

PEERS_MODULE = "trainer.runtime.tools.measure_peers"
GATHER_MODULE = "trainer.runtime.tools.measure_gather"
PEERS_TIMEOUT_S = 90.0  # torch, a context on every card, and at most half a second for each pair
GATHER_TIMEOUT_S = 90.0  # the same, and NCCL's own start
WITHOUT_PEERS = {"NCCL_P2P_DISABLE": "1"}


def measure_peers(hardware: Hardware, *, timeout_s: float = PEERS_TIMEOUT_S, module: str = PEERS_MODULE) -> Measurement:
    """Copies from each GPU to each other one, by their indices; nothing where there are fewer than two."""
    if not _has_peers(hardware):
        return Measurement()
    with tempfile.TemporaryDirectory(prefix="shardwise-peers-") as name:
        folder = Path(name)
        answer = folder / "peers.json"
        has_ended, error = run_modules(
            module,
            [[str(answer)]],
            environment=measuring_environment(hardware.gpus),
            folder=folder,
            timeout_s=timeout_s,
        )
        try:
            copies = codec.read(answer, Measurement).rates.peer_copies
        except InputError:
            reason = error or (f"it took more than {timeout_s:g} s" if not has_ended else "it wrote nothing")
            return Measurement(notes=(f"copies between GPUs were not measured: {reason}",))
    named = tuple(replace(copy, a=hardware.gpus[copy.a].index, b=hardware.gpus[copy.b].index) for copy in copies)
    notes = _peer_notes(named, timeout_s, error)
    if error and not notes:
        notes = (f"not all copies between GPUs were measured: {error}",)
    return Measurement(rates=MeasuredRates(peer_copies=named), notes=notes)


def measure_gather(
    hardware: Hardware, *, timeout_s: float = GATHER_TIMEOUT_S, module: str = GATHER_MODULE
) -> Measurement:
    """An all-gather over all devices of this machine; nothing where there is one.

    Where GPUs fail at it, it is tried again without peer access.
    """
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


def judged_links(links: Sequence[Link], rates: MeasuredRates) -> tuple[Link, ...]:
    """`links` without the peer access that was found not to work.

    A copy condemns its own link, an all-gather every link over PCIe, since it does not say which.
    """
    bad = {frozenset((copy.a, copy.b)) for copy in rates.peer_copies if not copy.is_correct}

    def is_bad(link: Link) -> bool:
        over_pcie = rates.gathers_only_without_peers and link.kind is not LinkKind.NVLINK
        return over_pcie or frozenset((link.a, link.b)) in bad

    return tuple(msgspec.structs.replace(link, has_peer_access=False) if is_bad(link) else link for link in links)


def _has_peers(hardware: Hardware) -> bool:
    return len(hardware.gpus) > 1 and not any(gpu.is_mig_on for gpu in hardware.gpus)


def _peer_notes(copies: Sequence[PeerCopy], timeout_s: float, error: str) -> tuple[str, ...]:
    ended = f"failed ({error})" if error else f"did not end within {timeout_s:g} s"
    wrong = [copy for copy in copies if not copy.is_correct]
    return tuple(
        f"a copy from GPU {copy.a} to GPU {copy.b} "
        f"{ended if copy.bytes_per_s is None else 'arrived with other values'}: plans set NCCL_P2P_DISABLE=1"
        for copy in wrong
    )


class _Gathered(NamedTuple):
    """An all-gather: bytes per second of the slowest rank, or what happened."""

    bytes_per_s: int | None = None
    failure: str = ""
    is_unfinished: bool = False


def _gathered(hardware: Hardware, timeout_s: float, module: str, more: dict[str, str]) -> _Gathered:
    num_ranks = hardware.num_devices_per_node
    with tempfile.TemporaryDirectory(prefix="shardwise-gather-") as name:
        folder = Path(name)
        has_ended, error = run_modules(
            module,
            [[str(folder), str(rank), str(num_ranks), hardware.device_kind] for rank in range(num_ranks)],
            environment=measuring_environment(hardware.gpus, num_threads=1, **more),
            folder=folder,
            timeout_s=timeout_s,
        )
        if not has_ended:
            return _Gathered(failure=f"did not end within {timeout_s:g} s", is_unfinished=True)
        try:
            results = [codec.read(folder / f"{rank}.json", GatherResult) for rank in range(num_ranks)]
        except InputError:
            return _Gathered(failure=f"failed ({error or 'a rank wrote nothing'})")
    if not all(result.is_correct for result in results):
        return _Gathered(failure="delivered other values")
    return _Gathered(bytes_per_s=min(result.bytes_per_s for result in results))
