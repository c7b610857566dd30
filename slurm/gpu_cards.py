"""Which card of the catalogue a GRES type means. Pure.

Sites name cards as they like: `a100`, `nvidia_h100_80gb_hbm3` (what NVML reports), `v100-sxm2-32gb`, `A100.80gb`,
`rtx_3090`; others leave the type out and give nodes a feature (`A100-80GB`, `GPU_SKU:V100`, `hbm80g`, `gpu80`). A name
is cut into a model, a memory and a form (SXM, PCIe, NVL), and so is every name of the catalogue.

Where several rows fit, the one with the smallest memory is taken, and said to be assumed: a plan that fits it fits the
others. Of equal memory the one on a baseboard where a node has four or eight, as baseboards do, else the other.
What is not in the catalogue is not guessed at.
"""

import re
from collections.abc import Iterable, Sequence

from slurm.cluster import Gres
from trainer.planning.gpu_specs import GPU_SPECS, GpuSpec, hardware_from_spec
from trainer.spec.hardware import Gpu, Host
from trainer.spec.units import GIB
from trainer.spec.value import Value

BASEBOARD_GPUS = (4, 8, 16)
# A card is called by the size of its chips, of which ECC and the driver take up to 7 %: 45 GiB of a 48 GB A40.
_MEMORY_TOLERANCE = 0.08
# The usable part of a MIG slice's name: 4.75 GiB of 1g.5gb, 19.6 of 3g.20gb (MIG user guide, tables of profiles).
_MIG_USABLE_SHARE = 0.95
_VENDORS = frozenset(("nvidia", "tesla", "geforce", "quadro", "gpu", "generation", "card", "sku", "type", "name"))
_FORMS = {"nvlink": "sxm", "smx": "sxm", "pci": "pcie"}
# Features on other memories, and on networks: mem512gb, scr50gb, ib40g.
_OTHER_SIZES = re.compile(
    r"^(cpu|mem|memory|ram|scr|scratch|tmp|local|disk|ssd|nvme|hdd|node|ib|eth|roce|net)([^a-z]|$)"
)
_GPU_MEMORY_GRES = re.compile(r"^(vram|gpu_?mem|gmem|gram)", re.IGNORECASE)
_NO_HOST = Host(cpu_name=None, num_cores=None, ram_bytes=None, ram_available_bytes=None)


class CardName(Value, frozen=True, kw_only=True):
    """The parts of a card's name."""

    model: str  # "" where the name has none
    memory_gib: int | None = None
    form: str | None = None  # sxm, pcie, nvl, or the kind of its memory, hbm3


class CardChoice(Value, frozen=True, kw_only=True):
    """A card that was chosen, and from what."""

    gpu: Gpu  # as the first of its node
    fits: tuple[str, ...]  # every row of the catalogue that it could be
    told_by: str  # `gpu:a100`, `the feature A100-80GB`

    @property
    def is_assumed(self) -> bool:
        return len(self.fits) > 1


def card_of(gres: Gres, features: Sequence[str] = (), others: Iterable[Gres] = ()) -> CardChoice | None:
    """The card of a node's GRES; None where the catalogue has none of that name, or nothing names one.

    `others` are the node's other resources: some sites keep the GPUs' memory there (`VramPerGpu:no_consume:94G`).
    """
    profile, rest = _mig_profile(gres.kind or "")
    rows, told_by = _rows_of_type(rest, _memory_hints(features, others)), f"gpu:{gres.kind}"
    if not card_name(rest).model:
        rows, told_by = _rows_of_features(features)
        rows = _of_memory(rows, _memory_hints(features, others))
    if not rows:
        return None
    chosen = min(rows, key=lambda row: (row.memory_bytes, _is_other_form(row, gres.count)))
    if profile is not None:
        return CardChoice(gpu=_mig_gpu(chosen, profile), fits=(chosen.name,), told_by=told_by)
    return CardChoice(gpu=gpus_of_row(chosen.name, 1)[0], fits=tuple(row.name for row in rows), told_by=told_by)


def _rows_of_type(kind: str, hints: Sequence[int]) -> tuple[GpuSpec, ...]:
    """The rows that a type may mean: the one whose very name it is, else those of its model, memory and form."""
    named = tuple(row for row in GPU_SPECS.values() if _bare(kind) in map(_bare, (row.name, *row.smi_names)))
    if named:
        return named
    name = card_name(kind)
    rows = rows_of_model(name.model) if name.model else ()
    if name.memory_gib:
        rows = tuple(row for row in rows if _is_near(row, name.memory_gib))
    return _of_form(_of_memory(rows, [name.memory_gib] if name.memory_gib else hints), name.form)


def _bare(text: str) -> str:
    """`NVIDIA GH200 480GB` and `nvidia_gh200_480gb` without what tells them apart."""
    return re.sub(r"^nvidia|[^a-z0-9]", "", text.lower())


