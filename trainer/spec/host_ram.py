"""RAM of a node that a run may use, and how much of it may be pinned.

What other processes hold and the system needs is not a run's. Every budget of host RAM follows from these functions:
those of `--hardware`, of a probed machine, of a Slurm job, of `estimate` and of a run on a CPU.

    a grant     A cgroup or a Slurm job charges its own processes alone, so what is free in it is usable, but never
                more than the machine itself has left.
    measured    MemAvailable counts what the system and other processes hold. They may grow during a run, by
                `GROWTH_BYTES` or a sixteenth of what is available; and what they hold while the machine is idle is not
                all that they ever need, so `system_bytes` of the whole stay free in any case.
    stated      All but `system_bytes` of the RAM.

`system_bytes` is what Kubernetes services reserve for kernel, daemons and container runtime, in shares of the first 4
GiB, the next 4, 8 and 112, and the rest: 3.6 of 32 GiB, 9.3 of 128, 27 of 1,024 (Google Kubernetes Engine, "Plan node
sizes", and AKS alike). A desktop needs at least `DESKTOP_BYTES`: GNOME is idle at 2.5 GiB and exceeds 4 with a browser
(Ubuntu requires 4 GB, 6 since 26.04), and systemd-oomd ends its processes once memory and swap are both 90 % full
(oomd.conf(5), SwapUsedLimit).

Pinned memory is never swapped and never moved. CUDA sets no limit on Linux. Drivers of other GPUs do: amdgpu three
quarters of the RAM, since the OOM killer cannot account for such pages (amdgpu_ttm.c), TTM half. A desktop, which swaps
what is not pinned, may pin three quarters, a server nine tenths. WSL2 pins half of its RAM, which is half of Windows'
unless .wslconfig sets `memory`. torch rounds pinned blocks up to powers of two, for which a server that pinned 41 GiB
on a desktop of 60 was killed (sglang#39021); `launch.engine.launcher` prevents it.

More RAM never grants less (a test).
"""

import math

from shardwise.trainer.spec.hardware import Host
from shardwise.trainer.spec.units import GIB

# Of RAM up to so many GiB, beyond the row before.
_SYSTEM_SHARES = ((4, 0.25), (8, 0.20), (16, 0.10), (128, 0.06), (math.inf, 0.02))
DESKTOP_BYTES = 4 * GIB
GROWTH_BYTES = 1 * GIB
_GROWTH_SHARE = 1 / 16
PINNED_SHARE = 0.9
DESKTOP_PINNED_SHARE = 0.75
WSL_PINNED_SHARE = 0.5
NEARLY_FULL = 0.9  # of a budget; a plan above warns


def system_bytes(ram_bytes: int, *, is_desktop: bool) -> int:
    """Bytes of a machine that its system and other processes need."""
    reserve, below = 0.0, 0.0
    for limit, share in _SYSTEM_SHARES:
        reserve += share * max(0.0, min(ram_bytes / GIB, limit) - below)
        below = limit
    return max(round(reserve * GIB), DESKTOP_BYTES if is_desktop else 0)


def machine_bytes(ram_bytes: int, available_bytes: int | None, *, is_desktop: bool = False) -> int:
    """Bytes of a machine without a grant that a run may use; `available_bytes` as measured, or None."""
    usable = ram_bytes - system_bytes(ram_bytes, is_desktop=is_desktop)
    if available_bytes is not None:
        usable = min(usable, available_bytes - min(GROWTH_BYTES, round(_GROWTH_SHARE * available_bytes)))
    return max(0, usable)


def usable_ram(host: Host, stated_bytes: int | None = None) -> int | None:
    """Bytes of a node's RAM that a run may use, or None if they are unknown; `stated_bytes` is limits.host_ram.

    A limit that the machine has free is used whole: it states what a run may use, the reserve is the user's matter.
    """
    available = host.ram_available_bytes or host.ram_bytes
    if stated_bytes is not None and (host.is_ram_assumed or available is None or stated_bytes <= available):
        return stated_bytes
    if host.usable_ram_bytes is not None or host.ram_bytes is None:
        return host.usable_ram_bytes if host.usable_ram_bytes is not None else host.ram_available_bytes
    return machine_bytes(host.ram_bytes, host.ram_available_bytes, is_desktop=host.is_desktop)


def pinnable_ram(host: Host, stated_bytes: int | None = None) -> int | None:
    """Bytes of a node's RAM that a run may pin, or None if they are unknown; `stated_bytes` is limits.host_ram."""
    if host.pinned_limit_bytes is not None:
        return host.pinned_limit_bytes
    ram = stated_bytes if host.is_ram_assumed and stated_bytes is not None else host.ram_bytes
    return None if ram is None else int(pinned_share(host) * ram)


def pinned_share(host: Host) -> float:
    """The part of a machine's RAM that may be pinned."""
    if host.is_wsl:
        return WSL_PINNED_SHARE
    return DESKTOP_PINNED_SHARE if host.is_desktop else PINNED_SHARE


def ram_for(need_bytes: int, pinned_bytes: int, *, is_desktop: bool) -> int:
    """Whole GiB of RAM of a machine on which a run may use and pin so many bytes."""
    share = DESKTOP_PINNED_SHARE if is_desktop else PINNED_SHARE
    size = math.ceil(max(need_bytes, pinned_bytes / share) / GIB)
    while machine_bytes(size * GIB, None, is_desktop=is_desktop) < need_bytes:
        size += 1
    return size
