"""Which adapters have learned nothing after the first steps: of a layer, and of each expert.

The second matrix of an adapter begins as zeros, and every optimizer leaves an element at zero that has had no gradient:
a matrix that is all zeros after some steps has had none. Experts that lie in one tensor share the two matrices of an
adapter; each has columns of its own in the second one. The matrices are read once in a run, as an engine holds them,
and the ranks agree on one small tensor of flags.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from shardwise.trainer.runtime.engines import running_engine
from shardwise.trainer.runtime.loop.session import Session
from shardwise.trainer.runtime.models.build import plain_model
from shardwise.trainer.runtime.models.methods import ADAPTER

CHECKED_STEPS = 5
_SHOWN = 8  # layers in a message
_NUMBER = re.compile(r"\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\..*")  # of experts that are modules of their own


class Adapter(NamedTuple):
    """The adapter of a layer, or of the experts that share one."""

    path: str
    num_experts: int  # that share it; 1 of a layer
    weight: nn.Parameter  # [outputs, rank x experts]


class AdapterCheck:
    """Looks once at the adapters of a run, after its first steps, and records those without a gradient."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_due = session.plan.chosen.method.freezes_base and not session.plan.is_trial

    def after_step(self) -> tuple[str, ...]:
        """Experts and adapters that learned nothing, also added to the report; a collective call when it is due."""
        session, step = self._session, self._session.state.step
        if not self._is_due or step < min(CHECKED_STEPS, session.plan.schedule.num_steps):
            return ()
        self._is_due = False
        adapters = adapters_of(plain_model(session.model))
        flags = have_learned(session.model, adapters, session.accelerator.device)
        problems = without_gradient(adapters, flags, num_steps=step)
        for problem in problems:
            session.state.log.note(problem)
        verified = session.state.verified
        if verified is not None:
            fact = {"adapters with a gradient": f"{sum(flags):,} of {len(flags):,}, after {step} steps"}
            session.state.verified = replace(verified, facts=verified.facts | fact)
        return tuple(problems)


def adapters_of(model: nn.Module) -> list[Adapter]:
    """The adapters of a model, in its order."""
    found = []
    for path, module in model.named_modules():
        matrices: Any = getattr(module, "lora_B", None)
        if isinstance(matrices, nn.ModuleDict) and ADAPTER in matrices:
            weight: Any = matrices[ADAPTER].weight
            found.append(Adapter(path, int(getattr(module, "num_experts", 1)), weight))
    return found


def have_learned(model: nn.Module, adapters: Sequence[Adapter], device: torch.device) -> list[bool]:
    """A flag for each adapter, or for each expert of one: true if some rank's part of its matrix is not zero."""
    engine, flags = running_engine(model), []
    with torch.no_grad():
        for adapter in adapters:
            rows = engine.held_rows(adapter.weight)
            flags.append((rows != 0).view(-1, adapter.num_experts).any(dim=0).to(device))
        found = torch.cat(flags).to(torch.uint8)
    if dist.is_initialized():
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in found.tolist()]


def without_gradient(adapters: Sequence[Adapter], flags: Sequence[bool], *, num_steps: int) -> list[str]:
    """A line on experts, and one on layers, whose adapters have had no gradient; none where all have."""
    steps = f"{num_steps} step{'s' if num_steps > 1 else ''}"
    layers, experts = _missing(adapters, flags)
    lines = []
    if experts:
        lines.append(f"no token in {steps}, so no gradient for the adapters of {experts_by_layer(experts)}")
    if layers:
        more = f" and {len(layers) - _SHOWN} more" if len(layers) > _SHOWN else ""
        lines.append(
            f"no gradient in {steps} for the adapters of {', '.join(layers[:_SHOWN])}{more}: they do not learn"
        )
    return lines


def experts_by_layer(experts: Mapping[str, tuple[Sequence[int], int]]) -> str:
    """`layer 0: experts 1-3 of 8; layer 1: ...`, of (numbers, how many there are) by the module that holds them."""
    shown = [
        f"layer {_layer(owner)}: experts {_ranges(numbers)} of {count}"
        for owner, (numbers, count) in [*experts.items()][:_SHOWN]
    ]
    more = f"; and {len(experts) - _SHOWN} more layers" if len(experts) > _SHOWN else ""
    return f"{'; '.join(shown)}{more}"


def _missing(adapters: Sequence[Adapter], flags: Sequence[bool]) -> tuple[list[str], dict[str, tuple[list[int], int]]]:
    """Layers without a gradient, and by the module that holds experts those of them without, and how many it has."""
    layers: list[str] = []
    learned: dict[str, dict[int, bool]] = {}
    place = 0
    for path, num_experts, _ in adapters:
        own = flags[place : place + num_experts]
        place += num_experts
        single = _EXPERT.fullmatch(path)
        if num_experts > 1 or single is not None:
            owner = path.replace(".base_layer", "") if single is None else single[1]
            first = 0 if single is None else int(single[2])
            known = learned.setdefault(owner, {})
            for expert, flag in enumerate(own, first):
                known[expert] = known.get(expert, False) or flag
        elif not own[0]:
            layers.append(path)
    experts = {owner: ([each for each, flag in own.items() if not flag], len(own)) for owner, own in learned.items()}
    return layers, {owner: (idle, count) for owner, (idle, count) in experts.items() if idle}


def _layer(path: str) -> str:
    found = _NUMBER.search(path)
    return path if found is None else found[1]


def _ranges(numbers: Sequence[int]) -> str:
    """`1-3, 7`."""
    begins = [each for each in numbers if each - 1 not in numbers]
    ends = [each for each in numbers if each + 1 not in numbers]
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(begins, ends, strict=True))