def card_name(text: str) -> CardName:
    """A name as its parts: `nvidia_a100-sxm4-80gb` is a100, 80, sxm."""
    model, memory, form = "", None, None
    for word in re.findall(r"[a-z0-9]+", text.lower()):
        size = re.fullmatch(r"(?:hbm|gpu|vram|mem)?(\d{1,3})g(?:i?b)?|gpu(\d{2,3})", word)
        bare = word.rstrip("0123456789")
        if size is not None:
            memory = int(size[1] or size[2])
        elif bare in ("sxm", "pcie", "nvl", *_FORMS):
            form = form or _FORMS.get(bare, bare)
        elif re.fullmatch(r"hbm\d?e?", word):
            form = form or word
        elif word not in _VENDORS:
            model += word.removeprefix("gpu")
    return CardName(model=model, memory_gib=memory, form=form)


def rows_of_model(model: str) -> tuple[GpuSpec, ...]:
    """The rows of a model, its `rtx` left out or not."""
    return tuple(row for row in GPU_SPECS.values() if model in _models(row))


def gpus_of_row(name: str, count: int) -> tuple[Gpu, ...]:
    """So many cards of a row of the catalogue."""
    return hardware_from_spec(f"{count}x{name}", local_host=lambda: _NO_HOST).gpus


def _models(row: GpuSpec) -> frozenset[str]:
    models = {card_name(name).model for name in (row.name, *row.smi_names)}
    return frozenset(models | {model.removeprefix("rtx") for model in models})


def _forms(row: GpuSpec) -> frozenset[str]:
    named = {form for name in (row.name, *row.smi_names) if (form := card_name(name).form) is not None}
    return frozenset(named) or frozenset({"sxm" if row.nvlink_bytes_per_s else "pcie"})


def _is_other_form(row: GpuSpec, count: int) -> bool:
    return ("sxm" in _forms(row)) is not (count in BASEBOARD_GPUS)


def _of_form(rows: tuple[GpuSpec, ...], form: str | None) -> tuple[GpuSpec, ...]:
    return tuple(row for row in rows if form in _forms(row)) or rows if form else rows


def _of_memory(rows: tuple[GpuSpec, ...], hints: Sequence[int]) -> tuple[GpuSpec, ...]:
    """The rows of the size that is hinted at; all of them where nothing is, or where hints disagree."""
    nearest = {_nearest(rows, hint) for hint in hints} - {None}
    if len(nearest) != 1:
        return rows
    (size,) = nearest
    return tuple(row for row in rows if abs(row.memory_bytes - (size or 0)) < GIB)


def _nearest(rows: Sequence[GpuSpec], memory_gib: int) -> int | None:
    near = [row.memory_bytes for row in rows if _is_near(row, memory_gib)]
    return min(near, key=lambda size: abs(size - memory_gib * GIB), default=None)


def _is_near(row: GpuSpec, memory_gib: int) -> bool:
    return abs(row.memory_bytes - memory_gib * GIB) <= _MEMORY_TOLERANCE * memory_gib * GIB


def _memory_hints(features: Sequence[str], others: Iterable[Gres]) -> list[int]:
    names = [card_name(_value(feature)) for feature in features if not _OTHER_SIZES.match(feature.lower())]
    sizes = [one.count // GIB for one in others if _GPU_MEMORY_GRES.match(one.name) and one.count >= GIB]
    return [*(name.memory_gib for name in names if name.memory_gib), *sizes]


def _rows_of_features(features: Sequence[str]) -> tuple[tuple[GpuSpec, ...], str]:
    """The rows of the one model that features name; none where they name several, or none."""
    found = {feature: rows for feature in features if (rows := _rows_of_feature(feature))}
    sets = set(found.values())
    return (sets.pop(), f"the feature {next(iter(found))}") if len(sets) == 1 else ((), "")


def _rows_of_feature(feature: str) -> tuple[GpuSpec, ...]:
    name = card_name(_value(feature))
    return rows_of_model(name.model) if name.model else ()


def _value(feature: str) -> str:
    """The second half of `GPU_SKU:V100`."""
    return re.split(r"[:=]", feature)[-1]


def _mig_profile(kind: str) -> tuple[str | None, str]:
    """`3g.20gb` and what is left of a type."""
    match = re.search(r"\d+g\.\d+gb(?:\+me)?", kind.lower())
    return (None, kind) if match is None else (match[0], kind.lower().replace(match[0], " "))


def _mig_gpu(row: GpuSpec, profile: str) -> Gpu:
    """A slice has a part of its chip's peak; which part is not told, so it has no row."""
    memory = int(int(re.findall(r"\d+", profile)[1]) * _MIG_USABLE_SHARE * GIB)
    return Gpu(
        index=0,
        name=f"{row.name.partition('-')[0]} MIG {profile}",
        spec_name=None,
        memory_bytes=memory,
        usable_bytes=memory,
        compute_capability=row.compute_capability,
        is_mig_on=True,
    )
