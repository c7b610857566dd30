"""Layers that pool the keys of a row in blocks, run on packed rows a document at a time.

The blocks begin with the row: an index of key blocks (MiniMax M3) and compressed keys (DeepSeek V4) would pool the end
of one document with the begin of the next, and count blocks from the begin of the row. Each document is therefore
given to the layer by itself, and the results are put together: a mask, or compressed keys and their mask.

The bounds are read from the positions, which the layers are handed in any case, so that a recomputed block finds them
again. The host waits for them in every such layer.
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

_INDEXES, _COMPRESSORS = ("MiniMaxM3VLIndexer",), ("DeepseekV4HCACompressor", "DeepseekV4CSACompressor")


def pool_by_document(decoder: nn.Module) -> None:
    """Has the layers of a decoder that pool keys do so within each document; rows of one document run as before."""
    for module in decoder.modules():
        layer: Any = module
        if type(module).__name__ in _INDEXES:
            layer.forward = partial(_indexed, layer)
            layer.build_block_mask = partial(_index_mask, layer)
        elif type(module).__name__ in _COMPRESSORS:
            layer.forward = partial(_compressed, layer)


class _Document(NamedTuple):
    """The tokens `places` of row `row` of [B, S, ...]."""

    row: int
    places: slice

    def of(self, rows: Tensor) -> Tensor:
        """The document [1, L, ...]; of a tensor with one row, that row's."""
        row = min(self.row, rows.shape[0] - 1)
        return rows[row : row + 1, self.places]


def _documents(position_ids: Tensor) -> list[_Document]:
    """The documents of rows [B, S]; [] where each row is one."""
    width = position_ids.shape[1]
    starts = [place for place in (position_ids.flatten() == 0).nonzero().flatten().tolist() if place % width]
    if not starts:
        return []
    bounds = sorted({*starts, *range(0, position_ids.numel() + 1, width)})
    return [
        _Document(start // width, slice(start % width, start % width + end - start)) for start, end in pairwise(bounds)
    ]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its loop follows the data
def _indexed(
    index: Any,  # noqa: ANN401  # transformers' class
    hidden: Tensor,
    embeddings: tuple[Tensor, Tensor],
    cache: object,
    position_ids: Tensor,
) -> Tensor | list[Tensor]:
    """The selected blocks [B, H, S, K] of rows; of each document [1, H, L, K] of packed ones."""
    run = partial(type(index).forward, index)
    documents = _documents(position_ids)
    if not documents:
        found: Tensor = run(hidden, embeddings, cache, position_ids)
        return found
    return [
        run(each.of(hidden), (each.of(embeddings[0]), each.of(embeddings[1])), None, each.of(position_ids))
        for each in documents
    ]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
def _index_mask(
    index: Any,  # noqa: ANN401  # as above
    selected: Tensor | list[Tensor],
    mask: Tensor | None,
    key_length: int,
    dtype: torch.dtype,
    device: torch.device,
    position_ids: Tensor,
) -> Tensor:
    """What is added to the scores [B, H, S, S]: of packed rows, the mask of each document on the diagonal."""
    run = partial(type(index).build_block_mask, index)
    if isinstance(selected, Tensor):
        found: Tensor = run(selected, mask, key_length, dtype, device, position_ids)
        return found
    heads, (batch, width) = index.config.num_attention_heads, position_ids.shape
    whole = torch.full((batch, heads, width, width), torch.finfo(dtype).min, dtype=dtype, device=device)
    for each, blocks in zip(_documents(position_ids), selected, strict=True):
        length = blocks.shape[2]
        whole[each.row, :, each.places, each.places] = run(blocks, None, length, dtype, device, each.of(position_ids))[
            0
        ]
    return whole


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
def _compressed(
    compressor: Any,  # noqa: ANN401  # as above
    hidden: Tensor,
    residual: Tensor,
    position_ids: Tensor,
    cache: object,
    layer_idx: int,
) -> tuple[Tensor, Tensor | None]:
    """Compressed keys [B, 1, T, D], those of the documents of a row in order, and their mask [B, 1, S, T]."""
    run = partial(type(compressor).forward, compressor)
    documents = _documents(position_ids)
    if not documents:
        found: tuple[Tensor, Tensor | None] = run(hidden, residual, position_ids, cache, layer_idx)
        return found
    parts = [run(each.of(hidden), each.of(residual), each.of(position_ids), None, layer_idx) for each in documents]
    batch, width = position_ids.shape
    keys = [torch.cat(list(_of_row(row, documents, parts)), dim=2) for row in range(batch)]
    longest = max(each.shape[2] for each in keys)
    if not longest:
        return torch.cat(keys), None
    mask = keys[0].new_full((batch, 1, width, longest), float("-inf"))
    places = [0] * batch
    for each, (part, seen) in zip(documents, parts, strict=True):
        place = slice(places[each.row], places[each.row] + part.shape[2])
        if seen is not None:
            mask[each.row, :, each.places, place] = seen[0]
        places[each.row] = place.stop
    return torch.cat([functional.pad(each, (0, 0, 0, longest - each.shape[2])) for each in keys]), mask


def _of_row(row: int, documents: list[_Document], parts: list[tuple[Tensor, Tensor | None]]) -> Iterator[Tensor]:
    return (part for each, (part, _) in zip(documents, parts, strict=True) if each.row == row)
