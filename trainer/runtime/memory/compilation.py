"""torch.compile, block by block: one compilation serves all blocks that are alike.

Blocks are compiled in place, after checkpointing and before an engine wraps the model: recomputation is traced with the
block, and the engine's hooks around a block stay outside of it. When the width of the rows changes, torch compiles a
second time, for any width.

torch stops compiling a function that it had to recompile too often, and runs it uncompiled without an error; a failure
to compile raises inside the forward. Where the job pins compilation both are errors. Where the planner chose it the
blocks run eagerly from then on, no step is lost, and the report has an incident.

Blocks that are not compiled can run Liger's kernels for RMSNorm, rotary embedding and SwiGLU (`fuse_kernels`). They
replace the forward of a norm or an MLP, whose weights, names and hooks stay as they are. Before the first step each
kernel runs once on the device and is compared with plain torch, forward and backward; if it fails to compile or gives
another result, the blocks stay plain: an error if the job pins the kernels, else an incident.
"""

import importlib.util
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.trainer.runtime.memory.activation_offload import ActivationOffload
from shardwise.trainer.runtime.memory.recomputation import blocks_of
from shardwise.trainer.runtime.run.operators import KernelFallback, check_triton_compiler
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.packages import extra_line

_SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")


def compile_blocks(
    model: PreTrainedModel, offload: ActivationOffload | None = None, *, is_pinned: bool = True
) -> "Compilation":
    """Compiles every block by itself, at its first forward.

    Without blocks, or without a compiler: InputError or EnvironmentFaultError if `is_pinned`, else nothing is compiled.
    """
    blocks = blocks_of(model)
    try:
        if not blocks:
            raise InputError(f"pin.compile: {type(model).__name__} has no blocks that can be compiled")
        check_compiler("pin.compile")
    except (InputError, EnvironmentFaultError) as error:
        if is_pinned:
            raise
        return Compilation(0, {}, EagerFallback(str(error).splitlines()[0]))
    import torch._dynamo  # after the check: it takes seconds
    import torch._functorch.config

    torch._dynamo.config.fail_on_recompile_limit_hit = True
    fallback = None if is_pinned else EagerFallback()
    if fallback is not None:
        torch._functorch.config.force_non_lazy_backward_lowering = True  # no failure is left for the backward
    for block in blocks:
        block.compile()
        if fallback is not None:
            compiled: Any = block._compiled_call_impl
            block._compiled_call_impl = partial(fallback.run, block, compiled)
    if offload is not None:
        offload.exclude_from_compilation()
    return Compilation(num_graphs(), _breaks(), fallback)


