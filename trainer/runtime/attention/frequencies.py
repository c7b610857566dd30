"""Rotary frequencies that follow from the length of a sequence: each document has those of its own length.

transformers chooses such frequencies (LongRoPE of Phi-3 and Phi-4, dynamic NTK) in each forward by the largest position
of the micro batch: a document next to a longer one, in its row or in another row, would have those of the longer one.
Dynamic NTK moreover keeps the frequencies of the longest sequence that it has seen.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.trainer.runtime.attention.packed import replaced_forwards

_DYNAMIC, _LONG = "dynamic", "longrope"  # of transformers' `rope_type`: names that contain one, and a name


@contextmanager
def own_frequencies(
    decoder: nn.Module, shape: Sequence[int], *, bounds: Sequence[int] = (), lengths: Sequence[int] = ()
) -> Iterator[None]:
    """Within the block, rotary tables compute each long document of rows [B, S] by itself, and padding apart from it.

    `bounds` are the places of the concatenated rows where documents start, `lengths` those of the rows without padding.
    """
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    limit = _limit(decoder)
    if limit is not None:
        parts = _parts(shape, bounds, lengths, limit)
        tables = [module for module in decoder.modules() if hasattr(module, "rope_type")]
        forwards = {table: partial(_by_part, table, parts) for table in tables}
    with replaced_forwards(forwards):
        yield


def _limit(decoder: nn.Module) -> int | None:
    """The longest document, in tokens, that has the first frequencies; None where all have the same."""
    config: Any = getattr(decoder, "config", None)
    settings = getattr(config, "rope_parameters", None) or {}
    limits = []
    for each in (settings, *settings.values()):  # one for all blocks, or one for each kind of block
        kind = each.get("rope_type") or "" if isinstance(each, dict) else ""
        if kind == _LONG:
            limits.append(int(each["original_max_position_embeddings"]))
        elif _DYNAMIC in kind:
            limits.append(int(config.max_position_embeddings))
    return min(limits, default=None)


def _parts(shape: Sequence[int], bounds: Sequence[int], lengths: Sequence[int], limit: int) -> tuple[int, ...]:
    """Ends of the parts of concatenated rows, from 0: each longer document, and what is between two of them."""
    num_rows, width = shape
    rows = range(0, num_rows * width, width)
    ends = sorted({*bounds, *rows, *map(int.__add__, rows, lengths), num_rows * width})
    longer = [place for start, end in pairwise(ends) if end - start > limit for place in (start, end)]
    return tuple(sorted({0, *longer, num_rows * width}))


def _by_part(
    table: Any,  # noqa: ANN401  # a rotary table of transformers, one class for each model
    ends: tuple[int, ...],
    x: Tensor,
    position_ids: Tensor,
    *others: Any,  # noqa: ANN401  # the kind of block
    **named: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401  # cosines and sines, or complex numbers
    """The table of positions [..., B, S], or of [..., 1, S] for all rows: tensors [..., B, S, D]."""
    total = ends[-1]
    *leading, num_rows, width = position_ids.shape
    num_rows = num_rows if num_rows * width == total else total // width
    places = position_ids.expand(*leading, num_rows, width).reshape(*leading, 1, total)
    found = []
    for start, end in pairwise(ends):
        _forget(table)
        found.append(type(table).forward(table, x, places[..., start:end], *others, **named))
    _forget(table)
    joined = partial(_joined, num_rows=num_rows, width=width)
    return joined(found) if isinstance(found[0], Tensor) else tuple(joined(parts) for parts in zip(*found, strict=True))


def _joined(parts: Sequence[Tensor], *, num_rows: int, width: int) -> Tensor:
    table = torch.cat(tuple(parts), dim=-2)
    return table.reshape(*table.shape[:-3], num_rows, width, table.shape[-1])


def _forget(table: nn.Module) -> None:
    """Gives a table the frequencies that it had before its first sequence."""
    for name, original in list(table.named_buffers(recurse=False)):
        kind, separator, _ = name.rpartition("original_inv_freq")
        if separator:
            setattr(table, f"{kind}inv_freq", original.clone())
            setattr(table, f"{kind}max_seq_len_cached", table.original_max_seq_len)
