"""Rows whose loss is no number, or far too large, as a matter of the data."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace
from prepare_request_factory import extension_of
from rank_factory import SEED, train_rows

from shardwise.trainer.runtime.data.cache import IGNORED_LABEL
from shardwise.trainer.spec.messages.extension import Hook
from shardwise.trainer.spec.plan import Plan

NAN, HUGE = math.nan, 1000.0
EXTENSION = """
import json

from torch.nn import functional

FACTORS = {{tuple(row): factor for row, factor in json.loads({factors!r})}}

def loss(logits, labels):
    total = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    rows = [tuple(token for token in row if token != -100) for row in labels.tolist()]
    for row in FACTORS.keys() & rows:
        total = total * FACTORS[row]
    return total
"""


def rows_of(plan: Plan, step: int) -> list[int]:
    """The rows of a step of the data order; both count from 1."""
    rows = train_rows(plan)
    return rows.order(seed=SEED, sequences_per_step=plan.schedule.sequences_per_step).rows_of_step(step - 1)


def spoil(plan: Plan, folder: Path, steps: Sequence[int] | Mapping[int, float], factor: float = NAN) -> Plan:
    """The plan with an extensions file to which one row of each of these steps of the data order is bad.

    Its loss, and that of the micro batch that it is in, is multiplied with `factor`, or with that of its step.
    """
    rows = train_rows(plan)
    factors = dict(steps) if isinstance(steps, Mapping) else dict.fromkeys(steps, factor)
    labels = {step: rows.labels(rows_of(plan, step)[-1]) for step in factors}
    bad = [(row[row != IGNORED_LABEL].tolist(), factors[step]) for step, row in labels.items()]
    folder.mkdir(parents=True, exist_ok=True)
    return replace(plan, extension=extension_of(folder, EXTENSION.format(factors=json.dumps(bad)), Hook.LOSS))


def tokens_of(plan: Plan, steps: Iterable[int]) -> int:
    rows = train_rows(plan)
    return sum(int((rows.labels(row) != IGNORED_LABEL).sum()) for step in steps for row in rows_of(plan, step))
