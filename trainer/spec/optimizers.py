"""Optimizers, each as a row of facts: memory, traffic, limits, learning rates. Everything else reads the row.

To add an optimizer: a member with its row here, a builder in `trainer/runtime/optimizers/rules.py`, and the layout of
its state in `trainer/runtime/checkpoint/optimizer_state.py`. A member without a row is an error on import.

The rows stand in the order in which equally fast optimizers are preferred.
"""

from enum import StrEnum

from shardwise.trainer.spec import learning_rates
from shardwise.trainer.spec.learning_rates import Rates
from shardwise.trainer.spec.value import Value, complete


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

    @property
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
    supports_dtensors: bool = True  # bitsandbytes' kernels take plain tensors
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
            rates=learning_rates.ADAMW,
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
            rates=learning_rates.ADAMW,
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
            rates=learning_rates.ADAMW,
        ),
        Optimizer.ADAMW_8BIT: OptimizerFacts(
            state=StateKind.BLOCKWISE_8BIT,
            num_moments=2,
            compatible_state="adamw_8bit",
            passes=3,  # weight read and written, gradient read
            scratch_on_cpu=_ADAMW_8BIT_SCRATCH_ON_CPU,
            is_adamw=True,
            changes_update=False,
            accepts=_PLAIN_TENSORS,
            supports_dtensors=False,
            runs_inside_galore=True,
            runs_inside_foreign_galore=True,
            rates=learning_rates.ADAMW,
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
            rates=learning_rates.ADAMW,
        ),
        Optimizer.LION: OptimizerFacts(
            num_moments=1,
            passes=12,
            scratch=Scratch(in_master_type=2),
            rates=learning_rates.LION,
        ),
        Optimizer.LION_8BIT: OptimizerFacts(
            state=StateKind.BLOCKWISE_8BIT,
            num_moments=1,
            passes=3,
            scratch_on_cpu=_ADAMW_8BIT_SCRATCH_ON_CPU,
            accepts=_PLAIN_TENSORS,
            supports_dtensors=False,
            rates=learning_rates.LION,
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
            rates=learning_rates.LAMB,
        ),
        Optimizer.ADEMAMIX_8BIT: OptimizerFacts(
            state=StateKind.BLOCKWISE_8BIT,
            num_moments=3,  # a fast and a slow mean of gradients, and the squares
            passes=3,
            scratch_on_cpu=Scratch(in_fp32=9, more_in_fp32_if_16_bit=1, in_codes=1),  # both means are there twice
            accepts=_PLAIN_TENSORS,
            supports_dtensors=False,
            rates=learning_rates.ADAMW,  # its authors train with AdamW's (arXiv:2409.03137)
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
            rates=learning_rates.ADAFACTOR,
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
            rates=learning_rates.MUON,
        ),
        Optimizer.LOMO: OptimizerFacts(
            num_moments=0,
            passes=4,
            accepts=(Pieces.WHOLE,),
            updates_in_backward=True,
            trains_adapters=False,
            rates=learning_rates.LOMO,
        ),
        Optimizer.ADALOMO: OptimizerFacts(
            state=StateKind.FACTORED,
            num_moments=1,
            passes=8,
            scratch=Scratch(in_fp32=1),
            accepts=(Pieces.WHOLE,),
            updates_in_backward=True,
            trains_adapters=False,
            rates=learning_rates.ADALOMO,
        ),
        Optimizer.SGD: OptimizerFacts(
            num_moments=0,
            passes=4,
            changes_update=False,  # no `allow` opens it
            is_chosen_by_pin_only=True,
            rates=learning_rates.SGD,
        ),
        Optimizer.DEEPSPEED_CPU_ADAM: OptimizerFacts(
            num_moments=2,
            compatible_state="adamw",
            passes=7,
            is_adamw=True,
            changes_update=False,
            accepts=(),  # nothing that lies on a device
            updates_on_host=True,
            rates=learning_rates.ADAMW,
        ),
    },
    "OPTIMIZERS",
)


def have_same_state(one: Optimizer, other: Optimizer) -> bool:
    """True if both keep the same moments in the same bits and update by the same rule, so that one can resume from
    a checkpoint of the other."""
    shared = one.facts.compatible_state
    return one is other or (shared is not None and shared == other.facts.compatible_state)
