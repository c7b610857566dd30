"""The card of the catalogue that a GRES type names. Pure.

Sites choose the names of cards: `a100`, `nvidia_h100_80gb_hbm3` (what NVML reports), `v100-sxm2-32gb`, `A100.80gb`,
`rtx_3090`; others omit the type and give nodes a feature (`A100-80GB`, `GPU_SKU:V100`, `hbm80g`, `gpu80`).
`trainer.planning.tables.gpu_names` finds the rows of a name and chooses among several. A card that is not in the
catalogue is not guessed.
"""

import re
from collections.abc import Iterable, Sequence

from shardwise.slurm.cluster import Gres
from shardwise.trainer.planning.tables.gpu_names import (
    card_name,
    hardware_from_spec,
    mig_profile,
    of_memory,
    preferred_row,
    rows_of_model,
    rows_of_name,
)
from shardwise.trainer.planning.tables.gpu_specs import MIG_MARK, GpuSpec, gpu_spec
from shardwise.trainer.spec.hardware import Gpu, Host
from shardwise.trainer.spec.units import GIB
from shardwise.trainer.spec.value import Value

# The usable part of a MIG slice's name: 4.75 GiB of 1g.5gb, 19.6 of 3g.20gb (MIG user guide, tables of profiles).
_MIG_USABLE_SHARE = 0.95
# Features on other memories, and on networks: mem512gb, scr50gb, ib40g.
_OTHER_SIZES = re.compile(
    r"^(cpu|mem|memory|ram|scr|scratch|tmp|local|disk|ssd|nvme|hdd|node|ib|eth|roce|net)([^a-z]|$)"
)
_GPU_MEMORY_GRES = re.compile(r"^(vram|gpu_?mem|gmem|gram)", re.IGNORECASE)
_NO_HOST = Host(cpu_name=None, num_cores=None, ram_bytes=None, ram_available_bytes=None)


class CardChoice(Value, frozen=True, kw_only=True):
    """The chosen card and its alternatives."""

    gpu: Gpu  # as the first of its node
    fits: tuple[str, ...]  # every row of the catalogue that matches
    source: str  # `gpu:a100`, `the feature A100-80GB`


def card_of(gres: Gres, features: Sequence[str] = (), others: Iterable[Gres] = ()) -> CardChoice | None:
    """The card of a node's GRES; None if the catalogue has none of that name, or there is no name.

    `others` are the node's other resources: some sites state the GPUs' memory there (`VramPerGpu:no_consume:94G`).
    """
    profile, rest = mig_profile(gres.kind or "")
    rows, source = rows_of_name(rest, _memory_hints(features, others)), f"gpu:{gres.kind}"
    if not card_name(rest).model:
        rows, source = _rows_of_features(features)
        rows = of_memory(rows, _memory_hints(features, others))
    if not rows:
        return None
    chosen = preferred_row(rows, gres.count)
    if profile is not None:
        return CardChoice(gpu=_mig_gpu(chosen, profile), fits=(chosen.name,), source=source)
    return CardChoice(gpu=gpus_of_row(chosen.name, 1)[0], fits=tuple(row.name for row in rows), source=source)


def gpus_of_row(name: str, count: int) -> tuple[Gpu, ...]:
    """`count` cards of a row of the catalogue."""
    return hardware_from_spec(f"{count}x{name}", local_host=lambda: _NO_HOST).gpus


def _memory_hints(features: Sequence[str], others: Iterable[Gres]) -> list[int]:
    names = [card_name(_value(feature)) for feature in features if not _OTHER_SIZES.match(feature.lower())]
    sizes = [one.count // GIB for one in others if _GPU_MEMORY_GRES.match(one.name) and one.count >= GIB]
    return [*(name.memory_gib for name in names if name.memory_gib), *sizes]


def _rows_of_features(features: Sequence[str]) -> tuple[tuple[GpuSpec, ...], str]:
    """The rows of the model that features name; none if they name several models or none."""
    found = {feature: rows for feature in features if (rows := _rows_of_feature(feature))}
    sets = set(found.values())
    return (sets.pop(), f"the feature {next(iter(found))}") if len(sets) == 1 else ((), "")


def _rows_of_feature(feature: str) -> tuple[GpuSpec, ...]:
    name = card_name(_value(feature))
    return rows_of_model(name.model) if name.model else ()


def _value(feature: str) -> str:
    """The second half of `GPU_SKU:V100`."""
    return re.split(r"[:=]", feature)[-1]


def _mig_gpu(row: GpuSpec, profile: str) -> Gpu:
    """A slice of a card; a profile that the catalogue does not have gets the memory in its name."""
    part = gpu_spec(f"{row.name}{MIG_MARK}{profile}")
    named_gib = int(re.findall(r"\d+", profile)[1])
    memory = part.usable_bytes if part is not None else int(named_gib * _MIG_USABLE_SHARE * GIB)
    return Gpu(
        index=0,
        name=f"{row.name.partition('-')[0]} MIG {profile}",
        spec_name=part.name if part is not None else None,
        memory_bytes=memory,
        usable_bytes=memory,
        compute_capability=row.compute_capability,
        is_mig_on=True,
    )
