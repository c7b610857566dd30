"""Names of GPUs as people, nvidia-smi and Slurm write them, and the row of each.

A name is cut into a model, a memory, a form (SXM, PCIe, NVL), a MIG profile and a board power, and so is every name of
the catalogue: `4070Ti`, `RTX 3060 12GB`, `rtx-a6000`, `A100-SXM4-80GB-MIG-1g.10gb`, `RTX-4070-Laptop-80W`.

If several rows match, the one with the smallest memory is used, and reported as an assumption: a plan that fits it fits
the others. Of equal memory it is the one on a baseboard if a node has 4, 8 or 16, as baseboards do, else the other.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from msgspec.structs import replace

from shardwise.trainer.planning.tables.gpu_specs import GPU_SPECS, MIG_MARK, GpuSpec, gpu_spec, usual_cards_per_uplink
from shardwise.trainer.spec.errors import InputError, close_matches
from shardwise.trainer.spec.hardware import Gpu, Hardware, Host
from shardwise.trainer.spec.host_ram import usable_ram
from shardwise.trainer.spec.units import GIB, MIB, format_bytes, parse_bytes
from shardwise.trainer.spec.value import Value

SPEC_FORM = (
    "[NODESx]GPUSxNAME[,ram=SIZE][,cores=N][,lanes=N][,network=RATE][,display=no], such as 8xH100-SXM5-80GB, "
    "4x8xA100-SXM4-80GB,network=400Gb, 2xRTX-3090,ram=128GiB,lanes=16 or 2xCPU"
)
BASEBOARD_GPUS = (4, 8, 16)
# A card is called by the size of its chips, of which ECC and the driver take up to 7 %: 45 GiB of a 48 GB A40.
_MEMORY_TOLERANCE = 0.08
# fmt: off
_NOISE = frozenset((
    "nvidia", "tesla", "geforce", "quadro", "jetson", "gpu", "card", "graphics", "generation", "edition", "blackwell",
    "workstation", "with", "design", "mig", "sku", "type", "name",
))
# fmt: on
_FORMS = {"nvlink": "sxm", "smx": "sxm", "pci": "pcie"}
_LAPTOP = frozenset(("laptop", "mobile", "notebook"))
# Models under which a card is known besides its own names.
_ALSO_CALLED = {
    "GB10": ("dgxspark", "spark"),
    "Orin-AGX-64GB": ("agxorin", "orin"),
    "Thor-AGX-128GB": ("agxthor", "thor"),
    "RTX-6000-Ada": ("rtxa6000ada", "a6000ada"),
    "RTX-PRO-6000": ("rtx6000", "rtx6000pro", "6000pro"),
}
_MIG_PROFILE = r"(?i)(?:[\s_-]mig[\s_-]+)?(?<![.\d])(\d)g\.(\d+)gb(?:\+\w+(?:\.\w+)?)?"
_EXAMPLES = ("V100-16GB", "T4", "RTX-3060-12GB", "RTX-4090", "RTX-A6000", "A100-SXM4-80GB", "H100-SXM5-80GB", "B200")


class CardName(Value, frozen=True, kw_only=True):
    """The parts of a card's name."""

    model: str  # "" where the name has none
    memory_gib: int | None = None
    form: str | None = None  # sxm, pcie, nvl, or the kind of its memory, hbm3


class CardMatch(Value, frozen=True, kw_only=True):
    """The row that a name means."""

    spec: GpuSpec
    others: tuple[str, ...] = ()  # other rows that the name fits
    watts: float | None = None  # the board power that the name states


def card_name(text: str) -> CardName:
    """A name as its parts: `nvidia_a100-sxm4-80gb` is a100, 80, sxm."""
    model, memory, form, is_laptop, is_max_q = "", None, None, False, False
    spaced = re.sub(r"max[\s_-]?q", " maxq ", text.lower())
    spaced = re.sub(r"(\d)\s+(gi?b)\b", r"\1\2", re.sub(r"(sxm|pcie|nvl)(?=\d?\b)", r" \1", spaced))
    for word in re.findall(r"[a-z0-9]+", spaced):
        size = re.fullmatch(r"(?:hbm|gpu|vram|mem)?(\d{1,3})g(?:i?b)?|gpu(\d{2,3})", word)
        bare = word.rstrip("0123456789")
        if size is not None:
            memory = int(size[1] or size[2])
        elif bare in ("sxm", "pcie", "nvl", *_FORMS):
            form = form or _FORMS.get(bare, bare)
        elif re.fullmatch(r"hbm\d?e?", word):
            form = form or word
        elif word in _LAPTOP:
            is_laptop = True
        elif word == "maxq":
            is_max_q = True
        elif word not in _NOISE:
            model += word.removeprefix("gpu").removeprefix("geforce")
    model += ("maxq" if is_max_q else "") + ("laptop" if is_laptop else "") if model else ""
    return CardName(model=model, memory_gib=memory, form=form)


