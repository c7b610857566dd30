"""Spares transformers a question to the device in every forward: whether rows hold several documents.

Where it is given no mask, it looks for the answer in the positions (`find_packed_sequence_indices`), and Python reads
it: the host waits until the device has done all that it was given, and only then goes on giving it work, in each micro
batch and for each kind of mask that a model has. The data knows: a micro batch without positions of its own holds one
document a row (data.py), and one with them holds several in some row.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import masking_utils


@contextmanager
def known_rows(*, are_packed: bool) -> Iterator[None]:
    """Runs the block with the answer that is known (W57)."""
    look = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _document_numbers if are_packed else _none_is_packed
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = look


def _none_is_packed(position_ids: Tensor) -> Tensor | None:
    del position_ids  # which are those that the model counted itself
    return None


def _document_numbers(position_ids: Tensor) -> Tensor:
    """The document of each token of its row, [B, S], from 0: what transformers makes of positions [B, S]."""
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
