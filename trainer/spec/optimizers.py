"""Optimizers, each as a row of facts: memory, traffic, limits, learning rates. Everything else reads the row.

To add an optimizer: a member with its row here, a builder in `trainer/runtime/optimizers/rules.py`, and the layout of
its state in `trainer/runtime/checkpoint/optimizer_state.py`. A member without a row is an error on import. The rows
stand in the order in which equally fast optimizers are preferred.

Published learning rates have a row for each update rule, by method and size, each with its source: a place to start,
not an optimum. Published runs differ by a factor of three in either direction. The meaning of a rate depends on the
update that it scales. Every update rule has rows of its own or names the rule that it shares them with:

    AdamW and its 8-bit and paged forms   the size of a weight's step
    Muon                                  the same: its update is scaled to the root mean square of AdamW's
    Lion                                  the same, but every weight makes a whole step: 3 to 10 times smaller
    Adafactor, AdaLomo, LAMB              the step's share of the weight's own root mean square (or norm)
    SGD, LOMO                             multiplies the gradient itself

Rates are ordered by size. Where no rate has been published, the row names what it was derived from.
"""

import math
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from shardwise.trainer.spec.value import Value, complete


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


ADAMW_RATES = Rates(
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
            for rows in ADAMW_RATES
        )
    )


def two_digits(lr: float) -> float:
    return float(f"{lr:.1e}")


def _at_any_size(lr: float, source: str) -> tuple[PublishedRate, ...]:
    return (PublishedRate(math.inf, lr, source),)


