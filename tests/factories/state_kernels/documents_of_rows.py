"""A function of one document, applied to each document of rows."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor


def by_numbers(compute: Callable[..., Tensor], numbers: Tensor, *values: Tensor, dim: int) -> Tensor:
    """`compute` of each run of equal numbers [B, S] in the values, whose tokens are along `dim`."""
    assert numbers.dtype is torch.int32
    assert all(value.shape[dim] == numbers.shape[1] for value in values)
    rows = []
    for row, own in enumerate(numbers):
        lengths = torch.unique_consecutive(own, return_counts=True)[1].tolist()
        parts = zip(*(value[row : row + 1].split(lengths, dim=dim) for value in values), strict=True)
        rows.append(torch.cat([compute(*each) for each in parts], dim=dim))
    return torch.cat(rows)


def by_bounds(compute: Callable[..., Tensor], bounds: Tensor, *values: Tensor) -> Tensor:
    """`compute` of each document of one row, [1, S, ...], by the bounds of its documents."""
    assert all(value.shape[0] == 1 for value in values), "with bounds, all rows are one"
    places = [slice(*pair) for pair in pairwise(bounds.tolist())]
    return torch.cat([compute(*(value[:, place] for value in values)) for place in places], dim=1)
