"""Whether the installed torch can use the GPUs that were found, asked of torch in a process of its own.

A GPU that torch cannot use would otherwise be found out by the ranks, or quietly left out.
"""

import os
import subprocess
import sys

from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.hardware import Hardware

_TIMEOUT_S = 120


def check_torch(hardware: Hardware) -> None:
    """EnvironmentFaultError with the remedy where torch cannot use a GPU of this machine; nothing without one."""
    if not hardware.gpus:
        return
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-m", "trainer.runtime.torch_check"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentFaultError(
            f"torch did not answer within {_TIMEOUT_S} s; try: python -m trainer.runtime.torch_check"
        ) from None
    if answer.returncode != 0:
        raise EnvironmentFaultError("\n".join(answer.stderr.strip().splitlines()[-3:]) or "torch cannot be loaded")
