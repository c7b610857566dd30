"""Whether an update is the one of the plan: its learning rate, its rule, and what it changes.

Some elements of what the inner optimizer updates, with their moments, are read before and after a step: weights, shards
of FSDP2, master partitions of ZeRO. The moments after a step, the weights before it and the plan's learning rate give
the weights after it, without a gradient: of AdamW (arXiv:1711.05101)

    w' = w - lr (wd w + m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + eps))

and of Lion (arXiv:2302.06675) with the gradient that m and m' give. Of AdamW, m, m' and v give v' as well, which shows
the betas; and a gradient that agrees with that of the step before in every element is one that was not computed anew.
Not compared in this way: LAMB, AdEMAMix, Adafactor, GaLore, SGD, 8-bit moments, Muon's matrices, updates within the
backward pass, and partitions on NVMe. Of them, as of all, the settings of the groups and what moves are compared.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer as TorchOptimizer

from shardwise.trainer.runtime.engines import running_engine
from shardwise.trainer.runtime.loop.first_steps.problem import Problem
from shardwise.trainer.runtime.models.build import plain_model
from shardwise.trainer.runtime.models.methods import is_adapted
from shardwise.trainer.runtime.optimizers import BETAS, EPSILON, MATRICES, NO_DECAY
from shardwise.trainer.runtime.optimizers.rules import LION_BETAS
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Method

MAX_TENSORS, MAX_ELEMENTS = 64, 128  # that are read of the optimizer
MAX_MOVED = 12  # tensors of the model whose first rows are read, of each kind
_ADAMW = frozenset(
    {Optimizer.ADAMW, Optimizer.ADAMW_FUSED, Optimizer.DEEPSPEED_CPU_ADAM, Optimizer.PAGED_ADAMW, Optimizer.MUON}
)
# Their updates have about the size of the rate, whatever the gradient's: a weight that is trained has to move.
_SCALED = _ADAMW | {Optimizer.LION, Optimizer.LION_8BIT, Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT}
_LEAST_UPDATES = 3  # the first one leaves the first matrix of an adapter as it was
_MOMENTS = (("exp_avg", "exp_avg_sq"), ("state1", "state2"), ("exp_avg", None))
_LEAST = 16  # elements, for a verdict
_MOST_OFF = 0.5  # share of the elements of a tensor that may differ
_SAME = 1e-4  # relative: two gradients are one


class Rule(NamedTuple):
    """What an update has to follow."""

    optimizer: Optimizer
    lr: float
    weight_decay: float

    @property
    def betas(self) -> tuple[float, float] | None:
        """The two betas; None where they are not compared."""
        return betas_of(self.optimizer)

    @property
    def first_beta(self) -> float:
        """The share of its first moment that an update retains."""
        assert self.betas is not None
        return self.betas[1 if self.optimizer is Optimizer.LION else 0]


def betas_of(optimizer: Optimizer) -> tuple[float, float] | None:
    """The two betas of a rule whose updates are compared; None of another."""
    if optimizer in _ADAMW:
        return BETAS
    return LION_BETAS if optimizer is Optimizer.LION else None


class Elements(NamedTuple):
    """Some elements of one tensor and its state, in float64 on the CPU."""

    weights: Tensor
    first: Tensor | None  # moment; None before the first update
    second: Tensor | None
    num_updates: int | None


class Watched(NamedTuple):
    """A tensor that the optimizer updates."""

    name: str
    group: str
    tensor: Tensor
    decays: bool


def watched_tensors(model: nn.Module, optimizer: TorchOptimizer) -> list[Watched]:
    """What the inner optimizer updates on this rank, at most MAX_TENSORS of it, spread over the model."""
    engine = running_engine(model)
    names = {id(parameter): name for name, parameter in plain_model(model).named_parameters()}
    masters, groups = engine.masters(model), engine.updated_groups(model, optimizer)
    if masters:
        found = [
            Watched(f"partition {number} ({group})", group, tensor, decays=group != NO_DECAY)
            for number, (tensor, (group, _)) in enumerate(zip(masters, groups, strict=True))
        ]
    else:
        found = [
            Watched(names.get(id(each), group), group, each, decays=each.ndim >= 2)
            for group, parameters in groups
            for each in parameters
        ]
    held = [each for each in found if _local(each.tensor).numel()]
    return spread(held, MAX_TENSORS)


def read_elements(watched: Watched, optimizer: TorchOptimizer) -> Elements:
    """Elements at fixed places of a tensor, with their moments where they have the tensor's shape."""
    local = _local(watched.tensor)
    state: Any = optimizer.state.get(watched.tensor, {})
    first_name, second_name = next((each for each in _MOMENTS if each[0] in state), ("", None))
    first, second = state.get(first_name), state.get(second_name)
    count = state.get("step")
    return Elements(
        _taken(local),
        _taken(_local(first)) if _is_like(first, local) else None,
        _taken(_local(second)) if _is_like(second, local) else None,
        None if count is None else int(count),
    )


