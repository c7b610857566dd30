"""`doctor`: what the Windows Subsystem for Linux does differently.

Windows lets GPU memory spill into RAM instead of failing, pins at most half of the RAM that WSL has, gives WSL half of
the machine's RAM unless .wslconfig says otherwise, and reaches the disks of Windows (/mnt/c) through a file server.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from launch.doctor.finding import Finding, fine, warning
from launch.doctor.machine import Machine, Place
from launch.probe.disks import mount_of
from launch.probe.host import is_wsl, parse_meminfo, parse_mountinfo, read_text
from trainer.spec.units import GIB, format_bytes
from trainer.spec.value import Value

SMALL_RAM_BYTES = 16 * GIB
_WINDOWS_FILESYSTEMS = frozenset({"9p", "drvfs", "virtiofs"})
_MEMORY = re.compile(r"^\s*memory\s*=\s*(\S+)", re.MULTILINE | re.IGNORECASE)


class Wsl(Value, frozen=True, kw_only=True):
    """What is known of it from inside."""

    ram_bytes: int | None
    stated_memory: str | None  # of .wslconfig
    config: str | None  # its path
    on_windows: tuple[str, ...]  # folders of ours that lie on a disk of Windows


def read_wsl(place: Place) -> Wsl | None:
    """None elsewhere."""
    if not is_wsl(read_text(place.root / "proc/version")):
        return None
    configs = sorted(place.root.glob("mnt/[a-z]/Users/*/.wslconfig"))
    stated = _MEMORY.search(read_text(configs[0])) if configs else None
    return Wsl(
        ram_bytes=parse_meminfo(read_text(place.root / "proc/meminfo")).get("MemTotal"),
        stated_memory=stated[1] if stated else None,
        config=str(configs[0]) if configs else None,
        on_windows=tuple(_on_windows(place)),
    )


def _on_windows(place: Place) -> Iterator[str]:
    mounts = parse_mountinfo(read_text(place.root / "proc/self/mountinfo"))
    for folder in dict.fromkeys((place.working, place.output, place.cache, place.hub)):
        mount = mount_of(Path(folder), mounts)
        if mount is not None and mount.filesystem in _WINDOWS_FILESYSTEMS and mount.mount_point.startswith("/mnt/"):
            yield str(folder)


def check_wsl(machine: Machine) -> Iterator[Finding]:
    """Nothing where this is no WSL."""
    found = read_wsl(machine.place)
    if found is not None:
        yield from judge_wsl(found, has_gpus=machine.has_gpus)


def judge_wsl(found: Wsl, *, has_gpus: bool) -> Iterator[Finding]:
    if has_gpus:
        yield warning(
            "under WSL the driver moves GPU memory to RAM instead of failing: a run that does not fit crawls",
            "NVIDIA Control Panel > Manage 3D settings > CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback; or "
            "cap it with --vram",
        )
    if found.ram_bytes is not None:
        half = format_bytes(found.ram_bytes // 2)
        if found.ram_bytes < SMALL_RAM_BYTES:
            said = f"memory={found.stated_memory} in {found.config}" if found.stated_memory else "half of Windows' RAM"
            yield warning(
                f"WSL has {format_bytes(found.ram_bytes)} of RAM ({said}), and can pin {half} of it for offload",
                "[wsl2] memory=SIZE in %UserProfile%\\.wslconfig, then wsl --shutdown",
            )
        else:
            yield fine(f"WSL has {format_bytes(found.ram_bytes)} of RAM, and can pin {half} of it for offload")
    for folder in found.on_windows:
        yield warning(
            f"{folder} lies on a disk of Windows, which WSL reaches through a file server: ten times slower and more",
            "move it below the home of WSL (~), or name other folders (output, folders.cache and folders.huggingface)",
        )
