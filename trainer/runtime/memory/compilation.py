"""torch.compile, block by block: one compilation serves all blocks that are alike.

Blocks are compiled in place, after checkpointing and before an engine wraps the model: recomputation is traced with the
block, and what an engine does around a block stays outside of it. A width that changes makes torch compile a second
time, for widths of any size; a batch of one width keeps its numbers.

torch gives up on a function that it had to compile too often, and then runs it as it is, without an error. Here that is
an error: a run that is asked to compile does.
"""

import importlib.util
import os
import shutil
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer.runtime.memory.activation_offload import move_around_compiled
from trainer.runtime.run.blocks import blocks_of
from trainer.runtime.run.triton_compiler import check_triton_compiler
from trainer.spec.errors import EnvironmentFaultError, InputError


def compile_blocks(model: PreTrainedModel) -> None:
    """Compiles every block by itself, at its first forward; EnvironmentFaultError where there is no compiler."""
    _check_compiler()
    blocks = blocks_of(model)
    if not blocks:
        raise InputError(f"pin.compile: {type(model).__name__} has no blocks that can be compiled")
    import torch._dynamo  # after the check: it takes seconds

    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for block in blocks:
        block.compile()
        move_around_compiled(block)
    seam: Any = model
    seam.shardwise_graphs_before = _graphs_and_breaks()


def is_compiled(model: nn.Module) -> bool:
    """Whether `compile_blocks` was there."""
    return hasattr(model, "shardwise_graphs_before")


def compilation_facts(model: nn.Module) -> dict[str, str]:
    """What was compiled by now, in words."""
    before = getattr(model, "shardwise_graphs_before", None)
    if before is None:
        return {}
    blocks = blocks_of(model)
    num_compiled = sum(block._compiled_call_impl is not None for block in blocks)
    graphs, breaks = (now - earlier for now, earlier in zip(_graphs_and_breaks(), before, strict=True))
    return {"compile": f"{num_compiled} of {len(blocks)} blocks, as {graphs} graphs with {breaks} breaks"}


def _graphs_and_breaks() -> tuple[int, int]:
    """Graphs that were captured in this process, and the places where tracing had to stop."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), int(sum(counters["graph_break"].values()))


def _check_compiler() -> None:
    if torch.cuda.is_available():
        if importlib.util.find_spec("triton") is None:
            raise EnvironmentFaultError("pin.compile: triton is not installed; install it, or leave compile out")
        check_triton_compiler("pin.compile")
        return
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise EnvironmentFaultError(
            f"pin.compile: on a CPU it needs a C++ compiler, and there is no {compiler}: install g++, name another in "
            "CXX, or leave compile out"
        )
