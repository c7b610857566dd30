"""torch.compile, block by block: one compilation serves all blocks that are alike.

Blocks are compiled in place, after checkpointing and before an engine wraps the model: recomputation is traced with the
block, and the engine's hooks around a block stay outside of it. When the width of the rows changes, torch compiles a
second time, for any width.

torch stops compiling a function that it had to recompile too often, and runs it uncompiled without an error; a failure
to compile raises inside the forward. Where the job pins compilation both are errors. Where the planner chose it the
blocks run eagerly from then on, no step is lost, and the report has an incident.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.trainer.runtime.memory.activation_offload import ActivationOffload
from shardwise.trainer.runtime.run.blocks import blocks_of
from shardwise.trainer.runtime.run.operators import check_triton_compiler
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError

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
        _check_compiler()
    except (InputError, EnvironmentFaultError) as error:
        if is_pinned:
            raise
        return Compilation(0, 0, EagerFallback(str(error).splitlines()[0]))
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
    return Compilation(*_graphs_and_breaks(), fallback)


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
    num_breaks: int
    fallback: EagerFallback | None = None

    @property
    def problem(self) -> str | None:
        """Why the blocks run eagerly, or None if they run compiled."""
        return None if self.fallback is None else self.fallback.problem

    @property
    def failure(self) -> str | None:
        """`problem` if it is a failure of the compiler, which the next run would have as well."""
        return self.problem if self.fallback is not None and self.fallback.has_failed else None

    def facts(self, model: nn.Module) -> dict[str, str]:
        """Text of what has been compiled since."""
        if self.problem is not None:
            return {"compile": f"no block, {self.problem}"}
        blocks = blocks_of(model)
        num_compiled = sum(block._compiled_call_impl is not None for block in blocks)
        graphs, breaks = (now - earlier for now, earlier in zip(_graphs_and_breaks(), self[:2], strict=True))
        return {"compile": f"{num_compiled} of {len(blocks)} blocks, as {graphs} graphs with {breaks} breaks"}


def _graphs_and_breaks() -> tuple[int, int]:
    """Number of graphs captured in this process, and of graph breaks."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), int(sum(counters["graph_break"].values()))


def _check_compiler() -> None:
    off = next((name for name in _SWITCHES if os.environ.get(name) == "1"), None)
    if off is not None:  # blocks would run eagerly without a word
        raise EnvironmentFaultError(f"pin.compile: {off}=1 disables torch.compile; unset it, or set pin.compile=false")
    if torch.cuda.is_available():
        if importlib.util.find_spec("triton") is None:
            raise EnvironmentFaultError("pin.compile: triton is not installed; install it, or set pin.compile=false")
        check_triton_compiler("pin.compile")
        return
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise EnvironmentFaultError(
            f"pin.compile: on a CPU it needs a C++ compiler, and there is no {compiler}: install g++, name another in "
            "CXX, or set pin.compile=false"
        )
