"""torch.compile, block by block: one compilation serves all blocks that are alike.

Blocks are compiled in place, after checkpointing and before an engine wraps the model: recomputation is traced with the
block, and the engine's hooks around a block stay outside of it. When the width of the rows changes, torch compiles a
second time, for any width.

torch stops compiling a function that it had to recompile too often, and runs it uncompiled without an error. Here that
is an error: a run that is configured to compile does.
"""

import importlib.util
import os
import shutil
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.trainer.runtime.memory.activation_offload import ActivationOffload
from shardwise.trainer.runtime.run.blocks import blocks_of
from shardwise.trainer.runtime.run.operators import check_triton_compiler
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError


def compile_blocks(model: PreTrainedModel, offload: ActivationOffload | None = None) -> "Compilation":
    """Compiles every block by itself, at its first forward; EnvironmentFaultError if there is no compiler."""
    _check_compiler()
    blocks = blocks_of(model)
    if not blocks:
        raise InputError(f"pin.compile: {type(model).__name__} has no blocks that can be compiled")
    import torch._dynamo  # after the check: it takes seconds

    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for block in blocks:
        block.compile()
    if offload is not None:
        offload.exclude_from_compilation()
    return Compilation(*_graphs_and_breaks())


class Compilation(NamedTuple):
    """The compiler's counters in this process before the blocks of a model were compiled."""

    num_graphs: int
    num_breaks: int

    def facts(self, model: nn.Module) -> dict[str, str]:
        """Text of what has been compiled since."""
        blocks = blocks_of(model)
        num_compiled = sum(block._compiled_call_impl is not None for block in blocks)
        graphs, breaks = (now - earlier for now, earlier in zip(_graphs_and_breaks(), self, strict=True))
        return {"compile": f"{num_compiled} of {len(blocks)} blocks, as {graphs} graphs with {breaks} breaks"}


def _graphs_and_breaks() -> tuple[int, int]:
    """Number of graphs captured in this process, and of graph breaks."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), int(sum(counters["graph_break"].values()))


def _check_compiler() -> None:
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
