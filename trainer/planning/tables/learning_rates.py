"""The learning rate of a job that leaves it open: by optimizer, method and size, each row with where it is published.

A place to start, not an optimum: published runs differ by three in either direction. What a rate means depends on the
update it scales, so every optimizer has rows of its own or says whose it shares:

    AdamW and its 8-bit and paged forms   the size of a weight's step
    Muon                                  the same: its update is scaled to the root mean square of AdamW's
    Lion                                  the same, but every weight makes a whole step: 3 to 10 times smaller
    Adafactor, AdaLomo, LAMB              the step's share of the weight's own root mean square (or norm)
    SGD, LOMO                             multiplies the gradient itself

Rows are ordered by size; where nobody publishes, the row says what it was derived from. DPO's rates are published for
AdamW; another optimizer takes the same share of its own fine-tuning rate as AdamW does.
"""

import math
from typing import NamedTuple

from trainer.spec.job.sections import Objective
from trainer.spec.strategy import Method, Optimizer
from trainer.spec.units import format_count


class PublishedRate(NamedTuple):
    """A learning rate for models of at most `max_parameters`, and who trained with it."""

    max_parameters: float
    lr: float
    source: str


class DefaultRate(NamedTuple):
    """A learning rate and the sentence that says where it is from."""

    lr: float
    source: str


class _Rates(NamedTuple):
    """The rows of an update rule."""

    from_scratch: tuple[PublishedRate, ...]
    fine_tuning: tuple[PublishedRate, ...]
    adapters: tuple[PublishedRate, ...]


_ADAMW = _Rates(
    from_scratch=(
        PublishedRate(20e6, 2e-3, "a step above Pythia 70M's 1e-3 (arXiv:2304.01373), as rates fall with size"),
        PublishedRate(100e6, 1e-3, "Pythia 70M (arXiv:2304.01373)"),
        PublishedRate(350e6, 6e-4, "GPT-3 125M and Pythia 160M (arXiv:2005.14165, table 2.1; arXiv:2304.01373)"),
        PublishedRate(3e9, 4e-4, "TinyLlama 1.1B (arXiv:2401.02385, sec. 2.3)"),
        PublishedRate(20e9, 3e-4, "Llama 2 7B and 13B (arXiv:2307.09288, table 1)"),
        PublishedRate(math.inf, 1.5e-4, "Llama 2 70B (arXiv:2307.09288, table 1)"),
    ),
    fine_tuning=(
        PublishedRate(3e9, 5e-5, "the default of transformers' TrainingArguments"),
        PublishedRate(10e9, 2e-5, "Llama 2 chat (arXiv:2307.09288, sec. 3.1) and Stanford Alpaca 7B"),
        PublishedRate(math.inf, 1e-5, "Stanford Alpaca 13B"),
    ),
    adapters=(
        PublishedRate(15e9, 2e-4, "QLoRA 7B and 13B (arXiv:2305.14314, app. B.2)"),
        PublishedRate(math.inf, 1e-4, "QLoRA 33B and 65B (arXiv:2305.14314, app. B.2)"),
    ),
)

_ADAMW_DPO = (
    PublishedRate(3e9, 1e-6, "the default of TRL's DPOConfig"),
    PublishedRate(20e9, 5e-7, "Zephyr 7B (arXiv:2310.16944) and OLMo 7B (arXiv:2402.00838)"),
    PublishedRate(math.inf, 2e-7, "Tulu 3 70B (arXiv:2411.15124)"),
)
_ADAMW_DPO_ADAPTERS = (
    PublishedRate(math.inf, 5e-6, "Zephyr 7B with QLoRA, ten times its full rate (arXiv:2310.16944)"),
)


def _shared(share: float, words: str) -> _Rates:
    """AdamW's rows times `share`, with the reason in front of each source."""
    return _Rates(
        *(
            tuple(
                row._replace(lr=_two_digits(row.lr * share), source=f"{words} {row.lr:g}: {row.source}") for row in rows
            )
            for rows in _ADAMW
        )
    )


def _two_digits(lr: float) -> float:
    return float(f"{lr:.1e}")


def _at_any_size(lr: float, source: str) -> tuple[PublishedRate, ...]:
    return (PublishedRate(math.inf, lr, source),)


