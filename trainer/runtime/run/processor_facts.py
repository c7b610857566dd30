"""What py-cpuinfo is asked for by DeepSpeed, answered at once (W53).

Whoever makes a DeepSpeedCPUAdam asks py-cpuinfo three times for the same machine: for the vendor, the architecture and
the flags. Each time it starts processes that measure the clock, over a second that no rank needs.
"""

import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

PROCESSORS = Path("/proc/cpuinfo")


def answer_for_processor() -> None:
    """From here on, py-cpuinfo answers this process from /proc/cpuinfo where it can, and asks the machine once else."""
    import cpuinfo

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = cache(_with_fallback(cpuinfo.get_cpu_info))


def read_processor(text: str, machine: str) -> dict[str, Any] | None:
    """What DeepSpeed 0.19.8 looks at, by py-cpuinfo's names; None where it does not all stand in the text.

    Only x86-64 writes its vendor and its flags under names that say what they are.
    """
    if machine != "x86_64":
        return None
    first = dict(line.split(":", 1) for line in text.split("\n\n", 1)[0].splitlines() if ":" in line)
    facts = {name.strip(): value.strip() for name, value in first.items()}
    if not facts.get("vendor_id") or not facts.get("flags"):
        return None
    return {"arch": "X86_64", "vendor_id_raw": facts["vendor_id"], "flags": sorted(facts["flags"].split())}


def _with_fallback(ask_machine: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    def get_cpu_info() -> dict[str, Any]:
        try:
            facts = read_processor(PROCESSORS.read_text(), platform.machine())
        except OSError:
            facts = None
        return ask_machine() if facts is None else facts

    return get_cpu_info
