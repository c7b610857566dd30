"""A program that answers as nvidia-smi does on the machine of FAKE_CUDA_MACHINE; `cuda_stand_in` puts it on PATH."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from machine import Card, Machine, read_machine, slice_uuid_of, uuid_of


def main(arguments: list[str]) -> int:
    machine = read_machine()
    first = arguments[0] if arguments else ""
    if first.startswith("--query-gpu="):
        return _print_cards(machine, first.partition("=")[2].split(","), with_units="nounits" not in arguments[-1])
    if first.startswith("--query-compute-apps="):
        lines = [f"GPU-{uuid_of(0)}, {pid}, {program}, {size}" for pid, program, size in machine.processes]
    elif arguments == ["topo", "-m"]:
        lines = _matrix(len(machine.cards), "PHB", "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID", "\t0-31\t0\t\tN/A")
    elif arguments == ["topo", "-p2p", "r"]:
        lines = _matrix(len(machine.cards), "CNS")
    elif arguments == ["nvlink", "-s"]:
        lines = [f"GPU {index}: {card.name} (UUID: GPU-{uuid_of(index)})" for index, card in enumerate(machine.cards)]
    elif arguments == ["-L"]:
        lines = _list(machine)
    elif not arguments:
        lines = _table(machine)
    else:
        sys.stdout.write("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n")
        return 6
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _print_cards(machine: Machine, fields: list[str], *, with_units: bool) -> int:
    for index, card in enumerate(machine.cards):
        answers = _answers(machine, index, card)
        for name in fields:
            if name not in answers:
                sys.stdout.write(f'Field "{name}" is not a valid field to query.\n')
                return 2
        units = {"memory.total": " MiB", "memory.reserved": " MiB", "memory.free": " MiB", "power.limit": " W"}
        cells = (answers[name] + (units.get(name, "") if with_units else "") for name in fields)
        sys.stdout.write(", ".join(cells) + "\n")
    return 0


def _answers(machine: Machine, index: int, card: Card) -> dict[str, str]:
    return {
        "index": str(index),
        "uuid": f"GPU-{uuid_of(index)}",
        "pci.bus_id": f"00000000:{index + 1:02X}:00.0",
        "name": card.name,
        "memory.total": str(card.memory),
        "memory.reserved": str(card.reserved),
        "memory.free": str(card.free),
        "compute_cap": f"{card.capability[0]}.{card.capability[1]}",
        "driver_version": machine.driver,
        "compute_mode": card.compute_mode,
        "ecc.mode.current": card.ecc,
        "mig.mode.current": card.mig,
        "power.limit": "[N/A]" if card.power_w is None else f"{card.power_w:.2f}",
        "pcie.link.gen.max": str(card.pcie[0]),
        "pcie.link.width.max": str(card.pcie[1]),
        "pcie.link.width.current": str(card.pcie[1]),
        **dict(card.fields),
    }


def _matrix(size: int, word: str, head: str = "", tail: str = "") -> list[str]:
    names = [f"GPU{index}" for index in range(size)]
    rows = [["X" if row == column else word for column in range(size)] for row in range(size)]
    return ["\t" + "\t".join(names) + head, *(f"{names[row]}\t" + "\t".join(rows[row]) + tail for row in range(size))]


def _list(machine: Machine) -> list[str]:
    lines = []
    for index, card in enumerate(machine.cards):
        lines.append(f"GPU {index}: {card.name} (UUID: GPU-{uuid_of(index)})")
        lines += [
            f"  MIG {profile}     Device  {device}: (UUID: {slice_uuid_of(index, device)})"
            for device, (profile, _) in enumerate(card.mig_profiles)
        ]
    return lines


def _table(machine: Machine) -> list[str]:
    slices = [
        f"|  {index}    {device + 1}   0   {device}  |              12MiB / {size:5d}MiB    | 14      0 |"
        for index, card in enumerate(machine.cards)
        for device, (_, size) in enumerate(card.mig_profiles)
    ]
    processes = [
        f"|    0   N/A  N/A    {pid:8d}      G   {program:32s} {size:8d}MiB |"
        for pid, program, size in machine.processes
    ]
    names = f"NVIDIA-SMI {machine.driver}    Driver Version: {machine.driver}    CUDA Version: {machine.driver_cuda}"
    head = [] if machine.driver_cuda is None else [f"| {names} |"]
    return [*head, *slices, "| Processes: |", *processes]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
