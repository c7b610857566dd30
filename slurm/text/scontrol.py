"""What `scontrol` says of partitions and nodes, in one line a record or in several, as values. Pure.

A record is a row of `Key=value`; values may hold blanks (`OS=Linux 5.15.0 #1 SMP`, `Reason=not responding`) and equals
signs (`CfgTRES=cpu=64,gres/gpu=8`), so a value ends where the next key begins after a blank. Free text stands late in a
record, so a key that comes twice means its first value. `(null)`, `N/A`, `NONE` and the empty value are None.
Checked on text of Slurm 16.05 to 25.05 (tests/captured/slurm_*). `sinfo` groups the same facts and adds none.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise

from slurm.cluster import Gres, Node, Partition, PartitionState, Preemption
from slurm.text.quantities import parse_amount, parse_duration, parse_memory
from trainer.spec.units import MIB

_KEY = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_]*)=")
_NOTHING = ("", "(null)", "N/A", "NONE", "None", "n/a")
_NO_LIMIT = ("UNLIMITED", "INFINITE", "ALL")
# A node in one of these states takes no new job; what is powered down or booting does.
_OUT_OF_SERVICE = frozenset(
    ("DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING", "FUTURE", "INVAL", "INVALID", "UNKNOWN")
) | {"INVALID_REG", "NOT_RESPONDING", "NO_RESPOND"}
# A word of a later version is taken for the worst of those that are known.
_PREEMPTIONS = {mode.value: mode for mode in Preemption}
_STATES = {state.value: state for state in PartitionState}
_STATE_MARKS = "*~#!%$@^+-"


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """The partitions of `scontrol show partition`, with or without `-o`."""
    return tuple(_partition(fields) for fields in _records(text, "PartitionName"))


def parse_nodes(text: str) -> tuple[Node, ...]:
    """The nodes of `scontrol show node`, with or without `-o`."""
    return tuple(_node(fields) for fields in _records(text, "NodeName"))


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


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config` by name."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def _records(text: str, first_key: str) -> Iterator[dict[str, str | None]]:
    starts = [match.start() for match in re.finditer(rf"^\s*{first_key}=", text, re.MULTILINE)]
    for start, end in pairwise((*starts, len(text))):
        yield _fields(text[start:end])


def _fields(record: str) -> dict[str, str | None]:
    matches = list(_KEY.finditer(record))
    ends = [match.start() for match in matches[1:]] + [len(record)]
    fields: dict[str, str | None] = {}
    for match, end in zip(matches, ends, strict=True):
        value = " ".join(record[match.end() : end].split())
        fields.setdefault(match[1], None if value in _NOTHING else value)
    return fields


def _partition(fields: Mapping[str, str | None]) -> Partition:
    mode, _, times = (fields.get("OverSubscribe") or fields.get("Shared") or "NO").partition(":")
    preempt_mode = (fields.get("PreemptMode") or "OFF").split(",")[0]
    defaults = dict(pair.split("=", 1) for pair in (fields.get("JobDefaults") or "").split(",") if "=" in pair)
    return Partition(
        name=fields["PartitionName"] or "",
        state=_STATES.get((fields.get("State") or "UP").upper(), PartitionState.INACTIVE),
        is_default=fields.get("Default") == "YES",
        num_nodes=_count(fields.get("TotalNodes")) or 0,
        nodes=fields.get("Nodes"),
        min_nodes=_count(fields.get("MinNodes")) or 0,
        max_nodes=_count(fields.get("MaxNodes")),
        max_time_s=parse_duration(fields.get("MaxTime")),
        default_time_s=parse_duration(fields.get("DefaultTime")),
        max_cpus_per_node=_count(fields.get("MaxCPUsPerNode")),
        default_ram_per_node_bytes=_mebibytes(fields.get("DefMemPerNode")),
        default_ram_per_cpu_bytes=_mebibytes(fields.get("DefMemPerCPU")),
        default_ram_per_gpu_bytes=_mebibytes(defaults.get("DefMemPerGPU")),
        max_ram_per_node_bytes=_mebibytes(fields.get("MaxMemPerNode")),
        max_ram_per_cpu_bytes=_mebibytes(fields.get("MaxMemPerCPU")),
        is_exclusive=mode == "EXCLUSIVE",
        is_oversubscribed=mode == "FORCE" and times != "1",
        allowed_accounts=_names(fields.get("AllowAccounts")),
        denied_accounts=_names(fields.get("DenyAccounts")) or (),
        allowed_qos=_names(fields.get("AllowQos")),
        denied_qos=_names(fields.get("DenyQos")) or (),
        allowed_groups=_names(fields.get("AllowGroups")),
        qos=fields.get("QoS"),
        preemption=_PREEMPTIONS.get(preempt_mode, Preemption.CANCEL),
        grace_time_s=_count(fields.get("GraceTime")) or 0,
        tres=parse_tres(fields.get("TRES")),
        billing_weights=_weights(fields.get("TRESBillingWeights")),
    )


def _node(fields: Mapping[str, str | None]) -> Node:
    configured = parse_tres(fields.get("CfgTRES"))
    gres = parse_gres(fields.get("Gres"))
    if not any(one.name == "gpu" for one in gres):
        gres += _gpus_of_tres(configured)
    states = {word.strip(_STATE_MARKS) for word in (fields.get("State") or "UNKNOWN").upper().split("+")}
    spec_cores = (_count(fields.get("CoreSpecCount")) or 0) * (_count(fields.get("ThreadsPerCore")) or 1)
    cores = _count(fields.get("CPUEfctv")) or (_count(fields.get("CPUTot")) or 0) - spec_cores
    memory = (_mebibytes(fields.get("RealMemory")) or 0) - (_mebibytes(fields.get("MemSpecLimit")) or 0)
    return Node(
        name=fields["NodeName"] or "",
        num_cores=max(1, cores),
        ram_bytes=memory if memory > MIB else None,  # RealMemory=1: nobody configured it
        gres=gres,
        features=tuple(
            (fields.get("ActiveFeatures") or fields.get("AvailableFeatures") or "").replace(",", " ").split()
        ),
        partitions=tuple((fields.get("Partitions") or "").replace(",", " ").split()),
        is_in_service="*" not in (fields.get("State") or "") and not states & _OUT_OF_SERVICE,
        version=fields.get("Version"),
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


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _mebibytes(text: str | None) -> int | None:
    """Memory is configured in MiB; 0 and UNLIMITED set no limit."""
    count = _count(text)
    return count * MIB if count else None


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None or text in _NO_LIMIT else tuple(name for name in text.split(",") if name)


def _weights(text: str | None) -> dict[str, str]:
    pairs = (part.partition("=") for part in (text or "").split(","))
    return {name: weight for name, equals, weight in pairs if equals}
