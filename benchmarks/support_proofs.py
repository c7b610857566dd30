"""Tests that cover the cells of the support matrix, on a CPU or on a GPU.

The page names the first proof that covers a cell, so the more specific ones come first.
"""

from collections.abc import Callable
from typing import NamedTuple

from support_cells import Cell

from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.strategy import Fp8Recipe, LossHead, Method, Precision


class Proof(NamedTuple):
    """A test and the cells that it covers."""

    name: str
    test: str  # file::function
    shows: Callable[[Cell], bool]


_GPU = "tests/gpu/test_techniques_gpu.py::test_a_run_matches_its_plan_and_learns"


def _gpu_case(name: str, shows: Callable[[Cell], bool]) -> Proof:
    return Proof(f"gpu-{name}".replace("+", "-"), f"{_GPU}[{name}]", shows)


def _fp8_under(sharding: Sharding) -> Proof:
    return _gpu_case(
        f"fp8-current-{sharding}", lambda cell: cell.precision is Precision.FP8 and cell.sharding is sharding
    )


def _fused_under(sharding: Sharding) -> Proof:
    return _gpu_case(
        f"loss-fused_linear-{sharding}",
        lambda cell: cell.loss is LossHead.FUSED_LINEAR and cell.sharding is sharding,
    )


def _recipe(recipe: Fp8Recipe) -> Proof:
    return _gpu_case(
        f"fp8-{recipe}",
        lambda cell: cell.precision is Precision.FP8 and (cell.fp8_recipe or Fp8Recipe.CURRENT) is recipe,
    )


def _offloaded(method: Method) -> Proof:
    name = "fsdp+optimizer+params" if method is Method.FULL else f"fsdp+optimizer+params-{method}"
    return _gpu_case(
        name, lambda cell: cell.sharding is Sharding.FSDP and cell.offload is not Offload.NONE and cell.method is method
    )


_ENGINES = (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3, Sharding.FSDP, Sharding.FSDP_GRAD_OP)
# Tests on a CPU, the more specific first.
PROOFS: tuple[Proof, ...] = (
    Proof(
        "compiled-alone",
        "tests/runtime/memory/test_compilation.py::test_compiled_and_recomputed_blocks_give_the_gradients_of_eager_ones",
        lambda cell: cell.compile and cell.sharding is Sharding.NONE,
    ),
    Proof(
        "compiled",
        "tests/distributed/test_activations.py::test_compiled_blocks_train_alike_under_every_engine",
        lambda cell: cell.compile,
    ),
    Proof(
        "inside-fsdp",
        "tests/distributed/test_optimizers_sharded.py::test_a_sharded_optimizer_steps_as_one_with_whole_tensors",
        lambda cell: cell.optimizer_in_backward and cell.sharding.uses_fsdp,
    ),
    Proof(
        "offload",
        "tests/distributed/test_offload.py::test_every_step_equals_that_of_ddp",
        lambda cell: cell.offload is not Offload.NONE and cell.method is Method.FULL,
    ),
    Proof(
        "table-on-host",
        "tests/runtime/memory/test_host_embedding.py::test_gradients_are_those_of_a_table_on_the_device",
        lambda cell: cell.embedding_on_host,
    ),
    Proof(
        "covering",
        "tests/distributed/test_covering.py::test_a_point_trains_like_the_plain_run_of_its_update",
        lambda _cell: True,
    ),
)
# Tests of cells that a CPU cannot run.
GPU_PROOFS: tuple[Proof, ...] = (
    *(_fp8_under(sharding) for sharding in _ENGINES),
    Proof(
        "wiring",
        "tests/distributed/test_precision.py::test_every_forward_multiplies_in_fp8_recomputation_too_and_the_report_counts_it",
        lambda cell: cell.precision is Precision.FP8 and cell.sharding in (Sharding.DDP, Sharding.HSDP),
    ),
    Proof(
        "fp16-engine",
        "tests/distributed/test_precision.py::test_the_gradients_of_fp16_carry_the_scale",
        lambda cell: cell.precision is Precision.FP16_MIXED,
    ),
    *(_recipe(recipe) for recipe in Fp8Recipe),
    *(_fused_under(sharding) for sharding in _ENGINES),
    _gpu_case("loss-fused_linear", lambda cell: cell.loss is LossHead.FUSED_LINEAR),
    *(_offloaded(method) for method in Method),
    _gpu_case("galore-adamw_8bit", lambda cell: cell.method is Method.GALORE),
)
