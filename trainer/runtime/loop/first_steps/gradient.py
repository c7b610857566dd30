"""Whether the gradient that reaches the optimizer is the mean over the ranks of what each rank computed.

In one step a hook on a few parameters adds up some elements of what the backward passes give on this rank, before an
engine shares them. Their sum over all ranks, divided by the number of ranks and clipped, has to be the gradient that
the first moments of the optimizer show, at the places that this rank updates. So a gradient that is not shared, shared
twice, summed over two steps or of another rank's shard is found, under every engine by the same comparison.

Compared are AdamW and Lion with moments in memory and in fp32. Not compared: FP8, GaLore, whose moments are of
projections, updates within the backward pass, and moments on NVMe. Some kilobytes are held during the step.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer as TorchOptimizer

from shardwise.trainer.runtime.checkpoint.engines import adapter_of
from shardwise.trainer.runtime.checkpoint.pieces import Piece, canonical_name
from shardwise.trainer.runtime.engines import running_engine
from shardwise.trainer.runtime.loop.first_steps.problem import Problem
from shardwise.trainer.runtime.loop.first_steps.update import matrices_for_every_token, spread
from shardwise.trainer.runtime.loop.step import sum_over_ranks
from shardwise.trainer.runtime.models.build import plain_model
from shardwise.trainer.spec.engines import Sharding

MAX_TENSORS = 4
_ROWS, _COLUMNS = 64, 16  # of a matrix, that are read at most
_MOST_OFF = 0.1  # of the norm of the gradient, in addition to rounding
_FIRST_MOMENT = "exp_avg"


class Local:
    """Some elements of the gradient of one matrix that the backward passes of this rank give."""

    def __init__(self, name: str, shape: Sequence[int]) -> None:
        self.name = name
        num_rows, width = shape
        self._stride, self._width = -(-num_rows // _ROWS), min(width, _COLUMNS)
        rows, columns = torch.arange(0, num_rows, self._stride), torch.arange(self._width)
        self.places = (rows[:, None] * width + columns).view(-1)  # in the flat matrix
        self.total: Tensor | None = None  # float64, one for each place
        self.size: Tensor | None = None  # the sum of the absolute values

    def add(self, gradient: Tensor) -> None:
        """Adds what one backward pass gives for the whole matrix."""
        found = gradient.detach()[:: self._stride, : self._width].double().reshape(-1)
        self.total = found if self.total is None else self.total + found
        self.size = found.abs() if self.size is None else self.size + found.abs()


class Reduced(NamedTuple):
    """What all ranks computed together, in float64 on the CPU."""

    mean: Tensor
    size: Tensor  # of which rounding is a share


class GradientCheck:
    """Records the gradient of one step and compares it with the moments."""

    def __init__(self, model: nn.Module, optimizer: TorchOptimizer, sharding: Sharding) -> None:
        self._model, self._optimizer, self._sharding = model, optimizer, sharding
        engine, self._locals, self._hooks = running_engine(model), [], []
        for name, parameter in _matrices(model):
            leaf = engine.backward_leaf(model, parameter)
            if leaf is not None:
                local = Local(canonical_name(name), getattr(parameter, "ds_shape", parameter.shape))
                self._locals.append(local)
                self._hooks.append(leaf.register_hook(local.add))
        self._before = self._moments()

    def end(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def problems(
        self, *, beta: float, clip: float, grad_norm: float, loss_scale: float, num_ranks: int, eps: float, step: int
    ) -> list[Problem]:
        """A problem if a gradient is another after the update of this step; `eps` is of what computes; collective."""
        every = self._reduced(num_ranks * loss_scale / min(1.0, clip / (grad_norm + 1e-6)))
        now, off = self._moments(), []
        for local, reduced in zip(self._locals, every, strict=True):
            after = now.get(local.name)
            if after is None:
                continue
            before = self._before.get(local.name, torch.zeros_like(after))
            is_held = ~after.isnan()
            found, expected = ((after - beta * before) / (1 - beta))[is_held], reduced.mean[is_held]
            rounding = 2 * eps * reduced.size[is_held].norm()
            rounding += 4 * torch.finfo(torch.float32).eps / (1 - beta) * (before[is_held].norm() + 1e-12)
            if float((found - expected).norm()) > _MOST_OFF * float(expected.norm()) + float(rounding):
                off.append((local.name, found, expected))
        return [_problem(off, step=step)] if off else []

    def _reduced(self, divisor: float) -> list[Reduced]:
        device = next(each for each in plain_model(self._model).parameters() if each.requires_grad).device
        device = next((each.total.device for each in self._locals if each.total is not None), device)
        parts = []
        for local in self._locals:
            nothing = torch.zeros(len(local.places), dtype=torch.float64, device=device)
            parts += [nothing if each is None else each for each in (local.total, local.size)]
        if not parts:
            return []
        sums = (sum_over_ranks(torch.cat(parts)).cpu() / divisor).split([len(each) for each in parts])
        return [Reduced(*pair) for pair in zip(sums[::2], sums[1::2], strict=True)]

    def _moments(self) -> dict[str, Tensor]:
        """The first moments at the places of each matrix, in float64 on the CPU; NaN where this rank has none."""
        wanted = {each.name: each.places for each in self._locals}
        found: dict[str, Tensor] = {}
        for piece in adapter_of(self._sharding).held_pieces(self._model, self._optimizer):
            if piece.state != _FIRST_MOMENT or piece.name not in wanted or not _is_exact(piece):
                continue
            places = wanted[piece.name] - piece.start
            is_here = (places >= 0) & (places < piece.num_elements)
            values = found.setdefault(piece.name, torch.full(places.shape, math.nan, dtype=torch.float64))
            values[is_here] = piece.values[places[is_here].to(piece.values.device)].cpu().double()
        return found


def _problem(off: Sequence[tuple[str, Tensor, Tensor]], *, step: int) -> Problem:
    shown = ", ".join(name for name, _, _ in off[:3])
    found, expected = torch.cat([each for _, each, _ in off]), torch.cat([each for _, _, each in off])
    product, squares = float(found @ expected), float(expected @ expected)
    is_multiple = product > 0.99 * float(found.norm() * expected.norm()) > 0
    how = f"{product / squares:.3g} times" if is_multiple else "not"
    return Problem(
        f"step {step}: the gradient of {shown} in the optimizer is {how} the mean of what the ranks computed",
        is_certain=True,
    )


def _is_exact(piece: Piece) -> bool:
    is_in_memory = piece.elsewhere is None and piece.blocks is None and piece.coded is None
    return is_in_memory and piece.values.dtype is torch.float32


def _matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trained matrices that every token goes through, from the first to the last."""
    return spread([each for each in matrices_for_every_token(model) if each[1].requires_grad], MAX_TENSORS)
