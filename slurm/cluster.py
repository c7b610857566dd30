"""Partitions, nodes and limits of a cluster, parsed from Slurm's text. Pure; None means no limit, or unknown.

Times are `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours` and longer (man sbatch, --time). Sizes of
TRES have a suffix K, M, G, T or P for powers of 1024 (man slurm.conf); memory without a suffix is in MiB.

A record of scontrol is a row of `Key=value`. Values may hold blanks (`OS=Linux 5.15.0 #1 SMP`, `Reason=not responding`)
and equals signs (`CfgTRES=cpu=64,gres/gpu=8`), so a value ends where the next key begins after a blank. Free text comes
late in a record, so the first value of a repeated key counts. Tested on output of Slurm 16.05 to 25.05
(tests/captured/slurm_*). `sinfo` adds no facts.
"""

import math
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import pairwise

from shardwise.trainer.spec.units import MIB, format_seconds
from shardwise.trainer.spec.value import Value

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


def parse_number(text: str | None) -> int | None:
    """A whole number; None for any other text."""
    return int(text) if text is not None and text.isdigit() else None


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


class PartitionState(StrEnum):
    """The state of a partition."""

    UP = "UP"  # accepts and starts jobs
    DOWN = "DOWN"  # accepts them and starts none
    DRAIN = "DRAIN"  # accepts none, starts those it has
    INACTIVE = "INACTIVE"


class Gres(Value, frozen=True, kw_only=True):
    """A generic resource of a node: `gpu:a100:8`."""

    name: str
    kind: str | None  # the type; None if the site states none
    count: int


class Node(Value, frozen=True, kw_only=True):
    """A node; cores and RAM are those for jobs, without those reserved for Slurm itself."""

    name: str
    num_cores: int
    ram_bytes: int | None
    gres: tuple[Gres, ...] = ()
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    is_in_service: bool = True

    @property
    def gpus(self) -> tuple[Gres, ...]:
        return tuple(one for one in self.gres if one.name == "gpu")


class Partition(Value, frozen=True, kw_only=True):
    """A partition and its limits. `num_nodes` counts nodes that Slurm does not show while they are powered down."""

    name: str
    state: PartitionState = PartitionState.UP
    is_default: bool = False
    num_nodes: int
    min_nodes: int = 0
    max_nodes: int | None = None
    max_time_s: int | None = None
    max_cpus_per_node: int | None = None
    max_ram_per_node_bytes: int | None = None
    max_ram_per_cpu_bytes: int | None = None
    is_oversubscribed: bool = False  # nodes are shared even with a job that requests whole ones
    grace_time_s: int = 0  # after the warning of a preemption; 0 if jobs are not preempted
    tres: dict[str, int] = {}  # of all nodes together


_KEY = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_]*)=")
# A node in one of these states accepts no new job; one that is powered down or booting does.
_OUT_OF_SERVICE = frozenset(
    ("DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING", "FUTURE", "INVAL", "INVALID", "UNKNOWN")
) | {"INVALID_REG", "NOT_RESPONDING", "NO_RESPOND"}
_STATES = {state.value: state for state in PartitionState}
_STATE_MARKS = "*~#!%$@^+-"


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """The partitions of `scontrol show partition`, with or without `-o`."""
    return tuple(_partition(fields) for fields in parse_records(text, "PartitionName"))


def parse_nodes(text: str) -> tuple[Node, ...]:
    """The nodes of `scontrol show node`, with or without `-o`."""
    return tuple(_node(fields) for fields in parse_records(text, "NodeName"))


def parse_gres(text: str | None) -> tuple[Gres, ...]:
    """The resources of a `Gres=`: `gpu:a100:8(S:0-1),shard:a100:32`, `gpu:8`, `gpu:tesla`, `vram:no_consume:94G`."""
    if text is None:
        return ()
    entries = []
    for written in re.findall(r"[^,(]+(?:\([^)]*\))?", text):
        name, *rest = written.partition("(")[0].strip().split(":")
        count = parse_amount(rest[-1]) if rest else None
        kinds = [word for word in (rest if count is None else rest[:-1]) if word != "no_consume"]
        entries.append(Gres(name=name, kind=":".join(kinds) or None, count=1 if count is None else count))
    return tuple(entry for entry in entries if entry.count)


