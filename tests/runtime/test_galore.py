"""GaLore: moments and projectors of the planned shapes, on the planned matrices, with the planned updates."""

import inspect
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from optimizer_factory import assert_same_weights, random_gradients, tiny_llama, train_steps
from torch import nn

from shardwise.trainer.runtime.optimizers import (
    BETAS,
    build_optimizer,
    expected_class_name,
    expected_groups,
    optimizer_facts,
    updates_in_backward,
)
from shardwise.trainer.runtime.optimizers.galore import PROJECTIONS
from shardwise.trainer.runtime.optimizers.rules import block_matrices
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import GaloreJob
from shardwise.trainer.spec.optimizers import Optimizer

GALORE = GaloreJob(rank=8, update_gap=2, scale=0.5)


def after_steps(inner: Optimizer = Optimizer.ADAMW, *, num_steps: int = 3, weight_decay: float = 0.1, **changes: Any):
    llama = tiny_llama()
    built = build_optimizer(inner, llama, lr=1e-2, weight_decay=weight_decay, galore=replace(GALORE, **changes))
    train_steps(llama, built, range(num_steps), lr=1e-2)
    return llama, built


@pytest.mark.parametrize("inner", [Optimizer.ADAMW, Optimizer.ADAFACTOR])
def test_class_and_groups_are_those_that_are_expected(inner):
    llama, built = after_steps(inner)
    assert type(built).__module__.startswith("galore_torch")
    assert type(built).__name__ == expected_class_name(inner, is_galore=True)
    assert tuple(group["name"] for group in built.param_groups) == expected_groups(inner, is_galore=True)
    matrices, decay, no_decay = built.param_groups
    assert [id(p) for p in matrices["params"]] == [id(p) for p in block_matrices(llama)]
    assert {p.shape for p in decay["params"]} == {(256, 64)}, "embedding and head"
    assert {p.ndim for p in no_decay["params"]} == {1}
    assert [group["weight_decay"] for group in built.param_groups] == [0.1, 0.1, 0.0]
    assert [matrices[name] for name in ("rank", "update_proj_gap", "scale", "proj_type")] == [8, 2, 0.5, "std"]
    assert "rank" not in decay and "rank" not in no_decay
    settings = {"betas": BETAS, "eps": 1e-8} if inner is Optimizer.ADAMW else {"relative_step": False}
    assert {name: built.defaults[name] for name in settings} == settings


def test_w36_galores_projector_is_a_view_of_all_singular_vectors():
    """Canary: once it fails, `_keep_projectors_only` can go."""
    from galore_torch.galore_projector import GaLoreProjector

    decompose = inspect.unwrap(GaLoreProjector.get_orthogonal_matrix)
    matrix = decompose(GaLoreProjector(8), torch.randn(64, 32), 8, "right")
    assert matrix.shape == (8, 32)
    assert matrix.untyped_storage().nbytes() == 4 * 32 * 32


@pytest.mark.parametrize("projection", ["std", "full"])
def test_a_projector_holds_no_singular_vectors_beyond_its_rank(projection):
    """As a view of all of them it would hold as much as a square matrix of the smaller side (W36)."""
    llama, built = after_steps(projection=projection)
    for parameter in block_matrices(llama):
        found = built.state[parameter]["projector"].ortho_matrix
        for matrix in found if isinstance(found, list) else [found]:
            assert matrix.untyped_storage().nbytes() == 4 * GALORE.rank * max(matrix.shape)
            assert matrix.is_contiguous()  # as it comes back from a checkpoint, or the two would round differently


def test_moments_are_of_rank_by_the_longer_side_and_projectors_of_rank_by_the_smaller():
    llama, built = after_steps()
    for parameter in llama.parameters():
        state = built.state[parameter]
        rows, columns = parameter.shape if parameter.ndim == 2 else (0, 0)
        if rows == 256 or parameter.ndim == 1:
            assert state["exp_avg"].shape == parameter.shape
            assert "projector" not in state
            continue
        projector = state["projector"].ortho_matrix
        is_tall = rows >= columns
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == ((rows, 8) if is_tall else (8, columns))
        assert projector.shape == ((8, columns) if is_tall else (rows, 8))
        side = projector if is_tall else projector.T
        assert torch.allclose(side @ side.T, torch.eye(8), atol=1e-5)
    facts = optimizer_facts(built)
    assert "galore_torch" in facts["optimizer"]
    shapes = re.findall(r"(\d+ x \d+) float32 of (\d+)", facts["projectors"])
    assert shapes == [("32 x 8", "4"), ("64 x 8", "2"), ("8 x 64", "8")]


