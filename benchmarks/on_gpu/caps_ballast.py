"""Holds what a cap leaves of a card, for state that no allocator counts.

The allocator of a run is held to its cap, but paged optimizer state lies in managed memory, which the driver leaves on
the card while the card has room. So another process takes the rest of the card, and the driver has to move pages as it
would on a small one.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.spec.errors import EnvironmentFaultError

_WAIT_S = 120.0  # for a process that only has to go
# Takes memory until so many bytes are free, says what is used in all, and holds it until its input ends. What is left
# over is less than one segment of torch's allocator.
_HOLD = """
import sys
import torch

keep, held = int(sys.argv[1]), []
torch.zeros(1, device="cuda")
while (spare := torch.cuda.mem_get_info()[0] - keep) > 2**25:
    held.append(torch.empty(min(spare, 2**32), dtype=torch.uint8, device="cuda"))
free, total = torch.cuda.mem_get_info()
print(total - free, flush=True)
sys.stdin.read()
"""


@contextmanager
def held_to(cap_bytes: int) -> Iterator[int]:
    """Leaves `cap_bytes` of the card free while the block runs, and yields the bytes that are used of it before.

    EnvironmentFaultError where there is no card, or it cannot be held.
    """
    argv = [sys.executable, "-c", _HOLD, str(cap_bytes)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            used = process.stdout.readline().strip()
            if not used.isdecimal():
                process.stdin.close()
                last = (process.stderr.read().strip().splitlines() or ["it ended without a word"])[-1]
                raise EnvironmentFaultError(f"the rest of the card could not be held: {last}")
            yield int(used)
        finally:
            process.stdin.close()
            try:
                process.wait(_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
