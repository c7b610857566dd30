"""Published learning rates: a row for each update rule, by method and size, each with its source.

A place to start, not an optimum: published runs differ by a factor of three in either direction. The meaning of a rate
depends on the update that it scales. Every update rule has rows of its own or names the rule that it shares them with:

    AdamW and its 8-bit and paged forms   the size of a weight's step
    Muon                                  the same: its update is scaled to the root mean square of AdamW's
    Lion                                  the same, but every weight makes a whole step: 3 to 10 times smaller
    Adafactor, AdaLomo, LAMB              the step's share of the weight's own root mean square (or norm)
    SGD, LOMO                             multiplies the gradient itself

Rows are ordered by size. Where no rate has been published, the row names what it was derived from.
"""

import math
from typing import NamedTuple


class PublishedRate(NamedTuple):
    """A learning rate for models of at most `max_parameters`, and who trained with it."""

    max_parameters: float
    lr: float
    source: str


class Rates(NamedTuple):
    """The rows of an update rule."""

    from_scratch: tuple[PublishedRate, ...]
    fine_tuning: tuple[PublishedRate, ...]
    adapters: tuple[PublishedRate, ...]


ADAMW = Rates(
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


def _shared(share: float, reason: str) -> Rates:
    """AdamW's rows times `share`, with the reason in front of each source."""
    return Rates(
        *(
            tuple(
                row._replace(lr=two_digits(row.lr * share), source=f"{reason} {row.lr:g}: {row.source}") for row in rows
            )
            for rows in ADAMW
        )
    )


def two_digits(lr: float) -> float:
    return float(f"{lr:.1e}")


def _at_any_size(lr: float, source: str) -> tuple[PublishedRate, ...]:
    return (PublishedRate(math.inf, lr, source),)


MUON = _shared(1, "Muon with an update of AdamW's size (arXiv:2502.16982, sec. 2.2) uses AdamW's")
LION = _shared(1 / 3, "Lion needs 3 to 10 times less than AdamW (arXiv:2302.06675, sec. 5), here a third of")
LION = LION._replace(
    from_scratch=(
        PublishedRate(
            1e6,
            2e-3,
            "a fifth of 1e-2, at which AdamW itself trains 0.1M parameters best (arXiv:2302.06675; measured here)",
        ),
        *LION.from_scratch,
    )
)
_SMALL_AND_RELATIVE = "three times {of}, as AdamW's rates for small models are above those for large ones"
_ADAPTERS_RELATIVE = _at_any_size(
    2e-2, "the share that QLoRA's 2e-4 (arXiv:2305.14314) is of adapter weights, which start at about 1e-2"
)
_T5 = "T5 60M to 11B (arXiv:1910.10683, sec. 3.1.2) and PaLM (arXiv:2204.02311, sec. 5), both with Adafactor"
ADAFACTOR = Rates(
    from_scratch=(
        PublishedRate(20e6, 3e-2, _SMALL_AND_RELATIVE.format(of="T5's 1e-2 (arXiv:1910.10683, sec. 3.1.2)")),
        PublishedRate(math.inf, 1e-2, _T5),
    ),
    fine_tuning=_at_any_size(1e-3, "T5 with Adafactor (arXiv:1910.10683, sec. 3.1.2)"),
    adapters=_ADAPTERS_RELATIVE,
)
ADALOMO = Rates(
    from_scratch=tuple(
        row._replace(source=f"AdaLomo's step is Adafactor's; {row.source}") for row in ADAFACTOR.from_scratch
    ),
    fine_tuning=_at_any_size(5e-4, "its authors' run of Llama 7B (arXiv:2310.10195; OpenLMLab/LOMO, adalomo)"),
    adapters=_ADAPTERS_RELATIVE,
)
LAMB = Rates(
    from_scratch=(
        PublishedRate(20e6, 3e-2, "as Adafactor, whose steps are relative to the weights as well"),
        PublishedRate(math.inf, 5e-3, "BERT-large at its largest batch (arXiv:1904.00962, appendix)"),
    ),
    fine_tuning=_at_any_size(5e-4, "as AdaLomo, whose steps are relative to the weights as well (arXiv:2310.10195)"),
    adapters=_ADAPTERS_RELATIVE,
)
_COMMON_SGD = _at_any_size(1e-1, "a common start for plain SGD; none is published for language models")
SGD = Rates(_COMMON_SGD, _COMMON_SGD, _COMMON_SGD)
LOMO = Rates(
    from_scratch=_COMMON_SGD,
    fine_tuning=_at_any_size(3e-2, "its authors' run of Llama 7B (arXiv:2306.09782; OpenLMLab/LOMO, args_lomo.yaml)"),
    adapters=_COMMON_SGD,
)