class Movement(NamedTuple):
    """The difference of a watched tensor before and after a step."""

    watched: Watched
    before: Elements
    after: Elements


def rule_problems(movements: Sequence[Movement], rule: Rule, *, step: int) -> list[Problem]:
    """How the update of a step differs from the rule; at most one problem."""
    off = [(each, ratio) for each in movements if (ratio := _ratio_if_off(each, rule)) is not None]
    if not off:
        return []
    shown = ", ".join(each.watched.name for each, _ in off[:3])
    more = f" and {len(off) - 3} more" if len(off) > 3 else ""
    ratios = sorted(ratio for _, ratio in off)
    text = (
        f"step {step}: the update of {shown}{more} is not that of {rule.optimizer} at the plan's learning rate "
        f"{rule.lr:.3g}: {ratios[len(ratios) // 2]:.3g} times as large"
    )
    return [Problem(text, is_certain=True)]


def moment_problems(movements: Sequence[Movement], rule: Rule, *, step: int) -> list[Problem]:
    """A problem if the moments of AdamW are not those of its betas, from float32 moments alone."""
    if rule.optimizer not in _ADAMW:
        return []
    num_off = num_seen = 0
    for each in movements:
        gradient, second = _gradient(each, rule), each.after.second
        if gradient is None or second is None or _state_eps(each) > torch.finfo(torch.float32).eps:
            continue
        before = torch.zeros_like(second) if each.before.second is None else each.before.second
        expected = BETAS[1] * before + (1 - BETAS[1]) * gradient.square()
        clear = _clear(each, gradient)
        num_seen += int(clear.sum())
        num_off += int(((second - expected).abs() > 0.05 * second)[clear].sum())
    if num_seen < _LEAST or num_off <= _MOST_OFF * num_seen:
        return []
    return [Problem(f"step {step}: the moments of {rule.optimizer} are not those of betas {BETAS}", is_certain=True)]


def lost_state_problems(movements: Sequence[Movement], *, step: int) -> list[Problem]:
    """A problem if the optimizer had no moments before the first step of a resumed run, and has some after it."""
    had = any(each.before.first is not None for each in movements)
    has = any(each.after.first is not None for each in movements)
    if had or not has:
        return []
    return [Problem(f"step {step}: the run is resumed without the moments of its optimizer", is_certain=True)]


def stale_problems(before: Sequence[Movement], now: Sequence[Movement], rule: Rule, *, step: int) -> list[Problem]:
    """A problem if the gradients of two steps with other rows agree in every element that was read."""
    num_same = num_seen = 0
    for old, new in zip(before, now, strict=True):
        one, two = _gradient(old, rule), _gradient(new, rule)
        if one is None or two is None or _state_eps(new) > torch.finfo(torch.float32).eps:
            continue
        clear = _clear(old, one) & _clear(new, two)
        num_seen += int(clear.sum())
        num_same += int(((one - two).abs() <= _SAME * one.abs())[clear].sum())
    if num_seen < _LEAST or num_same < 0.9 * num_seen:
        return []
    return [Problem(f"step {step}: the gradient is that of the step before, of other rows", is_certain=True)]