def parse_tres(text: str | None) -> dict[str, int]:
    """`cpu=64,mem=1000G,gres/gpu:a100=8` by name; memory in bytes."""
    found = {}
    for part in (text or "").split(","):
        name, _, value = part.partition("=")
        amount = parse_memory(value) if name == "mem" else parse_amount(value)
        if amount is not None:
            found[name] = amount
    return found


def parse_records(text: str, first_key: str) -> Iterator[dict[str, str | None]]:
    """The fields of each record of `scontrol show`, by name; unknown values are None."""
    starts = [match.start() for match in re.finditer(rf"^\s*{first_key}=", text, re.MULTILINE)]
    for start, end in pairwise((*starts, len(text))):
        record = text[start:end]
        matches = list(_KEY.finditer(record))
        ends = [match.start() for match in matches[1:]] + [len(record)]
        fields: dict[str, str | None] = {}
        for match, value_end in zip(matches, ends, strict=True):
            fields.setdefault(match[1], known(record[match.end() : value_end]))
        yield fields


def _partition(fields: Mapping[str, str | None]) -> Partition:
    mode, _, times = (fields.get("OverSubscribe") or fields.get("Shared") or "NO").partition(":")
    is_preempted = (fields.get("PreemptMode") or "OFF").split(",")[0] != "OFF"
    return Partition(
        name=fields["PartitionName"] or "",
        state=_STATES.get((fields.get("State") or "UP").upper(), PartitionState.INACTIVE),  # a word of a later version
        is_default=fields.get("Default") == "YES",
        num_nodes=parse_number(fields.get("TotalNodes")) or 0,
        min_nodes=parse_number(fields.get("MinNodes")) or 0,
        max_nodes=parse_number(fields.get("MaxNodes")),
        max_time_s=parse_duration(fields.get("MaxTime")),
        max_cpus_per_node=parse_number(fields.get("MaxCPUsPerNode")),
        max_ram_per_node_bytes=_mebibytes(fields.get("MaxMemPerNode")),
        max_ram_per_cpu_bytes=_mebibytes(fields.get("MaxMemPerCPU")),
        is_oversubscribed=mode == "FORCE" and times != "1",
        grace_time_s=(parse_number(fields.get("GraceTime")) or 0) if is_preempted else 0,
        tres=parse_tres(fields.get("TRES")),
    )


def _node(fields: Mapping[str, str | None]) -> Node:
    configured = parse_tres(fields.get("CfgTRES"))
    gres = parse_gres(fields.get("Gres"))
    if not any(one.name == "gpu" for one in gres):
        gres += _gpus_of_tres(configured)
    states = {word.strip(_STATE_MARKS) for word in (fields.get("State") or "UNKNOWN").upper().split("+")}
    spec_cores = (parse_number(fields.get("CoreSpecCount")) or 0) * (parse_number(fields.get("ThreadsPerCore")) or 1)
    cores = parse_number(fields.get("CPUEfctv")) or (parse_number(fields.get("CPUTot")) or 0) - spec_cores
    memory = (_mebibytes(fields.get("RealMemory")) or 0) - (_mebibytes(fields.get("MemSpecLimit")) or 0)
    return Node(
        name=fields["NodeName"] or "",
        num_cores=max(1, cores),
        ram_bytes=memory if memory > MIB else None,  # RealMemory=1: not configured
        gres=gres,
        features=tuple(
            (fields.get("ActiveFeatures") or fields.get("AvailableFeatures") or "").replace(",", " ").split()
        ),
        partitions=tuple((fields.get("Partitions") or "").replace(",", " ").split()),
        is_in_service="*" not in (fields.get("State") or "") and not states & _OUT_OF_SERVICE,
    )


def _gpus_of_tres(tres: Mapping[str, int]) -> tuple[Gres, ...]:
    """GPUs that a site accounts for: typed where it accounts for types, which add up to the untyped count."""
    typed = tuple(
        Gres(name="gpu", kind=name.removeprefix("gres/gpu:"), count=count)
        for name, count in tres.items()
        if name.startswith("gres/gpu:") and count
    )
    total = tres.get("gres/gpu", 0)
    return typed or ((Gres(name="gpu", kind=None, count=total),) if total else ())


def _mebibytes(text: str | None) -> int | None:
    """Memory is configured in MiB; 0 and UNLIMITED set no limit."""
    count = parse_number(text)
    return count * MIB if count else None
