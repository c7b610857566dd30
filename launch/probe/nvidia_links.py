"""How the GPUs of one machine are joined, from three texts of nvidia-smi: `topo -m`, `topo -p2p r`, `nvlink -s`.

`topo -m` tells the kind of path between two cards, `nvlink -s` what one NVLink carries in each direction, `-p2p r`
whether one card may read the other's memory at all (GeForce drivers refuse it over PCIe: copies then pass through host
memory). Over PCIe the rate is that of the narrower of the two slots, after line coding, before packet headers.
"""

import re
from collections.abc import Mapping, Sequence
from statistics import median

from trainer.spec.hardware import Gpu, Link, LinkKind
from trainer.spec.value import Value

_KINDS = {
    "PIX": LinkKind.PCIE_SWITCH,
    "PXB": LinkKind.PCIE_SWITCH,
    "PHB": LinkKind.PCIE_HOST,
    "NODE": LinkKind.NUMA_NODE,
    "SYS": LinkKind.SOCKET,
    "SOC": LinkKind.SOCKET,  # the older word for SYS
}
# Bytes per second of one lane in one direction: 2.5 and 5 GT/s with 8b/10b coding, then 8 to 64 GT/s with 128b/130b.
_PCIE_LANE_BYTES_PER_S = {
    1: 250_000_000,
    2: 500_000_000,
    3: 984_615_384,
    4: 1_969_230_769,
    5: 3_938_461_538,
    6: 7_563_000_000,  # FLIT mode, without line coding but with its own overhead
}
_ANSI = re.compile(r"\x1b\[[0-9;]*m")  # the header is underlined, also when piped


class Topology(Value, frozen=True, kw_only=True):
    """The matrix of `topo -m`: cells by (row, column) of GPU numbers, and each GPU's NUMA node where there is one."""

    cells: dict[tuple[int, int], str]
    numa_nodes: dict[int, int]


def parse_topology(text: str) -> Topology:
    """The GPU part of the matrix that `nvidia-smi topo -m` prints; rows and columns of network cards are dropped."""
    columns, rows = _matrix(text)
    has_numa = "NUMA Affinity" in text
    cells: dict[tuple[int, int], str] = {}
    numa_nodes: dict[int, int] = {}
    for a, words in rows.items():
        for name, word in zip(columns, words, strict=False):
            if name.startswith("GPU") and word != "X":
                cells[(a, int(name[3:]))] = word
        rest = words[len(columns) :]  # CPU Affinity, NUMA Affinity, GPU NUMA ID
        if has_numa and len(rest) > 1 and rest[1].isdigit():
            numa_nodes[a] = int(rest[1])
    return Topology(cells=cells, numa_nodes=numa_nodes)


def parse_peer_access(text: str) -> dict[tuple[int, int], bool]:
    """Whether a GPU may read another's memory, from `nvidia-smi topo -p2p r`; U (unknown) is left out."""
    columns, rows = _matrix(text)
    return {
        (a, int(name[3:])): word == "OK"
        for a, words in rows.items()
        for name, word in zip(columns, words, strict=False)
        if name.startswith("GPU") and word not in ("X", "U")
    }


def parse_nvlink_rates(text: str) -> dict[int, tuple[int, ...]]:
    """Bytes per second and direction of each active NVLink of each GPU, from `nvidia-smi nvlink -s`."""
    rates: dict[int, tuple[int, ...]] = {}
    gpu_index = None
    for line in text.splitlines():
        if card := re.match(r"GPU (\d+):", line):
            gpu_index = int(card[1])
        elif gpu_index is not None and (link := re.match(r"\s+Link \d+: ([\d.]+) GB/s", line)):
            rates[gpu_index] = (*rates.get(gpu_index, ()), round(float(link[1]) * 10**9))
    return {index: found for index, found in rates.items() if any(found)}


def pcie_bytes_per_s(gpu: Gpu) -> int | None:
    """What the slot of a GPU carries in one direction."""
    lane = _PCIE_LANE_BYTES_PER_S.get(gpu.pcie_generation or 0)
    return lane * gpu.pcie_width if lane and gpu.pcie_width else None


def build_links(
    gpus: Sequence[Gpu],
    topology: Topology,
    peer_access: Mapping[tuple[int, int], bool],
    nvlink_rates: Mapping[int, Sequence[int]],
) -> tuple[Link, ...]:
    """One Link for each pair of `gpus` whose path is known."""
    pairs = [(a, b) for number, a in enumerate(gpus) for b in gpus[number + 1 :]]
    links = []
    for a, b in pairs:
        word = topology.cells.get((a.index, b.index))
        bonded = re.fullmatch(r"NV(\d+)", word or "")
        if bonded is None and word not in _KINDS:
            continue
        num_nvlinks = int(bonded[1]) if bonded else 0
        links.append(
            Link(
                a=a.index,
                b=b.index,
                kind=LinkKind.NVLINK if bonded else _KINDS[word or ""],
                num_nvlinks=num_nvlinks,
                bytes_per_s=_nvlink_bytes_per_s(num_nvlinks, a, b, nvlink_rates) if bonded else _slower_slot(a, b),
                has_peer_access=_both_ways(peer_access, a.index, b.index),
            )
        )
    return tuple(links)


def _matrix(text: str) -> tuple[list[str], dict[int, list[str]]]:
    """Column names and, for each GPU row, its words; the words after the last column are the affinities."""
    lines = [_ANSI.sub("", line) for line in text.splitlines()]
    header = next((line for line in lines if re.match(r"\s+GPU\d+\b", line)), "")
    columns = re.findall(r"\b(?:GPU\d+|NIC\d+|mlx\w+)\b", header)
    rows = {}
    for line in lines:
        if row := re.match(r"\s*GPU(\d+)\s+(\S.*)", line):
            if line == header:
                continue
            rows[int(row[1])] = row[2].split()
    return columns, rows


def _nvlink_bytes_per_s(num_nvlinks: int, a: Gpu, b: Gpu, rates: Mapping[int, Sequence[int]]) -> int | None:
    known = [median(rates[gpu.index]) for gpu in (a, b) if rates.get(gpu.index)]
    return round(num_nvlinks * min(known)) if known else None


def _slower_slot(a: Gpu, b: Gpu) -> int | None:
    rates = [pcie_bytes_per_s(gpu) for gpu in (a, b)]
    known = [rate for rate in rates if rate is not None]
    return min(known) if len(known) == len(rates) else None


def _both_ways(peer_access: Mapping[tuple[int, int], bool], a: int, b: int) -> bool | None:
    answers = [peer_access.get((a, b)), peer_access.get((b, a))]
    return None if None in answers else all(answers)