def group_problems(groups: Iterable[dict[str, Any]], rule: Rule, *, step: int) -> list[Problem]:
    """Settings of parameter groups that are not the plan's."""
    found: dict[str, None] = {}
    for group in groups:
        decay = 0.0 if group.get("name") == NO_DECAY else rule.weight_decay
        planned = {"learning rate": ("lr", rule.lr), "weight decay": ("weight_decay", decay)}
        for name, (key, value) in planned.items():
            if key in group and not math.isclose(float(group[key]), value, rel_tol=1e-6):
                of = f" of the group {group['name']}" if "name" in group else ""
                found[f"the {name}{of} is {float(group[key]):.4g}; the plan has {value:.4g}"] = None
        if rule.betas is not None and "betas" in group and group.get("name") != MATRICES:
            betas = tuple(map(float, group["betas"]))
            if betas != rule.betas:
                found[f"the betas of {rule.optimizer} are {betas}; the plan has {rule.betas}"] = None
    return [Problem(f"step {step}: {each}", is_certain=True) for each in found]


class Moving(NamedTuple):
    """The first rows of a tensor of the model before the first step, and whether the plan has it trained."""

    name: str
    tensor: Tensor
    rows: Tensor
    is_trained: bool


def moving_rows(model: nn.Module, method: Method) -> list[Moving]:
    """Rows of weights that are to move, and of those that are not; collective where a weight has to be gathered.

    To move are matrices that every token goes through. Those of routers and experts, and embeddings, may stay.
    """
    engine = running_engine(model)
    trained = [each for each in matrices_for_every_token(model) if _is_trained(each[0], method)]
    frozen = [each for each in plain_model(model).named_parameters() if not _is_trained(each[0], method)]
    chosen = [
        *((each, True) for each in spread(trained, MAX_MOVED)),
        *((each, False) for each in spread(frozen, MAX_MOVED)),
    ]
    return [
        Moving(name, parameter, _first_rows(engine.held_rows(parameter)), is_trained)
        for (name, parameter), is_trained in chosen
    ]


def movement_problems(
    model: nn.Module, before: Sequence[Moving], rates: Sequence[float], optimizer: Optimizer, *, step: int
) -> list[Problem]:
    """Weights that moved and should not have, and the other way round, after updates at these rates; collective."""
    engine, moved, still = running_engine(model), [], []
    for each in before:
        now = _first_rows(engine.held_rows(each.tensor))
        if not now.numel() or now.shape != each.rows.shape:
            continue
        has_moved = not torch.equal(now.view(torch.uint8), each.rows.view(torch.uint8))  # 4-bit codes may look like NaN
        if not each.is_trained and has_moved:
            moved.append(each.name)
        elif each.is_trained and not has_moved and not is_adapted([each.name]) and _can_move(each.rows, sum(rates)):
            still.append(each.name)  # adapters without a gradient are named by `loop.adapter_check`
    found = []
    if moved:
        found.append(Problem(f"step {step}: {', '.join(moved[:3])} changed and is frozen by the plan", is_certain=True))
    if still and optimizer in _SCALED and len(rates) >= _LEAST_UPDATES:
        text = f"step {step}: {', '.join(still[:3])} did not change in {len(rates)} updates and is trained by the plan"
        found.append(Problem(text, is_certain=False))
    return found