def rows_of_model(model: str) -> tuple[GpuSpec, ...]:
    """The rows of a model, its `rtx` left out or not."""
    number = re.search(r"\d+", model)
    digits = number[0] if number else ""  # a name of the row has them; to parse the names of all rows takes 8 ms
    return tuple(
        row
        for row in GPU_SPECS.values()
        if any(digits in _bare(name) for name in (row.name, *row.smi_names, *_ALSO_CALLED.get(row.name, ())))
        and model in _models(row.name)
    )


def rows_of_name(text: str, memory_hints: Sequence[int] = ()) -> tuple[GpuSpec, ...]:
    """The rows a name may mean: those whose very name it is, else those of its model, memory and form.

    `memory_hints` are sizes in GiB from elsewhere, for a name without one.
    """
    named = _rows_called(text)
    if named:
        return of_memory(named, memory_hints)
    name = card_name(text)
    rows = rows_of_model(name.model) if name.model else ()
    if name.memory_gib:
        without = re.sub(rf"{name.memory_gib}\s*g(i?b)?\b", "", text, flags=re.IGNORECASE)
        called = [row for row in _rows_called(without) if _is_near(row, name.memory_gib)]
        rows = tuple(called or (row for row in rows if _is_near(row, name.memory_gib)))
    return _of_form(of_memory(rows, [name.memory_gib] if name.memory_gib else memory_hints), name.form)


def preferred_row(rows: Sequence[GpuSpec], count: int) -> GpuSpec:
    """The row to assume for `count` equal cards of a node."""
    return min(rows, key=lambda row: (row.memory_bytes, ("sxm" in _forms(row.name)) is not (count in BASEBOARD_GPUS)))


def of_memory(rows: tuple[GpuSpec, ...], hints: Sequence[int]) -> tuple[GpuSpec, ...]:
    """The rows of the size that is hinted at; all of them where nothing is, or where hints disagree."""
    nearest = {_nearest(rows, hint) for hint in hints} - {None}
    if len(nearest) != 1:
        return rows
    (size,) = nearest
    return tuple(row for row in rows if abs(row.memory_bytes - (size or 0)) < GIB)


def mig_profile(text: str) -> tuple[str | None, str]:
    """`3g.20gb` and what is left of a name.

    Media engines (`+me`) do not count; a compute instance (`1c.3g.20gb`) has an unknown part of its slice's SMs.
    """
    match = re.search(_MIG_PROFILE, text)
    if match is None:
        return None, text
    return f"{match[1]}g.{match[2]}gb", f"{text[: match.start()]} {text[match.end() :]}"


def match_card(name: str, *, count: int = 1) -> CardMatch:
    """The row that a name means for `count` equal cards of a node; InputError names the nearest ones."""
    stated = re.search(r"[\s_-](\d{2,4})\s*w\b", name, re.IGNORECASE)
    watts = float(stated[1]) if stated else None
    profile, rest = mig_profile(name[: stated.start()] + name[stated.end() :] if stated else name)
    rows = rows_of_name(rest)
    if not rows:
        raise InputError(f"unknown GPU {name!r}; {_near_names(rest)}")
    if profile is None:
        chosen = preferred_row(rows, count)
        return CardMatch(spec=chosen, others=_others(rows, chosen), watts=watts)
    slices = tuple(row for row in rows if gpu_spec(f"{row.name}{MIG_MARK}{profile}") is not None)
    if not slices:
        profiles = [one.name for one in rows[0].mig_profiles]
        there = f"it has {', '.join(profiles)}" if profiles else "the catalogue has none of this card"
        raise InputError(f"unknown GPU {name!r}; {rows[0].name} has no MIG profile {profile}: {there}")
    chosen = preferred_row(slices, count)
    spec = gpu_spec(f"{chosen.name}{MIG_MARK}{profile}")
    assert spec is not None
    return CardMatch(spec=spec, others=_others(slices, chosen), watts=watts)


