"""What DPO compares the model with: how likely the reference finds each answer, by the same forward.

    lora, qlora    the model itself with its adapters switched off, inside each step: no memory, one more forward
    full, galore   the model as it was before step 1: every row is asked once, then the numbers are looked up

The numbers stand in `reference.safetensors` in the run directory, 16 bytes a row, so that a resumed run reads what it
could not compute again with changed weights. A row is known by a hash of its tokens and of which of them are learned,
whatever its padding, its place in the data, or the engine. `fingerprint` in the file's metadata is of the data and of
the weights that were started from. Every row of both splits is asked, also where the run takes fewer steps.

The reference has no dropout, no noise on its embeddings and no gradient.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor, nn

from trainer.runtime.checkpoint import Ranks
from trainer.runtime.checkpoint.agreement import on_first
from trainer.runtime.data.batches import MicroBatch
from trainer.runtime.loop.checkpoint_facts import base_fingerprint
from trainer.runtime.loop.step import forward
from trainer.runtime.loss.head import IGNORED, Answer
from trainer.runtime.models.adapters import adapters_off
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError, InputError
from trainer.spec.plan import Plan

REFERENCE_NAME = "reference.safetensors"
_FORMAT = "1"


def plain_base(model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Tensor:
    """Log-probabilities [B] of a model's rows with its adapters switched off; through the engine, which may gather."""
    with adapters_off(model):
        return as_it_is(model, micro_batch, device)


def as_it_is(model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Tensor:
    """Log-probabilities [B] of a model's rows, without dropout or gradient."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        found = forward(model, micro_batch, device, answer=Answer.ROWS)
    model.train(was_training)
    return found


def no_reference(_model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Tensor:
    """Zeros [B], for steps whose time or memory is measured: theirs are those of looking the numbers up."""
    return torch.zeros(len(micro_batch.labels), dtype=torch.float64, device=device)


class RowLogps:
    """Log-probabilities by row; a reference for DPO."""

    def __init__(self, keys: NDArray[np.uint64], logps: NDArray[np.float64]) -> None:
        self.keys, places = np.unique(keys, return_index=True)  # ascending
        self.logps = logps[places]

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Tensor:
        """Those of a micro batch, [B]; 0 for a row without a target."""
        keys = row_keys(micro_batch)
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        is_asked = keys != 0
        if (self.keys[places] != keys)[is_asked].any():
            raise EnvironmentFaultError(
                f"{REFERENCE_NAME}: does not hold every row of this step; the data has changed since it was written: "
                "undo the change, or start a new run without --resume"
            )
        found = torch.from_numpy(np.where(is_asked, self.logps[places], 0.0))
        return found.to(device, non_blocking=True)


def row_keys(micro_batch: MicroBatch) -> NDArray[np.uint64]:
    """Hashes [B] of the rows up to their last target; 0 for a row without one."""
    keys = np.zeros(len(micro_batch.labels), np.uint64)
    for place, (ids, labels) in enumerate(zip(micro_batch.input_ids.numpy(), micro_batch.labels.numpy(), strict=True)):
        targets = np.flatnonzero(labels[1:] != IGNORED)
        if len(targets):
            end = targets[-1] + 2
            digest = hashlib.blake2b(ids[:end].tobytes(), digest_size=8)
            digest.update(labels[:end].tobytes())
            keys[place] = int.from_bytes(digest.digest(), "little") or 1
    return keys


def ask_rows(
    model: nn.Module,
    micro_batches: Iterable[MicroBatch],
    device: torch.device,
    ranks: Ranks,
    *,
    goes_on: Callable[[], bool] = lambda: True,
) -> RowLogps | None:
    """What the model says of all rows, on every rank; each rank runs its own micro batches, as many as the others.

    Collective. None where `goes_on`, asked before each micro batch, said no. InputError for a number that is none.
    """
    keys, logps = [], []
    for micro_batch in micro_batches:
        if not goes_on():
            return None
        keys.append(row_keys(micro_batch))
        logps.append(as_it_is(model, micro_batch, device).cpu().numpy())
    own_keys, own_logps = np.concatenate(keys), np.concatenate(logps)
    is_row = own_keys != 0
    all_keys = b"".join(ranks.exchange(own_keys[is_row].tobytes()))
    all_logps = b"".join(ranks.exchange(own_logps[is_row].tobytes()))
    table = RowLogps(np.frombuffer(all_keys, np.uint64), np.frombuffer(all_logps, np.float64))
    if not np.isfinite(table.logps).all():
        raise InputError("train.objective: dpo: the model to start from gives rows a log-probability that is no number")
    return table


def reference_fingerprint(plan: Plan) -> str:
    """Of the data and of the weights to start from."""
    return hashlib.sha256(f"{plan.data.fingerprint} {base_fingerprint(plan)}".encode()).hexdigest()[:32]


def write_reference(path: Path, table: RowLogps, *, fingerprint: str, ranks: Ranks) -> None:
    """Writes the table on rank 0, whole or not at all."""

    def write() -> bytes:
        metadata = {"format": _FORMAT, "fingerprint": fingerprint}
        codec.write_bytes(path, save({"keys": table.keys, "logps": table.logps}, metadata))
        return b""

    on_first(ranks, write, doing="the reference's log-probabilities were not saved")


def read_reference(path: Path, *, fingerprint: str, ranks: Ranks) -> RowLogps | None:
    """The table in a file that rank 0 reads for all; None where there is none.

    InputError where it is of other data or other weights, or damaged.
    """

    def read() -> bytes:
        return path.read_bytes() if path.exists() else b""

    content = on_first(ranks, read, doing="the reference's log-probabilities cannot be read")
    if not content:
        return None
    try:
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        found, table = header["__metadata__"]["fingerprint"], RowLogps(tensors["keys"], tensors["logps"])
    except (SafetensorError, ValueError, KeyError, IndexError) as error:
        raise InputError(f"{path}: is damaged ({error}); start a new run without --resume") from error
    if found != fingerprint:
        raise InputError(
            f"{path}: was made from other data or another model (fingerprint {found[:12]}, this job has "
            f"{fingerprint[:12]});\nundo the change, or start a new run without --resume"
        )
    return table