def matrices_for_every_token(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Matrices that every token goes through: those of embeddings, routers and experts are none of them."""
    plain = plain_model(model)
    tables = {id(module.weight) for module in plain.modules() if isinstance(module, nn.Embedding)}
    return [
        (name, parameter)
        for name, parameter in plain.named_parameters()
        if id(parameter) not in tables
        and len(getattr(parameter, "ds_shape", parameter.shape)) == 2
        and not any(part in name for part in ("expert", "gate.", "router"))
    ]


def spread(items: list[Any], most: int) -> list[Any]:
    """At most so many items, from beginning to end."""
    return items if len(items) <= most else [items[index * (len(items) - 1) // (most - 1)] for index in range(most)]


def _is_trained(name: str, method: Method) -> bool:
    return not method.freezes_base or is_adapted([name])


def _can_move(rows: Tensor, distance: float) -> bool:
    """True if enough elements are so small that a tenth of this distance does not vanish in rounding."""
    if not rows.is_floating_point():
        return False
    room = 0.1 * distance > torch.finfo(rows.dtype).eps * rows.abs().float()
    return int(room.sum()) >= min(_LEAST, rows.numel())


def _ratio_if_off(movement: Movement, rule: Rule) -> float | None:
    """How far a tensor moved, of how far it should have, where that is not 1; None where it is or is not compared."""
    expected = _expected(movement, rule)
    if expected is None:
        return None
    before, after = movement.before.weights, movement.after.weights
    rounding = 4 * torch.finfo(_local(movement.watched.tensor).dtype).eps * before.abs()
    is_exact = _state_eps(movement) <= torch.finfo(torch.float32).eps
    off = (after - expected).abs() > rule.lr * (2e-4 if is_exact else 0.2) + rounding
    if int(off.sum()) < min(_LEAST, len(off)) or off.double().mean() <= _MOST_OFF:
        return None
    planned, found = (expected - before).abs()[off].median(), (after - before).abs()[off].median()
    return float(found / planned) if planned > 0 else math.inf


def _expected(movement: Movement, rule: Rule) -> Tensor | None:
    """The weights after the update."""
    before, after, decay = movement.before, movement.after, rule.weight_decay if movement.watched.decays else 0.0
    if after.first is None or movement.watched.group == MATRICES:
        return None
    decayed = before.weights * (1 - rule.lr * decay)
    if rule.optimizer is Optimizer.LION:
        gradient = _gradient(movement, rule)
        first = torch.zeros_like(after.first) if before.first is None else before.first
        return (
            None
            if gradient is None
            else decayed - rule.lr * (LION_BETAS[0] * first + (1 - LION_BETAS[0]) * gradient).sign()
        )
    if rule.optimizer not in _ADAMW or after.second is None or not after.num_updates:
        return None
    one, two = (1 - beta**after.num_updates for beta in BETAS)
    return decayed - rule.lr * (after.first / one) / ((after.second / two).sqrt() + EPSILON)


def _gradient(movement: Movement, rule: Rule) -> Tensor | None:
    """The gradient that the first moments before and after an update give."""
    after = movement.after.first
    if after is None or rule.betas is None or movement.watched.group == MATRICES:
        return None
    before = torch.zeros_like(after) if movement.before.first is None else movement.before.first
    return (after - rule.first_beta * before) / (1 - rule.first_beta)


def _clear(movement: Movement, gradient: Tensor) -> Tensor:
    """Elements whose gradient is no difference of two nearly equal moments, nor too small for its square."""
    first = movement.before.first
    floor = torch.zeros_like(gradient) if first is None else 1e-3 * first.abs()
    return (gradient.abs() > floor) & (gradient.abs() > 1e-15)


def _state_eps(movement: Movement) -> float:
    """The relative rounding of a tensor, whose moments are assumed to have its type."""
    return float(torch.finfo(_local(movement.watched.tensor).dtype).eps)


def _local(tensor: Any) -> Tensor:  # noqa: ANN401  # a tensor or a DTensor
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    assert isinstance(local, Tensor)
    return local.detach()


def _is_like(moment: object, local: Tensor) -> bool:
    """True for a floating-point moment of as many elements as the tensor."""
    return isinstance(moment, Tensor) and moment.is_floating_point() and _local(moment).numel() == local.numel()


def _taken(tensor: Tensor) -> Tensor:
    """At most MAX_ELEMENTS elements at equal distances."""
    flat = tensor.reshape(-1)
    return flat[:: -(-max(1, flat.numel()) // MAX_ELEMENTS)].cpu().double()


def _first_rows(held: Tensor) -> Tensor:
    """A copy of the first elements of what a rank holds."""
    return held.reshape(-1)[:MAX_ELEMENTS].clone()