def match_gpu_name(nvidia_smi_name: str, memory_bytes: int | None) -> str | None:
    """The row of a card, or of a MIG slice, that nvidia-smi reports; None: the catalogue has none of that name.

    The name decides, and of rows that share a name the memory: cards are sold under one name with two sizes, and with
    ECC or an exchanged memory a card has another size at the same speed. A name that no row lists word for word must
    agree in memory too.
    """
    card, mark, profile = nvidia_smi_name.strip().partition(" MIG ")
    rows = tuple(row for row in GPU_SPECS.values() if _bare(card) in map(_bare, row.smi_names))
    if mark:
        wanted = mig_profile(profile)[0]
        slices = [gpu_spec(f"{row.name}{MIG_MARK}{wanted}") for row in rows or rows_of_name(card)]
        return _nearest_name([one for one in slices if one is not None], memory_bytes)
    if not rows and memory_bytes:
        rows = tuple(row for row in rows_of_name(card) if _is_near(row, memory_bytes / GIB))
    return _nearest_name(rows, memory_bytes)


def hardware_from_spec(text: str, *, local_host: Callable[[], Host]) -> Hardware:
    """The machine that a SPEC on the command line describes; InputError with the form of a SPEC otherwise.

    `2xCPU` is two ranks that share this machine's CPU and RAM, `4x2xCPU` four machines like it; only these call
    `local_host`. What a SPEC does not state of the host of other machines is unknown: `as_usual` assumes it.
    """
    cards, *options = text.split(",")
    match = re.fullmatch(r"\s*(?:(\d+)\s*[xX])?(?:(\d+)\s*[xX])?\s*([A-Za-z0-9].*?)\s*", cards)
    if match is None:
        raise InputError(f"{text!r} is not a hardware SPEC; it has the form {SPEC_FORM}")
    first, second, name = match.groups()
    num_nodes, num_devices = (int(first), int(second)) if second else (1, int(first or 1))
    if not num_nodes or not num_devices:
        raise InputError(f"{text!r}: a machine needs at least one device; a SPEC has the form {SPEC_FORM}")
    source = f"catalogue {text.strip()}"
    if name.upper() == "CPU" and not options:
        return Hardware(gpus=(), host=local_host(), num_nodes=num_nodes, num_cpu_devices=num_devices, source=source)
    try:
        found = match_card(name, count=num_devices)
    except InputError as error:
        of_spec = "" if name == text.strip() else f"{text}: "
        raise InputError(f"--hardware: {of_spec}{error}\na SPEC has the form {SPEC_FORM}") from None
    if MIG_MARK in found.spec.name and num_devices > 1:
        raise InputError(f"{text!r}: MIG slices do not work together; name one, 1x{found.spec.name}")
    stated = _stated(text, options)
    gpus = tuple(
        replace(
            _gpu_of(found, index),
            pcie_width=stated.lanes,
            free_bytes=None if stated.display else found.spec.usable_bytes,
        )
        for index in range(num_devices)
    )
    host = Host(
        cpu_name=None,
        num_cores=stated.cores,
        ram_bytes=stated.ram,
        ram_available_bytes=None,
        is_desktop=found.spec.is_consumer,
    )
    return Hardware(
        gpus=gpus,
        host=host,
        num_nodes=num_nodes,
        notes=_assumed(name, found),
        network_bytes_per_s=stated.network,
        source=source,
    )


class _Stated(Value, frozen=True, kw_only=True):
    """What a SPEC states besides the cards."""

    ram: int | None = None  # bytes of a node
    cores: int | None = None
    lanes: int | None = None  # of PCIe, for each card
    network: int | None = None  # bytes per second of a node
    display: bool = True  # the first card drives one


def _stated(text: str, options: Sequence[str]) -> _Stated:
    found: dict[str, Any] = {}
    for option in options:
        name, _, value = (part.strip() for part in option.partition("="))
        if (read := _FACTS.get(name.lower())) is None:
            raise InputError(f"{text!r}: {option.strip()!r} is no fact of a machine; a SPEC has the form {SPEC_FORM}")
        try:
            found[name.lower()] = read(value)
        except ValueError as error:
            raise InputError(f"{text!r}: {option.strip()}: expected {error}") from None
    return _Stated(**found)


def _read_count(value: str) -> int:
    if not value.isdecimal() or not int(value):
        raise ValueError("a whole number of at least 1")
    return int(value)


def _read_flag(value: str) -> bool:
    if value.lower() not in ("yes", "no"):
        raise ValueError("yes or no")
    return value.lower() == "yes"


_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*([MGT])b(?:it)?(?:ps|/s)?")
_BITS = {"M": 10**6, "G": 10**9, "T": 10**12}


