"""Times, sizes and counts as Slurm writes them. Pure; None means no limit.

Times are `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours` and longer (man sbatch, --time). Sizes of
TRES have a suffix K, M, G, T or P for powers of 1024 (man slurm.conf); memory without a suffix is in MiB.
"""

import math
import re

from shardwise.trainer.spec.units import MIB, format_seconds

_UNKNOWN = ("", "N/A", "NONE", "None", "(null)", "Unknown", "None assigned", "n/a")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def parse_duration(text: str | None) -> int | None:
    """Seconds; None for UNLIMITED, INFINITE and any other text."""
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
    """A count such as `8`, `4K` or `94G`; None for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", text.strip(), re.IGNORECASE)
    return None if match is None else int(float(match[1]) * 1024 ** _POWERS[match[2].upper()])


def parse_memory(text: str) -> int | None:
    """Bytes of `750G`, `256000M` or `256000`, which is in MiB."""
    amount = parse_amount(text)
    return amount if amount is None or not text.strip().isdigit() else amount * MIB


def num_jobs(hours: float, limit_s: int | None) -> int:
    """Number of consecutive jobs for a run of so many hours."""
    return 1 if limit_s is None else max(1, math.ceil(hours * 3600 / limit_s))


def describe_num_jobs(hours: float, limit_s: int | None, *, place: str) -> str:
    """`38 h 10 min at a limit of 1-00:00:00: 2 jobs, which continue each other`."""
    duration = format_seconds(hours * 3600)
    if limit_s is None:
        return f"{duration}; {place} sets no time limit: one job"
    jobs = num_jobs(hours, limit_s)
    count = "one job" if jobs == 1 else f"{jobs} jobs, which continue each other"
    return f"{duration} at a limit of {format_duration(limit_s)}: {count}"


def known(text: str) -> str | None:
    """A value without blanks around it; None for the text that Slurm prints for a missing one."""
    return None if text.strip() in _UNKNOWN else text.strip()
