"""What a step has to do, counted: FLOPs, bytes through the device's memory, operators the host starts.

`elementwise_bytes` are counted from the kernels that run: RMSNorm as transformers writes it is a chain of fp32
kernels, 36 B an element; a residual addition 6; rotary embedding 20; SwiGLU 10; an fp32 adapter on a 16-bit layer
23 B an input and 12 B an output. Fused kernels (they come with a fused loss, or with torch.compile) do 4, 6, 4 and 6.
Nothing here is fitted.
"""

from trainer.planning.memory.recipe import Dims, adapted_linears
from trainer.planning.setting import Setting
from trainer.spec.strategy import Checkpointing, LossHead, Method, Optimizer, Sharding

# Bytes of a logit through memory in forward and backward; chunked computes its slices twice in plain torch.
LOGIT_BYTES = {LossHead.EAGER: 40, LossHead.CHUNKED: 64, LossHead.FUSED: 14, LossHead.FUSED_LINEAR: 10}
# State elements read and written per parameter of a step.
OPTIMIZER_PASSES = {
    Optimizer.ADAMW: 21,
    Optimizer.ADAMW_FUSED: 7,
    Optimizer.PAGED_ADAMW: 7,
    Optimizer.ADAFACTOR: 12,
    Optimizer.LION: 12,
    Optimizer.SGD: 4,
    Optimizer.LOMO: 4,
}
_EIGHT_BIT = (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT, Optimizer.LION_8BIT, Optimizer.LAMB_8BIT)


def recomputation(setting: Setting) -> float:
    """How much of a block's forward runs again in its backward."""
    checkpointing = setting.checkpointing
    if checkpointing is Checkpointing.EVERY_N:
        return 1 / (setting.checkpoint_every_n or 1)
    return {Checkpointing.NONE: 0.0, Checkpointing.SELECTIVE: 0.5, Checkpointing.ATTENTION: 0.1}.get(checkpointing, 1.0)


def has_fused_kernels(setting: Setting) -> bool:
    """Whether norms and rotary embeddings are one kernel each."""
    return setting.compile or setting.loss in (LossHead.FUSED, LossHead.FUSED_LINEAR)


def adapters(setting: Setting, dims: Dims) -> tuple[tuple[str, int, int], ...]:
    """The linear layers of a block with an adapter; none for methods without."""
    return adapted_linears(setting, dims) if setting.method.freezes_base else ()


def elementwise_bytes(setting: Setting, dims: Dims, compute_bytes: int) -> float:
    """Bytes that one token moves outside matrix products in one forward of one block."""
    is_fused = has_fused_kernels(setting)
    norm, rope = (4, 4) if is_fused else (36, 20)
    activation = (6 if is_fused else 10) if dims.is_gated else 4
    # A fused loss brings fused norms, not fused adapters; NF4 kernels and the compiler do.
    per_input, per_output = (4, 8) if is_fused and (setting.compile or setting.method is Method.QLORA) else (23, 12)
    adapted = sum(per_input * i + per_output * o for _, i, o in adapters(setting, dims))
    moved = 2 * (norm + 6) * dims.hidden + rope * (dims.query + dims.kv) + 4 * (dims.query + dims.kv)
    return compute_bytes / 2 * (moved + activation * dims.ffn) + adapted


def operators(setting: Setting, dims: Dims) -> int:
    """Operators that the host starts in one forward of one block."""
    per_adapter = 4 if setting.compile else 10
    count = (15 if has_fused_kernels(setting) else 40) + per_adapter * len(adapters(setting, dims))
    if setting.method is Method.QLORA:
        count += (2 if setting.compile else 8) * len(dims.linears)
    return count + (0 if setting.strategy.sharding in (Sharding.NONE, Sharding.DDP) else 20)


def optimizer_bytes_per_parameter(setting: Setting, master_bytes: int) -> float:
    """Bytes through memory for one trained parameter in one step, clipping included."""
    optimizer = setting.strategy.optimizer
    if optimizer in _EIGHT_BIT:
        return 4 + 3 * master_bytes + 6
    return OPTIMIZER_PASSES.get(optimizer, 21) * master_bytes + 6