def test_a_projector_holds_for_the_gap_and_is_then_found_anew():
    llama, built = after_steps(num_steps=1, update_gap=2)
    weight = block_matrices(llama)[0]
    seen = []
    for step in range(1, 5):
        seen.append(built.state[weight]["projector"].ortho_matrix.clone())
        train_steps(llama, built, range(step, step + 1), lr=1e-2)
    assert [torch.equal(a, b) for a, b in pairwise(seen)] == [True, False, True]


def after_random_gradients(**changes: Any):
    """A step with gradients of full rank: the model, its optimizer, and what each weight moved by."""
    llama, before = tiny_llama(), tiny_llama()
    galore = replace(GALORE, **changes)
    built = build_optimizer(Optimizer.ADAMW, llama, lr=1e-2, weight_decay=0.0, galore=galore)
    random_gradients(llama, step=0)
    built.step()
    updates = {name: weight.detach() - before.get_parameter(name) for name, weight in llama.named_parameters()}
    return llama, built, updates


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_every_projection_updates_tall_and_wide_matrices_in_a_space_of_the_rank(projection):
    llama, built, updates = after_random_gradients(projection=projection)
    for name, update in updates.items():
        assert "_proj" not in name or 0 < torch.linalg.matrix_rank(update, rtol=1e-4) <= 8
    sides = {tuple(built.state[matrix]["exp_avg"].shape) for matrix in block_matrices(llama)}
    assert all(8 in shape for shape in sides)
    assert (sides == {(8, 8)}) == (projection == "full")


def test_the_scale_scales_the_projected_update_and_nothing_else():
    (_, _, quarter), (_, _, whole) = (after_random_gradients(scale=scale) for scale in (0.25, 1.0))
    expected = {name: (0.25 if "_proj" in name else 1.0) * update for name, update in whole.items()}
    torch.testing.assert_close(quarter, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inner", [Optimizer.ADAMW, Optimizer.ADAFACTOR])
def test_layerwise_runs_inside_the_backward_pass_with_the_same_result(inner):
    plain, _ = after_steps(inner)
    layerwise, built = after_steps(inner, layerwise=True)
    assert updates_in_backward(built)
    assert "hooks on 21 parameters" in optimizer_facts(built)["updates"]
    assert all(parameter.grad is None for parameter in layerwise.parameters())
    assert_same_weights(layerwise, plain)


REFUSALS = [
    (Optimizer.ADAMW_8BIT, {}, r"adamw_8bit .*CUDA.*adamw or adafactor"),  # where there is no GPU
    (Optimizer.LION, {}, r"adamw, adamw_8bit, adafactor, .*\blion$"),
    (Optimizer.SGD, {}, r"adamw, adamw_8bit, adafactor, .*\bsgd$"),
    (Optimizer.ADAMW_FUSED, {}, r"adamw, adamw_8bit, adafactor, .*\badamw_fused$"),
    (Optimizer.ADAMW, {"projection": "diagonal"}, r"train\.galore\.projection: diagonal\b.*: std, reverse_std"),
    (Optimizer.ADAMW, {"projection": "reverse_std", "rank": 32}, r"rank: 32 .* 32, .*reverse_std"),
]


@pytest.mark.parametrize(("inner", "changes", "fact"), REFUSALS)
def test_what_galore_cannot_do_is_refused(inner, changes, fact, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=fact):
        after_steps(inner, **changes)


def test_the_8_bit_optimizer_inside_is_built_without_the_arguments_that_moved(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    built: Any = build_optimizer(Optimizer.ADAMW_8BIT, tiny_llama(), lr=1e-2, weight_decay=0.1, galore=GALORE)
    assert (type(built).__module__, built.args.optim_bits) == ("galore_torch.adamw8bit", 8)
    assert (built.args.max_unorm, built.args.skip_zeros) == (0, False)


def test_the_largest_rank_of_reverse_std_is_below_the_smaller_side():
    after_steps(projection="reverse_std", rank=31)


def test_a_model_without_matrices_is_refused():
    with pytest.raises(InputError, match=r"train\.method: galore"):
        build_optimizer(Optimizer.ADAMW, nn.LayerNorm(4), lr=1e-2, weight_decay=0.1, galore=GALORE)


def test_w13_galore_torchs_8_bit_arguments_have_moved_in_bitsandbytes():
    from galore_torch import GaLoreAdamW8bit

    built = GaLoreAdamW8bit(tiny_llama().parameters())  # percentile_clipping=100, block_wise=True
    assert (built.args.max_unorm, built.args.skip_zeros) == (100, True)


def test_w14_galore_torch_does_not_project_back_under_reverse_std_at_full_rank():
    from galore_torch import GaLoreAdamW

    wide = nn.Parameter(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    group = {"params": [wide], "rank": 4, "update_proj_gap": 10, "scale": 1.0, "proj_type": "reverse_std"}
    built = GaLoreAdamW([group], no_deprecation_warning=True)
    wide.grad = torch.ones_like(wide)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        built.step()