def _read_rate(value: str) -> int:
    """Bytes per second of a rate in bits, as networks are sold."""
    found = _RATE.fullmatch(value)
    if found is None or not float(found[1]):
        raise ValueError("the bits per second of a node, such as network=400Gb")
    return round(float(found[1]) * _BITS[found[2]] / 8)


_FACTS: dict[str, Callable[[str], int | bool]] = {
    "ram": parse_bytes, "cores": _read_count, "lanes": _read_count, "network": _read_rate, "display": _read_flag,
}  # fmt: skip


def network_text(bytes_per_s: float) -> str:
    """`400 Gbit/s`."""
    return f"{8 * bytes_per_s / 1e9:,.4g} Gbit/s"


RAM_SHARE = 2  # of the device memory of a node: what clouds and builders of servers pair cards with
LEAST_DESKTOP_RAM_BYTES = 32 * GIB
DISPLAY_BYTES = 768 * MIB  # of the first card: a desktop and a browser, 0.5 to 1 GiB
# Besides what `pip install .[train]` and `make install` bring nothing is assumed: other kernels are compiled.
USUAL_LIBRARIES = (
    "torch", "accelerate", "transformers", "peft", "deepspeed", "bitsandbytes", "galore-torch", "lion-pytorch",
    "tokenizers", "safetensors", "triton", "liger-kernel",
)  # fmt: skip


def as_usual(hardware: Hardware) -> Hardware:
    """A machine of a SPEC with what is usual for such cards in the place of what is not known, and a note of it.

    A consumer card is in a desktop, which it drives: cards share the 16 lanes of its CPU and those of its chipset.
    """
    spec = gpu_spec(hardware.gpus[0].spec_name) if hardware.gpus else None
    if spec is None or not hardware.source.startswith("catalogue"):
        return hardware
    gpus, assumed, examples = hardware.gpus, list[str](), list[str]()
    host = hardware.host
    if host.ram_bytes is None and not spec.is_integrated:
        host = _usual_host(host, spec, len(gpus))
        assumed.append(f"{format_bytes(host.ram_bytes or 0)} of RAM ({format_bytes(usable_ram(host) or 0)} for a run)")
        examples.append("ram=64GiB")
    if spec.is_consumer and len(gpus) > 1 and gpus[0].pcie_width is None:
        lanes = 8 if len(gpus) == 2 else 4
        gpus = tuple(replace(gpu, pcie_width=lanes) for gpu in gpus)
        assumed.append(f"PCIe x{lanes} for each card")
        examples.append("lanes=16")
    if usual_cards_per_uplink(spec, len(gpus)) > 1:
        assumed.append("PCIe uplinks that two cards share")
    if spec.is_consumer and gpus[0].free_bytes is None:
        first = replace(gpus[0], free_bytes=spec.usable_bytes - DISPLAY_BYTES)
        gpus = (first, *gpus[1:])
        assumed.append(f"{format_bytes(DISPLAY_BYTES)} of the first card for a desktop")
        examples.append("display=no")
    if hardware.num_nodes > 1 and hardware.network_bytes_per_s is None:
        assumed.append(f"a network of {network_text(spec.network_bytes_per_s)} a node")
        examples.append("network=100Gb")
    note = f"assumed of this machine: {', '.join((*assumed, 'the libraries of a normal installation'))}"
    note += (
        f"; --hardware {hardware.source.removeprefix('catalogue ')},{','.join(examples)} states others"
        if examples
        else ""
    )
    libraries = hardware.libraries or dict.fromkeys(USUAL_LIBRARIES, "assumed")
    return replace(hardware, gpus=gpus, host=host, libraries=libraries, notes=(*hardware.notes, note))