_MUON = _shared(1, "Muon with an update of AdamW's size (arXiv:2502.16982, sec. 2.2) takes AdamW's")
_LION = _shared(1 / 3, "Lion takes 3 to 10 times less than AdamW (arXiv:2302.06675, sec. 5), here a third of")
_LION = _LION._replace(
    from_scratch=(
        PublishedRate(
            1e6,
            2e-3,
            "a fifth of 1e-2, at which AdamW itself trains 0.1M parameters best (arXiv:2302.06675; measured here)",
        ),
        *_LION.from_scratch,
    )
)
_SMALL_AND_RELATIVE = "three times {of}, as AdamW's rates for small models are above those for large ones"
_ADAPTERS_RELATIVE = _at_any_size(
    2e-2, "the share that QLoRA's 2e-4 (arXiv:2305.14314) is of adapter weights, which start at about 1e-2"
)
_T5 = "T5 60M to 11B (arXiv:1910.10683, sec. 3.1.2) and PaLM (arXiv:2204.02311, sec. 5), both with Adafactor"
_ADAFACTOR = _Rates(
    from_scratch=(
        PublishedRate(20e6, 3e-2, _SMALL_AND_RELATIVE.format(of="T5's 1e-2 (arXiv:1910.10683, sec. 3.1.2)")),
        PublishedRate(math.inf, 1e-2, _T5),
    ),
    fine_tuning=_at_any_size(1e-3, "T5 with Adafactor (arXiv:1910.10683, sec. 3.1.2)"),
    adapters=_ADAPTERS_RELATIVE,
)
_ADALOMO = _Rates(
    from_scratch=tuple(
        row._replace(source=f"AdaLomo's step is Adafactor's; {row.source}") for row in _ADAFACTOR.from_scratch
    ),
    fine_tuning=_at_any_size(5e-4, "its authors' run of Llama 7B (arXiv:2310.10195; OpenLMLab/LOMO, adalomo)"),
    adapters=_ADAPTERS_RELATIVE,
)
_LAMB = _Rates(
    from_scratch=(
        PublishedRate(20e6, 3e-2, "as Adafactor, whose steps are relative to the weights as well"),
        PublishedRate(math.inf, 5e-3, "BERT-large at its largest batch (arXiv:1904.00962, appendix)"),
    ),
    fine_tuning=_at_any_size(5e-4, "as AdaLomo, whose steps are relative to the weights as well (arXiv:2310.10195)"),
    adapters=_ADAPTERS_RELATIVE,
)
_COMMON_SGD = _at_any_size(1e-1, "a common start for plain SGD; nobody publishes one for language models")
_SGD = _Rates(_COMMON_SGD, _COMMON_SGD, _COMMON_SGD)
_LOMO = _Rates(
    from_scratch=_COMMON_SGD,
    fine_tuning=_at_any_size(3e-2, "its authors' run of Llama 7B (arXiv:2306.09782; OpenLMLab/LOMO, args_lomo.yaml)"),
    adapters=_COMMON_SGD,
)
_GALORE_FROM_SCRATCH = (
    PublishedRate(2e9, 1e-2, "GaLore 60M to 1B (arXiv:2403.03507, app. C)"),
    PublishedRate(math.inf, 5e-3, "GaLore 7B (arXiv:2403.03507, sec. 5.2)"),
)
_GALORE = _ADAMW._replace(from_scratch=_GALORE_FROM_SCRATCH)  # whatever runs inside: no rate of theirs is relative

_RATES: dict[Optimizer, _Rates] = {
    Optimizer.ADAMW: _ADAMW,
    Optimizer.ADAMW_FUSED: _ADAMW,
    Optimizer.ADAMW_8BIT: _ADAMW,
    Optimizer.PAGED_ADAMW: _ADAMW,
    Optimizer.PAGED_ADAMW_8BIT: _ADAMW,
    Optimizer.DEEPSPEED_CPU_ADAM: _ADAMW,
    Optimizer.LION: _LION,
    Optimizer.LION_8BIT: _LION,
    Optimizer.LAMB_8BIT: _LAMB,
    Optimizer.ADAFACTOR: _ADAFACTOR,
    Optimizer.MUON: _MUON,
    Optimizer.LOMO: _LOMO,
    Optimizer.ADALOMO: _ADALOMO,
    Optimizer.SGD: _SGD,
}


def default_rate(
    *,
    optimizer: Optimizer,
    method: Method,
    is_from_scratch: bool,
    num_parameters: int,
    objective: Objective = Objective.PRETRAIN,
) -> DefaultRate:
    """The rate of the first row that is large enough."""
    rates = _GALORE if method is Method.GALORE else _RATES[optimizer]
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


def _dpo_row(rates: _Rates, num_parameters: int, *, freezes_base: bool) -> PublishedRate:
    published = _large_enough(_ADAMW_DPO_ADAPTERS if freezes_base else _ADAMW_DPO, num_parameters)
    own, adamw = (
        _large_enough(each.adapters if freezes_base else each.fine_tuning, num_parameters) for each in (rates, _ADAMW)
    )
    if own.lr == adamw.lr:
        return published
    words = f"as AdamW's {published.lr:g} is of its fine-tuning rate {adamw.lr:g}: {published.source}"
    return published._replace(lr=_two_digits(own.lr * published.lr / adamw.lr), source=words)


def shares_rate(optimizer: Optimizer, other: Optimizer) -> bool:
    """Whether a rate means the same to both, so that a run may go over from one to the other."""
    return _RATES[optimizer] is _RATES[other]