class EagerFallback:
    """Runs blocks compiled until one fails to compile, and eagerly from then on."""

    def __init__(self, problem: str | None = None) -> None:
        self.problem = problem  # why blocks run eagerly
        self.has_failed = False  # a block failed to compile; False if compilation was not begun

    def run(self, block: nn.Module, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """The block's output, computed again from its inputs if one of its graphs fails to compile."""
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        if self.problem is None:
            try:
                return compiled(*args, **kwargs)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                first, second, *_ = (*filter(None, map(str.strip, str(error).splitlines())), "", "")
                self.problem = f"{type(error).__name__}: {first} {second}".strip()
                self.has_failed = True
        return block._call_impl(*args, **kwargs)


def without_compilation(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Runs compiled blocks eagerly: generation lengthens its rows token by token, and each would be compiled."""
    if all(block._compiled_call_impl is None for block in blocks_of(model)):
        return nullcontext()
    eager: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return eager


class Compilation(NamedTuple):
    """The compiler's counters in this process before the blocks of a model were compiled."""

    num_graphs: int
    earlier_breaks: Mapping[str, int]  # by their reason
    fallback: EagerFallback | None = None

    @property
    def problem(self) -> str | None:
        """Why the blocks run eagerly, or None if they run compiled."""
        return None if self.fallback is None else self.fallback.problem

    @property
    def failure(self) -> str | None:
        """`problem` if it is a failure of the compiler, which the next run would have as well."""
        return self.problem if self.fallback is not None and self.fallback.has_failed else None

    def facts(self, model: nn.Module, *, in_head: int = 0) -> dict[str, str]:
        """Text of what has been compiled since; `in_head` graphs are of the loss head."""
        if self.problem is not None:
            return {"compile": f"no block, {self.problem}"}
        blocks = blocks_of(model)
        num_compiled = sum(block._compiled_call_impl is not None for block in blocks)
        graphs, breaks = num_graphs() - self.num_graphs - in_head, sum(self.breaks().values())
        return {"compile": f"{num_compiled} of {len(blocks)} blocks, as {graphs} graphs with {breaks} breaks"}

    def breaks(self) -> dict[str, int]:
        """Graph breaks since, by the first line of their reason."""
        found: Counter[str] = Counter()
        for reason, count in _breaks().items():
            if count > self.earlier_breaks.get(reason, 0):
                found[reason.strip().partition("\n")[0]] += count - self.earlier_breaks.get(reason, 0)
        return dict(found.most_common())


class Kernels(NamedTuple):
    """Fused operations on tensors, with their gradients."""

    norm: Callable[[Tensor, Tensor, float], Tensor]  # [..., H], weight [H], epsilon
    gate: Callable[[Tensor, Tensor], Tensor]  # silu(gate) * up
    rotate: Callable[..., tuple[Tensor, Tensor]]  # query [B, heads, S, D], key, cosine [B, S, D], sine; in place


class FusedKernels(NamedTuple):
    """Modules of a model that run fused kernels, or why none does."""

    num_norms: int = 0
    num_gates: int = 0
    problem: str | None = None

    def facts(self, model: nn.Module) -> dict[str, str]:
        """Text of what the model runs by now."""
        if self.problem is not None:
            return {"fused_kernels": f"none, {self.problem}"}
        found = fused_modules(model)
        rotary = " and the rotary embedding" if found.is_rotary else ""
        return {"fused_kernels": f"{found.num_norms} norms, {found.num_gates} gated MLPs{rotary}"}

    def run_in(self, model: nn.Module) -> bool:
        """True if every replaced module of the model runs its kernel, or if none can and the report has the reason."""
        return self.problem is not None or fused_modules(model) == (self.num_norms, self.num_gates, True)


class FusedModules(NamedTuple):
    """What runs fused kernels in a model."""

    num_norms: int
    num_gates: int
    is_rotary: bool


def fused_modules(model: nn.Module) -> FusedModules:
    """Counted in the model itself."""
    kernels = [(_kernel_of(vars(module).get("forward")), type(module).__module__) for module in model.modules()]
    files = {file for kernel, file in kernels if kernel is _run_norm}
    rotations = [_kernel_of(getattr(sys.modules.get(file), "apply_rotary_pos_emb", None)) for file in files]
    ran = [kernel for kernel, _ in kernels]
    return FusedModules(ran.count(_run_norm), ran.count(_run_gated), _rotate in rotations)


def _kernel_of(forward: object) -> object:
    return forward.func if isinstance(forward, partial) else None


def fuse_kernels(model: PreTrainedModel, kernels: Kernels | None = None, *, is_pinned: bool = True) -> FusedKernels:
    """Runs the norms, MLPs and rotary embedding of a Llama, Mistral or Qwen 2 by `kernels`, by default Liger's.

    If they cannot run, InputError or EnvironmentFaultError if `is_pinned`, else nothing is replaced.
    """
    try:
        kernels = kernels or _liger_kernels()
        fallback = KernelFallback("pin.fused_kernels", is_pinned=is_pinned)
        problem = fallback.run(_difference, lambda *_: fallback.problem, kernels, model.config)
        if problem is not None:
            raise EnvironmentFaultError(f"pin.fused_kernels: {problem}; set pin.fused_kernels=false")
    except (InputError, EnvironmentFaultError) as error:
        if is_pinned:
            raise
        return FusedKernels(problem=str(error).splitlines()[0])
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    gated = [module for module in model.modules() if hasattr(module, "gate_proj") and hasattr(module, "down_proj")]
    for norm in norms:
        norm.forward = partial(_run_norm, norm, kernels)
    for mlp in gated:
        mlp.forward = partial(_run_gated, mlp, kernels)
    modeling: Any = sys.modules[type(norms[0]).__module__]
    modeling.apply_rotary_pos_emb = partial(_rotate, kernels, modeling.apply_rotary_pos_emb, _device().type)
    return FusedKernels(len(norms), len(gated))


def _run_norm(norm: Any, kernels: Kernels, hidden: Tensor) -> Tensor:  # noqa: ANN401  # transformers' class
    return kernels.norm(hidden, norm.weight, norm.variance_epsilon)


def _run_gated(mlp: Any, kernels: Kernels, hidden: Tensor) -> Tensor:  # noqa: ANN401  # transformers' class
    output: Tensor = mlp.down_proj(kernels.gate(mlp.gate_proj(hidden), mlp.up_proj(hidden)))
    return output


def _rotate(
    kernels: Kernels, plain: Callable[..., Any], device_type: str, query: Tensor, *others: Tensor, **_: object
) -> tuple[Tensor, Tensor]:
    """By the kernel on the device of the run; a copy of the model on another device is rotated by plain torch."""
    rotated: tuple[Tensor, Tensor] = (kernels.rotate if query.device.type == device_type else plain)(query, *others)
    return rotated


def _liger_kernels() -> Kernels:
    if not torch.cuda.is_available() or importlib.util.find_spec("liger_kernel") is None:
        raise InputError(
            f"pin.fused_kernels: Liger's kernels need a GPU and liger-kernel; remove it, or\n{extra_line('liger')}"
        )
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        # Not in place: the gradient of what a norm returns may be read by others.
        normed: Tensor = LigerRMSNormFunction.apply(hidden, weight, epsilon, 0.0, "llama", False)  # noqa: FBT003  # in_place
        return normed

    return Kernels(norm, LigerSiLUMulFunction.apply, LigerRopeFunction.apply)


_TRIED_TOKENS, _TRIED_ERROR = 16, 0.02  # of the norm of a result; bf16 has 8 significant bits


class _Trial(NamedTuple):
    name: str
    fused: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]

    def differs(self) -> bool:
        """True if output or gradients are not those of plain torch, both for the same gradient of the output."""
        with torch.no_grad():
            gradient = self.plain(*self.inputs).sign()
        ours, theirs = (_with_gradients(compute, self.inputs, gradient) for compute in (self.fused, self.plain))
        return any(
            not bool((mine - other).norm() <= _TRIED_ERROR * other.norm())
            for mine, other in zip(ours, theirs, strict=True)
        )


def _difference(kernels: Kernels, config: Any) -> str | None:  # noqa: ANN401  # transformers' config
    """The first kernel that is not plain torch in bf16 at the widths of the model, or None."""
    found = next((trial.name for trial in _trials(kernels, config, _device()) if trial.differs()), None)
    return None if found is None else f"{found} differs from plain torch on this device"


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _trials(kernels: Kernels, config: Any, device: torch.device) -> Iterator[_Trial]:  # noqa: ANN401  # transformers' config
    """Kernels overwrite inputs and what they saved, so they get copies, which are no leaves."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    size = getattr(config, "head_dim", None) or hidden // heads
    generator = torch.Generator(device).manual_seed(0)

    def random_of(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    def plain_norm(states: Tensor, weight: Tensor) -> Tensor:
        wide = states.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(states.dtype) * weight

    yield _Trial(
        "RMSNorm",
        lambda x, w: kernels.norm(x, w, 1e-6),
        plain_norm,
        (random_of(_TRIED_TOKENS, hidden), random_of(hidden)),
    )
    gate, up = (random_of(_TRIED_TOKENS, config.intermediate_size) for _ in range(2))
    yield _Trial("SwiGLU", lambda a, b: kernels.gate(a * 1, b * 1), lambda a, b: a * a.sigmoid() * b, (gate, up))
    angles = torch.randn(1, _TRIED_TOKENS, size // 2, generator=generator, device=device).repeat(1, 1, 2)
    cosine, sine = angles.cos().bfloat16(), angles.sin().bfloat16()

    def turned(states: Tensor) -> Tensor:
        left, right = states.chunk(2, dim=-1)
        return states * cosine[:, None] + torch.cat((-right, left), dim=-1) * sine[:, None]

    def rotated(query: Tensor, key: Tensor) -> Tensor:
        copies = ((each * 1).transpose(1, 2) for each in (query, key))
        return torch.cat(kernels.rotate(*copies, cosine, sine), dim=1)

    query, key = (random_of(1, _TRIED_TOKENS, count, size) for count in (heads, config.num_key_value_heads))
    yield _Trial(
        "rotary embedding",
        rotated,
        lambda q, k: torch.cat([turned(each.transpose(1, 2)) for each in (q, k)], dim=1),
        (query, key),
    )


def _with_gradients(compute: Callable[..., Tensor], inputs: tuple[Tensor, ...], gradient: Tensor) -> list[Tensor]:
    """The output in fp32, and the gradients of the inputs for this gradient of the output."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    output = compute(*leaves)
    output.backward(gradient)
    return [each.float() for each in (output.detach(), *(leaf.grad for leaf in leaves)) if each is not None]


def num_graphs() -> int:
    """Number of graphs captured in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _breaks() -> dict[str, int]:
    """Graph breaks in this process, by their reason."""
    from torch._dynamo.utils import counters

    return dict(counters["graph_break"])


def check_compiler(setting: str) -> None:
    """EnvironmentFaultError, which names the setting, if torch.compile is switched off or has no compiler."""
    off = next((name for name in _SWITCHES if os.environ.get(name) == "1"), None)
    if off is not None:  # blocks would run eagerly without a word
        raise EnvironmentFaultError(f"{setting}: {off}=1 disables torch.compile; unset it, or set {setting}=false")
    if torch.cuda.is_available():
        if importlib.util.find_spec("triton") is None:
            raise EnvironmentFaultError(f"{setting}: triton is not installed; install it, or set {setting}=false")
        check_triton_compiler(setting)
        return
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise EnvironmentFaultError(
            f"{setting}: on a CPU it needs a C++ compiler, and there is no {compiler}: install g++, name another in "
            f"CXX, or set {setting}=false"
        )