def _usual_host(host: Host, spec: GpuSpec, num_cards: int) -> Host:
    ram = -(-RAM_SHARE * num_cards * spec.memory_bytes // GIB) * GIB
    ram = max(ram, LEAST_DESKTOP_RAM_BYTES) if spec.is_consumer else ram
    return replace(host, ram_bytes=ram, is_ram_assumed=True)


def _gpu_of(found: CardMatch, index: int) -> Gpu:
    spec = found.spec
    stated = found.watts or (None if spec.lowest_watts else float(spec.board_watts))
    return Gpu(
        index=index,
        name=spec.name,
        spec_name=spec.name,
        memory_bytes=spec.memory_bytes,
        usable_bytes=spec.usable_bytes,
        compute_capability=spec.compute_capability,
        is_mig_on=True if MIG_MARK in spec.name else None,
        power_limit_w=stated,
    )


def _assumed(name: str, found: CardMatch) -> tuple[str, ...]:
    if not found.others:
        return ()
    return (f"{name} is assumed to be {found.spec.name}; it also names {', '.join(found.others)}",)


def _others(rows: Sequence[GpuSpec], chosen: GpuSpec) -> tuple[str, ...]:
    return tuple(row.name for row in rows if row is not chosen)


_NEAR = 0.75  # of the letters of a name: H300 is near H200, B9000 is near nothing


def _near_names(name: str) -> str:
    wanted, by_key = card_name(name).model or _bare(name), _rows_by_key()
    near = [row.name for row in rows_of_model(wanted)]
    near += [row for key, row in by_key.items() if len(wanted) > 1 and wanted in key]
    near = near or [by_key[key] for key in close_matches(wanted, by_key, count=4, cutoff=_NEAR)]
    unique = list(dict.fromkeys(near))[:4]
    if unique:
        return f"did you mean {', '.join(unique)}?"
    num_others = len(GPU_SPECS) - len(_EXAMPLES)
    return f"known: {', '.join(_EXAMPLES)} and {num_others} more (trainer/planning/tables/gpu_specs.py)"


@cache
def _rows_by_key() -> dict[str, str]:
    """Row names by their models, and by themselves."""
    keys = {model: row.name for row in reversed(GPU_SPECS.values()) for model in sorted(_models(row.name))}
    return keys | {_bare(row.name): row.name for row in GPU_SPECS.values()}


def _rows_called(text: str) -> tuple[GpuSpec, ...]:
    """The row of this very name, else those that nvidia-smi calls so."""
    wanted = _bare(text)
    own = tuple(row for row in GPU_SPECS.values() if _bare(row.name) == wanted)
    return own or tuple(row for row in GPU_SPECS.values() if wanted in map(_bare, row.smi_names))


_PUNCTUATION = bytes(code for code in range(128) if not chr(code).isalnum())


@cache
def _bare(text: str) -> str:
    """The name without vendor, case and punctuation: the same for `NVIDIA GH200 480GB` and `nvidia_gh200_480gb`."""
    bare = text.lower().encode("ascii", "ignore").translate(None, _PUNCTUATION).decode()
    return bare.removeprefix("nvidia").removeprefix("tesla")


@cache
def _models(row_name: str) -> frozenset[str]:
    """Every model under which a row is known: with and without rtx or gtx, `super` written out or as s."""
    row = GPU_SPECS[row_name]
    models = {card_name(name).model for name in (row.name, *row.smi_names)}
    models |= {model.removesuffix("ada") for model in models if model.endswith("ada")}  # RTX 6000
    models |= set(_ALSO_CALLED.get(row.name, ()))
    models |= {re.sub("super", "s", model) for model in models}
    return frozenset(models | {re.sub("^(rtx|gtx)", "", model) for model in models})


@cache
def _forms(row_name: str) -> frozenset[str]:
    row = GPU_SPECS[row_name]
    named = {form for name in (row.name, *row.smi_names) if (form := card_name(name).form) is not None}
    return frozenset(named) or frozenset({"sxm" if row.nvlink_bytes_per_s else "pcie"})


def _of_form(rows: tuple[GpuSpec, ...], form: str | None) -> tuple[GpuSpec, ...]:
    return tuple(row for row in rows if form in _forms(row.name)) or rows if form else rows


def _nearest(rows: Sequence[GpuSpec], memory_gib: int) -> int | None:
    near = [row.memory_bytes for row in rows if _is_near(row, memory_gib)]
    return min(near, key=lambda size: abs(size - memory_gib * GIB), default=None)


def _is_near(row: GpuSpec, memory_gib: float) -> bool:
    return abs(row.memory_bytes - memory_gib * GIB) <= _MEMORY_TOLERANCE * memory_gib * GIB


def _nearest_name(rows: Sequence[GpuSpec], memory_bytes: int | None) -> str | None:
    """Of equally near ones the slowest."""
    if not rows:
        return None
    wanted = memory_bytes or rows[0].memory_bytes
    return min(rows, key=lambda row: (round(abs(row.memory_bytes - wanted) / GIB), row.fp16_flops_per_s)).name


def spec_of(gpu: Gpu) -> GpuSpec | None:
    """The figures of a card at its power; None where the catalogue has no row of it."""
    row = gpu_spec(gpu.spec_name)
    return None if row is None else row.at_power(gpu.power_limit_w)
