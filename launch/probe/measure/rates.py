"""Has this machine's devices and links measured, in subprocesses that are ended when they take too long.

    device   one of the chosen GPUs, or the CPU: products, attention, copies, the host's AdamW
    peers    a copy from each GPU to each other one, and a look at what arrived            (two GPUs and more)
    gather   an all-gather over all devices, by nccl or gloo                               (two devices and more)

Where a figure fails (no torch, no room on the card) the plan keeps the datasheet's and a note says why. Links that hang
or deliver other values are a finding: `launch.probe.measure.links` judges them.
"""

import tempfile
from pathlib import Path

from msgspec.structs import replace

from launch.probe.measure.links import measure_gather, measure_peers
from launch.probe.measure.process import measuring_environment, run_modules
from trainer.spec import codec
from trainer.spec.errors import InputError
from trainer.spec.hardware import DeviceKind, Hardware
from trainer.spec.messages.measurement import Measurement

TIMEOUT_S = 120.0  # importing torch from a cold disk takes most of it; the measurement itself some fifteen seconds
MODULE = "trainer.runtime.tools.measure"


def measure_rates(hardware: Hardware) -> Measurement:
    """What the devices of `hardware` and the links between them reach."""
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
    """What one device of `hardware` reaches, as far as it was measured; a note says what is missing."""
    is_cpu = hardware.device_kind is DeviceKind.CPU
    environment = measuring_environment(hardware.gpus[:1], num_threads=hardware.host.num_cores if is_cpu else None)
    with tempfile.TemporaryDirectory(prefix="shardwise-measure-") as name:
        folder = Path(name)
        answer = folder / "rates.json"
        has_ended, error = run_modules(
            module,
            [[str(answer), hardware.device_kind]],
            environment=environment,
            folder=folder,
            timeout_s=timeout_s,
        )
        try:
            found = codec.read(answer, Measurement)
        except InputError:
            found = Measurement()
    if not has_ended:
        return replace(found, notes=(*found.notes, f"the device was not measured: it took more than {timeout_s:g} s"))
    if error or found == Measurement():
        return replace(found, notes=(*found.notes, f"the device was not measured: {error or 'it wrote nothing'}"))
    return found
