"""The learning rate of a job that sets none: the row of its optimizer, method and size (`trainer.spec.learning_rates`).

DPO's rates are published for AdamW; another optimizer takes the same share of its own fine-tuning rate as AdamW does.
GaLore's rates are its own, whatever optimizer runs inside.
"""

import math
from typing import NamedTuple

from shardwise.trainer.spec.job.sections import Objective
from shardwise.trainer.spec.learning_rates import ADAMW, PublishedRate, Rates, two_digits
from shardwise.trainer.spec.strategy import Method, Optimizer
from shardwise.trainer.spec.units import format_count


class DefaultRate(NamedTuple):
    """A learning rate and the sentence that says where it is from."""

    lr: float
    source: str


_ADAMW_DPO = (
    PublishedRate(3e9, 1e-6, "the default of TRL's DPOConfig"),
    PublishedRate(20e9, 5e-7, "Zephyr 7B (arXiv:2310.16944) and OLMo 7B (arXiv:2402.00838)"),
    PublishedRate(math.inf, 2e-7, "Tulu 3 70B (arXiv:2411.15124)"),
)
_ADAMW_DPO_ADAPTERS = (
    PublishedRate(math.inf, 5e-6, "Zephyr 7B with QLoRA, ten times its full rate (arXiv:2310.16944)"),
)


_GALORE_FROM_SCRATCH = (
    PublishedRate(2e9, 1e-2, "GaLore 60M to 1B (arXiv:2403.03507, app. C)"),
    PublishedRate(math.inf, 5e-3, "GaLore 7B (arXiv:2403.03507, sec. 5.2)"),
)
_GALORE = ADAMW._replace(from_scratch=_GALORE_FROM_SCRATCH)  # whatever runs inside: no rate of theirs is relative


def default_rate(
    *,
    optimizer: Optimizer,
    method: Method,
    is_from_scratch: bool,
    num_parameters: int,
    objective: Objective = Objective.PRETRAIN,
) -> DefaultRate:
    """The rate of the first row that is large enough."""
    rates = _GALORE if method is Method.GALORE else optimizer.facts.rates
    if objective is Objective.DPO:
        row, verb = _dpo_row(rates, num_parameters, freezes_base=method.freezes_base), "DPO"
        verb = f"{verb} of {method} adapters" if method.freezes_base else verb
    elif method.freezes_base:
        row, verb = _large_enough(rates.adapters, num_parameters), f"{method} adapters"
    elif is_from_scratch:
        row, verb = _large_enough(rates.from_scratch, num_parameters), "training from scratch"
    else:
        row, verb = _large_enough(rates.fine_tuning, num_parameters), "fine-tuning"
    return DefaultRate(row.lr, f"{verb} of {format_count(num_parameters)} parameters: {row.source}")


def _large_enough(rows: tuple[PublishedRate, ...], num_parameters: int) -> PublishedRate:
    return next(row for row in rows if num_parameters <= row.max_parameters)


def _dpo_row(rates: Rates, num_parameters: int, *, freezes_base: bool) -> PublishedRate:
    published = _large_enough(_ADAMW_DPO_ADAPTERS if freezes_base else _ADAMW_DPO, num_parameters)
    own, adamw = (
        _large_enough(each.adapters if freezes_base else each.fine_tuning, num_parameters) for each in (rates, ADAMW)
    )
    if own.lr == adamw.lr:
        return published
    words = f"as AdamW's {published.lr:g} is of its fine-tuning rate {adamw.lr:g}: {published.source}"
    return published._replace(lr=two_digits(own.lr * published.lr / adamw.lr), source=words)


def shares_rate(optimizer: Optimizer, other: Optimizer) -> bool:
    """True if a rate means the same to both, so that a run may change from one to the other."""
    return optimizer.facts.rates is other.facts.rates
