"""Times, sizes and counts as Slurm writes them. Pure; what sets no limit is None.

Times are `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours` and longer (man sbatch, --time); sizes of
TRES carry K, M, G, T or P and mean powers of 1024 (man slurm.conf), memory without one is in MiB.
"""

import re

from trainer.spec.units import MIB

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def parse_duration(text: str | None) -> int | None:
    """Seconds; None for UNLIMITED, INFINITE and for what is no time."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text or "")
    if match is None:
        return None
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1] is not None:  # days-hours[:minutes[:seconds]]
        return ((days * 24 + first) * 60 + second) * 60 + third
    if match[4] is not None:  # hours:minutes:seconds
        return (first * 60 + second) * 60 + third
    return first * 60 + second  # minutes[:seconds]


def format_duration(seconds: int) -> str:
    """`2-00:00:00` or `04:00:00`."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def parse_amount(text: str) -> int | None:
    """A count such as `8`, `4K` or `94G`; None where it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", text.strip(), re.IGNORECASE)
    return None if match is None else int(float(match[1]) * 1024 ** _POWERS[match[2].upper()])


def parse_memory(text: str) -> int | None:
    """Bytes of `750G`, `256000M` or `256000`, which is in MiB."""
    amount = parse_amount(text)
    return amount if amount is None or not text.strip().isdigit() else amount * MIB