MUON_RATES = _shared(1, "Muon with an update of AdamW's size (arXiv:2502.16982, sec. 2.2) uses AdamW's")
_LION = _shared(1 / 3, "Lion needs 3 to 10 times less than AdamW (arXiv:2302.06675, sec. 5), here a third of")
LION_RATES = _LION._replace(
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
ADAFACTOR_RATES = Rates(
    from_scratch=(
        PublishedRate(20e6, 3e-2, _SMALL_AND_RELATIVE.format(of="T5's 1e-2 (arXiv:1910.10683, sec. 3.1.2)")),
        PublishedRate(math.inf, 1e-2, _T5),
    ),
    fine_tuning=_at_any_size(1e-3, "T5 with Adafactor (arXiv:1910.10683, sec. 3.1.2)"),
    adapters=_ADAPTERS_RELATIVE,
)
ADALOMO_RATES = Rates(
    from_scratch=tuple(
        row._replace(source=f"AdaLomo's step is Adafactor's; {row.source}") for row in ADAFACTOR_RATES.from_scratch
    ),
    fine_tuning=_at_any_size(5e-4, "its authors' run of Llama 7B (arXiv:2310.10195; OpenLMLab/LOMO, adalomo)"),
    adapters=_ADAPTERS_RELATIVE,
)
LAMB_RATES = Rates(
    from_scratch=(
        PublishedRate(20e6, 3e-2, "as Adafactor, whose steps are relative to the weights as well"),
        PublishedRate(math.inf, 5e-3, "BERT-large at its largest batch (arXiv:1904.00962, appendix)"),
    ),
    fine_tuning=_at_any_size(5e-4, "as AdaLomo, whose steps are relative to the weights as well (arXiv:2310.10195)"),
    adapters=_ADAPTERS_RELATIVE,
)
_COMMON_SGD = _at_any_size(1e-1, "a common start for plain SGD; none is published for language models")
SGD_RATES = Rates(_COMMON_SGD, _COMMON_SGD, _COMMON_SGD)
LOMO_RATES = Rates(
    from_scratch=_COMMON_SGD,
    fine_tuning=_at_any_size(3e-2, "its authors' run of Llama 7B (arXiv:2306.09782; OpenLMLab/LOMO, args_lomo.yaml)"),
    adapters=_COMMON_SGD,
)


class Optimizer(StrEnum):
    """The update rule and its implementation."""

    ADAMW = "adamw"  # PyTorch foreach
    ADAMW_FUSED = "adamw_fused"  # PyTorch fused
    ADAMW_8BIT = "adamw_8bit"
    PAGED_ADAMW = "paged_adamw"
    PAGED_ADAMW_8BIT = "paged_adamw_8bit"
    LION = "lion"
    LION_8BIT = "lion_8bit"
    LAMB_8BIT = "lamb_8bit"
    ADEMAMIX_8BIT = "ademamix_8bit"
    ADAFACTOR = "adafactor"
    MUON = "muon"
    LOMO = "lomo"
    ADALOMO = "adalomo"
    SGD = "sgd"
    DEEPSPEED_CPU_ADAM = "deepspeed_cpu_adam"  # under offload to CPU

    @cached_property
    def facts(self) -> "OptimizerFacts":
        """The row of this optimizer."""
        return OPTIMIZERS[self]


class StateKind(StrEnum):
    """Storage of the moments that an optimizer keeps."""

    MASTER = "master"  # one element for each element of the weight, in the type of the master weight
    FP32 = "fp32"  # one fp32 element for each
    BLOCKWISE_8BIT = "blockwise_8bit"  # a byte for each, an fp32 scale for 256; small tensors in fp32 (bitsandbytes)
    FACTORED = "factored"  # fp32 rows and columns of a matrix; a vector in full


class Pieces(StrEnum):
    """The form in which an engine hands weights to the optimizer."""

    WHOLE = "whole"  # every weight as the model has it
    FLAT = "flat"  # plain tensors that join weights and cut them anywhere
    SHARDS = "shards"  # DTensors that hold rows of each weight


class Scratch(Value, frozen=True, kw_only=True):
    """Tensors that a step allocates in addition to weights, gradients and state, each of the size of the largest
    weight."""

    in_master_type: int = 0
    in_fp32: int = 0
    more_in_fp32_if_16_bit: int = 0  # where the weights are 16 bit
    in_codes: int = 0  # of 8-bit state that is coded while the old codes are alive
    is_whole_model: bool = False  # of the size of all weights together

    def num_bytes(self, *, width: int, num_elements: int, largest: int) -> int:
        """Bytes where a master weight has `width`, for `num_elements` whose largest tensor has `largest`."""
        size = num_elements if self.is_whole_model else largest
        num_fp32 = self.in_fp32 + (self.more_in_fp32_if_16_bit if width < 4 else 0)
        return (width * self.in_master_type + 4 * num_fp32 + self.in_codes) * size


class OptimizerFacts(Value, frozen=True, kw_only=True):
    """One row.

    Seconds of an update are counted as reads and writes of device memory: `passes` in the type of the master weight,
    and `state_traffic_bytes` a parameter for 8-bit state.
    """

    # State
    state: StateKind = StateKind.MASTER
    num_moments: int
    num_matrix_moments: int | None = None  # of the matrices of blocks, where they have a rule of their own (Muon)
    is_paged: bool = False  # in CUDA managed memory, which the driver moves to host RAM; opened by offload_cpu
    compatible_state: str | None = None  # optimizers that share this name can resume from each other's checkpoints
    # Work of a step
    passes: int
    scratch: Scratch = Scratch()
    scratch_on_cpu: Scratch | None = None  # None: the same
    matrix_scratch: Scratch | None = None  # of the matrices of blocks, where they have a rule of their own
    fused_form: Optimizer | None = None  # the same update in one kernel
    orthogonalises_matrices: bool = False
    # Limits
    is_adamw: bool = False  # AdamW's mathematics, with any storage of the state
    changes_update: bool = True  # opened by optimizer_approx
    is_chosen_by_pin_only: bool = False
    accepts: tuple[Pieces, ...] = (Pieces.WHOLE, Pieces.FLAT, Pieces.SHARDS)
    needs_whole_matrices: bool = False  # the update of a weight is defined for the matrix as a whole
    needs_whole_tensors: bool = False  # it needs the norm of the whole weight
    supports_dtensors: bool = True  # bitsandbytes' kernels need plain tensors
    updates_in_backward: bool = False  # it is nothing but an update inside the backward pass
    updates_on_host: bool = False  # state and update in host RAM, by a CPU kernel of DeepSpeed
    updates_fsdp_shards_on_host: bool = False  # torch's AdamW, on shards that FSDP2 keeps in host RAM
    trains_adapters: bool = True
    runs_inside_galore: bool = False
    runs_inside_foreign_galore: bool = False  # in other software
    rates: Rates

    @property
    def is_8bit(self) -> bool:
        """True if large tensors have 8-bit state; opened by `allow: [optimizer_8bit]`."""
        return self.state is StateKind.BLOCKWISE_8BIT

    @property
    def is_exact(self) -> bool:
        """True if the mathematics of AdamW is unchanged."""
        return self.is_adamw and not self.is_8bit

    @property
    def state_traffic_bytes(self) -> int:
        """Bytes a parameter for which 8-bit state is read and written; state of other types is among `passes`."""
        return 2 * self.num_moments if self.is_8bit else 0

    @property
    def paged_bytes(self) -> int:
        """Bytes of paged state a parameter."""
        return self.num_moments * (1 if self.is_8bit else 4) if self.is_paged else 0


_ADAMW_8BIT_SCRATCH_ON_CPU = Scratch(in_fp32=5, more_in_fp32_if_16_bit=1)  # moments are read out and written back
_PLAIN_TENSORS = (Pieces.WHOLE, Pieces.FLAT)

OPTIMIZERS: dict[Optimizer, OptimizerFacts] = complete(
    Optimizer,
    {
        Optimizer.ADAMW_FUSED: OptimizerFacts(
            num_moments=2,
            compatible_state="adamw",
            passes=7,  # weight, gradient and two moments read, three of them written
            is_adamw=True,
            changes_update=False,
            updates_fsdp_shards_on_host=True,
            runs_inside_foreign_galore=True,
            rates=ADAMW_RATES,
        ),
        Optimizer.ADAMW: OptimizerFacts(
            num_moments=2,
            compatible_state="adamw",
            passes=21,  # a kernel for each operation of the update rule
            scratch=Scratch(in_master_type=1, is_whole_model=True),  # the root of every second moment at once
            fused_form=Optimizer.ADAMW_FUSED,
            is_adamw=True,
            changes_update=False,
            updates_fsdp_shards_on_host=True,
            runs_inside_galore=True,
            runs_inside_foreign_galore=True,
            rates=ADAMW_RATES,
        ),
        Optimizer.PAGED_ADAMW: OptimizerFacts(
            state=StateKind.FP32,
            num_moments=2,
            is_paged=True,
            compatible_state="adamw",
            passes=7,
            scratch_on_cpu=Scratch(in_fp32=3, more_in_fp32_if_16_bit=1),  # gradient, denominator, update
            is_adamw=True,
            changes_update=False,
            accepts=_PLAIN_TENSORS,
            supports_dtensors=False,
            runs_inside_foreign_galore=True,
            rates=ADAMW_RATES,
        ),
        Optimizer.ADAMW_8BIT: OptimizerFacts(
            state=StateKind.BLOCKWISE_8BIT,
            num_moments=2,
            compatible_state="adamw_8bit",
            passes=3,  # weight read and written, gradient read
            scratch_on_cpu=_ADAMW_8BIT_SCRATCH_ON_CPU,
            is_adamw=True,
            changes_update=False,
            runs_inside_galore=True,
            runs_inside_foreign_galore=True,
            rates=ADAMW_RATES,
        ),
        Optimizer.PAGED_ADAMW_8BIT: OptimizerFacts(
            state=StateKind.BLOCKWISE_8BIT,
            num_moments=2,
            is_paged=True,
            compatible_state="adamw_8bit",
            passes=3,
            scratch_on_cpu=_ADAMW_8BIT_SCRATCH_ON_CPU,
            is_adamw=True,
            changes_update=False,
            accepts=_PLAIN_TENSORS,
            supports_dtensors=False,
            runs_inside_foreign_galore=True,
            rates=ADAMW_RATES,
        ),
        Optimizer.LION: OptimizerFacts(
            num_moments=1,
            passes=12,
            scratch=Scratch(in_master_type=2),
            rates=LION_RATES,
        ),
        Optimizer.LION_8BIT: OptimizerFacts(
            state=StateKind.BLOCKWISE_8BIT,
            num_moments=1,
            passes=3,
            scratch_on_cpu=_ADAMW_8BIT_SCRATCH_ON_CPU,
            accepts=_PLAIN_TENSORS,
            supports_dtensors=False,
            rates=LION_RATES,
        ),
        Optimizer.LAMB_8BIT: OptimizerFacts(
            state=StateKind.BLOCKWISE_8BIT,
            num_moments=2,
            passes=3,
            scratch=Scratch(in_master_type=1),
            scratch_on_cpu=Scratch(in_master_type=1, in_fp32=5, more_in_fp32_if_16_bit=1),
            accepts=(Pieces.WHOLE,),
            supports_dtensors=False,
            needs_whole_tensors=True,
            rates=LAMB_RATES,
        ),
        Optimizer.ADEMAMIX_8BIT: OptimizerFacts(
            state=StateKind.BLOCKWISE_8BIT,
            num_moments=3,  # a fast and a slow mean of gradients, and the squares
            passes=3,
            scratch_on_cpu=Scratch(in_fp32=9, more_in_fp32_if_16_bit=1, in_codes=1),  # both means are there twice
            accepts=_PLAIN_TENSORS,
            supports_dtensors=False,
            rates=ADAMW_RATES,  # its authors train with AdamW's (arXiv:2409.03137)
        ),
        Optimizer.ADAFACTOR: OptimizerFacts(
            state=StateKind.FACTORED,
            num_moments=1,
            passes=12,
            # The update and its square; of 16-bit weights also the weight and its gradient.
            scratch=Scratch(in_fp32=2, more_in_fp32_if_16_bit=2),
            accepts=(Pieces.WHOLE,),
            needs_whole_matrices=True,
            runs_inside_galore=True,
            runs_inside_foreign_galore=True,
            rates=ADAFACTOR_RATES,
        ),
        Optimizer.MUON: OptimizerFacts(
            num_moments=2,  # AdamW's, outside the matrices of blocks
            num_matrix_moments=1,
            passes=9,
            scratch=Scratch(in_master_type=1, is_whole_model=True),  # of foreach AdamW
            matrix_scratch=Scratch(in_fp32=3),
            orthogonalises_matrices=True,
            accepts=(Pieces.WHOLE,),
            needs_whole_matrices=True,
            trains_adapters=False,
            rates=MUON_RATES,
        ),
        Optimizer.LOMO: OptimizerFacts(
            num_moments=0,
            passes=4,
            accepts=(Pieces.WHOLE,),
            updates_in_backward=True,
            trains_adapters=False,
            rates=LOMO_RATES,
        ),
        Optimizer.ADALOMO: OptimizerFacts(
            state=StateKind.FACTORED,
            num_moments=1,
            passes=8,
            scratch=Scratch(in_fp32=1),
            accepts=(Pieces.WHOLE,),
            updates_in_backward=True,
            trains_adapters=False,
            rates=ADALOMO_RATES,
        ),
        Optimizer.SGD: OptimizerFacts(
            num_moments=0,
            passes=4,
            changes_update=False,  # no `allow` opens it
            is_chosen_by_pin_only=True,
            rates=SGD_RATES,
        ),
        Optimizer.DEEPSPEED_CPU_ADAM: OptimizerFacts(
            num_moments=2,
            compatible_state="adamw",
            passes=7,
            is_adamw=True,
            changes_update=False,
            accepts=(),  # nothing that lies on a device
            updates_on_host=True,
            rates=ADAMW_RATES,
        ),
    },
    "OPTIMIZERS",
)


def have_same_state(one: Optimizer, other: Optimizer) -> bool:
    """True if both keep the same moments in the same bits and update by the same rule, so that one can resume from
    a checkpoint of the other."""
    shared = one.facts.compatible_state
    return one is other or (shared is not None and shared == other.facts.compatible_state)
