"""Has the device measured in a subprocess, since its ceilings need torch and this package never imports it.

`python -m trainer.runtime.measure OUT.json DEVICE` sees exactly one of the chosen GPUs. Where it fails (no torch, no
room on the card) the plan keeps datasheet figures and a note says why.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from launch.gpu_selection import visible_devices
from trainer.spec import codec
from trainer.spec.errors import InputError
from trainer.spec.hardware import DeviceKind, Hardware, MeasuredRates

TIMEOUT_S = 120.0  # importing torch from a cold disk takes most of it; the measurement itself some ten seconds
MODULE = "trainer.runtime.measure"


def measure_rates(
    hardware: Hardware, *, timeout_s: float = TIMEOUT_S, module: str = MODULE
) -> tuple[MeasuredRates, tuple[str, ...]]:
    """What one device of `hardware` reaches, or nothing and a note."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = visible_devices(hardware.gpus[:1])
    if hardware.device_kind is DeviceKind.CPU and hardware.host.num_cores:
        environment["OMP_NUM_THREADS"] = str(hardware.host.num_cores)
    with tempfile.TemporaryDirectory(prefix="shardwise-measure-") as folder:
        answer = Path(folder) / "rates.json"
        try:
            ended = subprocess.run(
                [sys.executable, "-m", module, str(answer), hardware.device_kind],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return MeasuredRates(), (f"the device was not measured: it took more than {timeout_s:g} s",)
        try:
            return codec.read(answer, MeasuredRates), ()
        except InputError:
            last = (ended.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
            return MeasuredRates(), (f"the device was not measured: {last}",)
