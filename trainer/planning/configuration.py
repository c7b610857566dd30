"""A configuration, the input of the estimates: a candidate before its memory and speed are known.

A search compares thousands of configurations which differ in a few settings, and most parts of an estimate depend on
fewer. `once` computes a result once for equal arguments, `same_for_all` once for all configurations that differ only in
settings without an effect on it. What changes a constant of the estimates calls `forget` afterwards.
"""

from collections.abc import Callable
from functools import cache, lru_cache, wraps
from operator import attrgetter
from typing import ParamSpec, TypeVar, TypeVarTuple

from msgspec.structs import replace

from shardwise.trainer.spec.job.sections import GaloreJob, LoraJob
from shardwise.trainer.spec.plan import Buckets
from shardwise.trainer.spec.strategy import (
    Attention,
    Checkpointing,
    Fp8Recipe,
    LossHead,
    Method,
    Quant,
    Strategy,
)
from shardwise.trainer.spec.value import Value

SHARDWISE = "shardwise"


class PolicyChoices(Value, frozen=True, kw_only=True, cache_hash=True):
    """Choices beyond the axes, and facts about rows; None: as the reference trainer does."""

    rows_per_example: int = 1  # 2: a micro batch holds pairs of rows, chosen and rejected
    longest_seq: int | None = None  # tokens of the longest row of a micro batch, if rows are padded to it
    # Of packed rows the length of the document that an average token is in; None: a row is one document.
    document_tokens: float | None = None
    residual_bytes: int | None = None  # an element of the residual stream
    adapter_bytes: int | None = None  # an element of an adapter
    reduce_bytes: int | None = None  # an element of a gradient as ranks add it up
    reduces_every_micro_batch: bool | None = None
    flash_generation: int | None = None  # of FlashAttention, under `flash` and `sdpa`
    loops_over_experts: bool = False  # a product for each expert; False: one grouped product for all


class Configuration(Value, frozen=True, kw_only=True):
    """A strategy with everything that decides its memory and its speed for a given model and device."""

    strategy: Strategy
    method: Method
    num_ranks: int
    ranks_per_node: int
    micro_batch: int
    accumulation: int
    seq_len: int
    checkpointing: Checkpointing
    attention: Attention
    loss: LossHead
    checkpoint_every_n: int | None = None
    loss_chunk_tokens: int | None = None
    compile: bool = False
    fused_kernels: bool = False  # Liger's RMSNorm, rotary embedding and SwiGLU, in blocks that run eagerly
    activation_offload: bool = False
    optimizer_in_backward: bool = False
    fp8_recipe: Fp8Recipe | None = None  # of precision fp8
    tf32: bool = False  # of precision fp32: matrix products round their inputs to TF32
    flash_kernel: str | None = None  # of attention flash, from the hub; None: flash-attn
    buckets: Buckets | None = None
    shard_group: int | None = None  # ranks that share one copy of the state under hsdp; None: those of a node
    reduce_every_micro_batch: bool = False  # of FSDP2, with accumulation
    bf16_reduction: bool = False  # of FSDP2: gradients are added up over the ranks in bf16
    embedding_on_host: bool = False  # the frozen table of input embeddings is in host RAM
    prefetch_two_blocks: bool = False  # of FSDP2: two blocks are gathered ahead of the one at work, not one
    fused_adapters: bool = False  # an adapted layer is one autograd function, which adds in place
    compiled_head: bool = False  # torch.compile of the slices of `chunked`, each as long as the others
    lora: LoraJob = LoraJob()
    galore: GaloreJob = GaloreJob()
    router_aux_loss: float | None = None
    quant: Quant = Quant.NF4_DQ
    reference: str = SHARDWISE  # whose software: a row of `policy.reference_trainers`
    policy: PolicyChoices = PolicyChoices()

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.micro_batch * self.policy.rows_per_example * self.seq_len

    @property
    def updates_in_backward(self) -> bool:
        """True if each gradient updates its weight during the backward and is freed at once."""
        if self.optimizer_in_backward or self.strategy.optimizer.facts.updates_in_backward:
            return True
        return self.galore.layerwise and self.method is Method.GALORE

    @property
    def is_exact(self) -> bool:
        return self.strategy.is_exact_with(tf32=self.tf32, optimizer_in_backward=self.optimizer_in_backward)

    @property
    def runs_reference(self) -> bool:
        """True if a step also runs the frozen base: the reference of DPO, with the adapters disabled."""
        return self.policy.rows_per_example == 2 and self.method.freezes_base

    @property
    def has_dropout(self) -> bool:
        """True if the dropout of the model's config is active; DPO disables it."""
        return self.policy.rows_per_example == 1


@cache
def group_sizes(num_ranks: int, ranks_per_node: int) -> tuple[int, ...]:
    """Sizes of the groups of hybrid sharding, the largest first.

    There are two groups or more of two ranks or more, each in one node or over whole nodes; one group is fsdp, groups
    of one rank are ddp.
    """
    return tuple(
        size
        for size in range(num_ranks // 2, 1, -1)
        if num_ranks % size == 0 and (ranks_per_node % size == 0 or size % ranks_per_node == 0)
    )


_MOST_RESULTS = 512  # of a function; a search needs as many, and a stream of cases no more memory with each

_Arguments = ParamSpec("_Arguments")
_Others = TypeVarTuple("_Others")
_Result = TypeVar("_Result")

_forgets: list[Callable[[], None]] = []


def once(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The function, computed once for equal arguments; all are hashable."""
    computed = lru_cache(maxsize=_MOST_RESULTS)(function)
    _forgets.append(computed.cache_clear)
    return computed  # type: ignore[return-value]  # typeshed: any hashable arguments


def same_for_all(
    *reads: str, **settings: object
) -> Callable[[Callable[[Configuration, *_Others], _Result]], Callable[[Configuration, *_Others], _Result]]:
    """A function of a configuration that does not depend on these settings, called with the given values of them.

    `reads` names what it reads of others, such as `strategy.precision`: all else of the strategy has no effect either.
    `__wrapped__` is the function itself, for the configuration as it is. No result is None.
    """
    partly = {name.partition(".")[0] for name in reads}
    names = [name for name in Configuration.__struct_fields__ if name not in settings and name not in partly]
    values_of = attrgetter(*names, *reads)

    def decorate(
        function: Callable[[Configuration, *_Others], _Result],
    ) -> Callable[[Configuration, *_Others], _Result]:
        known: dict[object, _Result] = {}
        _forgets.append(known.clear)

        @wraps(function)
        def shared(configuration: Configuration, /, *others: *_Others) -> _Result:
            key = (values_of(configuration), others)
            found = known.get(key)
            if found is None:
                if len(known) >= _MOST_RESULTS:
                    known.clear()  # in one piece: threads may search at the same time
                found = known[key] = function(replace(configuration, **settings), *others)
            return found

        return shared

    return decorate


def forget() -> None:
    """Forgets all results."""
    for clear in _forgets:
        clear()
