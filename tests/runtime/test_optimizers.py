"""Every optimizer: its class, groups, state and decay, GaLore, and updates inside the backward pass."""

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from optimizer_factory import (
    NUM_LARGE,
    NUM_SMALL,
    assert_same_weights,
    random_gradients,
    random_loss,
    tiny_llama,
    train_steps,
)
from report_factory import make_candidate
from torch import nn
from transformers.optimization import Adafactor

from shardwise.trainer.runtime.memory.recomputation import apply_checkpointing
from shardwise.trainer.runtime.optimizers import (
    BETAS,
    build_optimizer,
    check_in_backward,
    expected_class_name,
    expected_groups,
    optimizer_facts,
    parameter_groups,
    set_learning_rate,
    updates_in_backward,
)
from shardwise.trainer.runtime.optimizers.galore import PROJECTIONS
from shardwise.trainer.runtime.optimizers.rules import block_matrices
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import GaloreJob
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Checkpointing, Method, Precision

# DeepSpeed's is compiled: tests/distributed steps it.
STEPPED = [pytest.param(kind, id=kind) for kind in Optimizer if kind is not Optimizer.DEEPSPEED_CPU_ADAM]
EIGHT_BIT = (
    Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT, Optimizer.LION_8BIT, Optimizer.LAMB_8BIT, Optimizer.ADEMAMIX_8BIT,
)  # fmt: skip
OURS = "shardwise.trainer.runtime.optimizers"
ADAMS: dict[str, object] = {"betas": (0.9, 0.95)}
IMPLEMENTATIONS: dict[Optimizer, tuple[str, dict[str, object]]] = {
    Optimizer.ADAMW: ("torch.optim.adamw.AdamW", {"foreach": True, "fused": None, **ADAMS}),
    Optimizer.ADAMW_FUSED: ("torch.optim.adamw.AdamW", {"fused": True, **ADAMS}),
    Optimizer.SGD: ("torch.optim.sgd.SGD", {"momentum": 0}),
    Optimizer.ADAMW_8BIT: (f"{OURS}.eight_bit.AdamW8bit", {"eps": 1e-8, **ADAMS}),
    Optimizer.PAGED_ADAMW: ("bitsandbytes.optim.adamw.PagedAdamW32bit", ADAMS),
    Optimizer.PAGED_ADAMW_8BIT: ("bitsandbytes.optim.adamw.PagedAdamW8bit", ADAMS),
    Optimizer.LION: ("lion_pytorch.lion_pytorch.Lion", {"betas": (0.95, 0.98)}),
    Optimizer.LION_8BIT: ("bitsandbytes.optim.lion.Lion8bit", {"betas": (0.95, 0.98)}),
    Optimizer.LAMB_8BIT: (f"{OURS}.eight_bit.Lamb8bit", ADAMS),
    Optimizer.ADEMAMIX_8BIT: (
        "bitsandbytes.optim.ademamix.AdEMAMix8bit",
        {"betas": (0.9, 0.999, 0.9999), "alpha": 5.0, "t_alpha": None, "t_beta3": None},
    ),
    Optimizer.ADAFACTOR: (
        "transformers.optimization.Adafactor",
        {"scale_parameter": True, "relative_step": False, "beta1": None, "clip_threshold": 1.0},
    ),
    Optimizer.MUON: (f"{OURS}.rules.MuonAndAdamW", {}),
    Optimizer.LOMO: (f"{OURS}.in_backward.Lomo", {}),
    Optimizer.ADALOMO: (f"{OURS}.in_backward.AdaLomo", {"clip_threshold": 1.0}),
}


@pytest.mark.parametrize("kind", STEPPED)
def test_class_settings_and_groups_are_those_that_are_expected(kind):
    built = build_optimizer(kind, tiny_llama(), lr=0.5, weight_decay=0.1)
    implementation, settings = IMPLEMENTATIONS[kind]
    assert f"{type(built).__module__}.{type(built).__name__}" == implementation
    assert {name: built.defaults[name] for name in settings} == settings
    assert type(built).__name__ == expected_class_name(kind)
    assert tuple(group["name"] for group in built.param_groups) == expected_groups(kind)
    assert [group["weight_decay"] for group in built.param_groups] == [0.1] * (len(built.param_groups) - 1) + [0.0]
    held = [id(parameter) for group in built.param_groups for parameter in group["params"]]
    assert len(held) == len(set(held)) == NUM_LARGE + NUM_SMALL


@pytest.mark.parametrize("kind", STEPPED)
def test_the_learning_rate_reaches_every_group_and_every_update(kind):
    llama = tiny_llama()
    built = build_optimizer(kind, llama, lr=0.5, weight_decay=0.1)
    train_steps(llama, built, range(1), lr=0.0)
    assert [group["lr"] for group in built.param_groups] == [0.0] * len(built.param_groups)
    assert_same_weights(llama, tiny_llama())
    train_steps(llama, built, range(1, 2), lr=1e-3)
    before = tiny_llama()
    assert [name for name, weight in llama.named_parameters() if torch.equal(weight, before.get_parameter(name))] == []


@pytest.mark.parametrize("kind", STEPPED)
def test_without_gradients_matrices_shrink_and_norms_stay(kind):
    llama, before = tiny_llama(), tiny_llama()
    built = build_optimizer(kind, llama, lr=0.1, weight_decay=0.5)
    for parameter in llama.parameters():
        parameter.grad = torch.zeros_like(parameter)
    built.step()
    for name, parameter in llama.named_parameters():
        ratio = parameter.norm() / before.get_parameter(name).norm()
        assert ratio == 1 if parameter.ndim == 1 else 0.85 < ratio < 1, (name, ratio)


@pytest.mark.parametrize("kind", EIGHT_BIT)
def test_moments_of_large_tensors_are_8_bit_with_a_scale_for_256_elements(kind):
    llama = tiny_llama()
    built = build_optimizer(kind, llama, lr=1e-3, weight_decay=0.1)
    train_steps(llama, built, range(2), lr=1e-3)
    moments = ("1",) if kind is Optimizer.LION_8BIT else ("1", "2")
    stack = {"1": (2,)} if kind is Optimizer.ADEMAMIX_8BIT else {}  # its fast and its slow mean
    for parameter in llama.parameters():
        state, is_large = built.state[parameter], parameter.numel() >= 4096
        for number in moments:
            assert state[f"state{number}"].dtype is (torch.uint8 if is_large else torch.float32)
            assert state[f"state{number}"].shape == (*stack.get(number, ()), *parameter.shape)
            assert (f"absmax{number}" in state) == is_large
            if is_large:
                assert state[f"absmax{number}"].shape == (*stack.get(number, ()), -(-parameter.numel() // 256))
                assert state[f"state{number}"].unique().numel() > 2, "moments that are all alike hold nothing"


def test_muons_rules_are_torchs_own():
    llama, alone = tiny_llama(), tiny_llama()
    built = build_optimizer(Optimizer.MUON, llama, lr=1e-3, weight_decay=0.1)
    matrices = block_matrices(alone)
    others = [p for p in alone.parameters() if not any(p is matrix for matrix in matrices)]
    adamw = torch.optim.AdamW(parameter_groups(nn.ParameterList(others), weight_decay=0.1), lr=1e-3, betas=BETAS)
    muon = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        for each in (llama, alone):
            random_gradients(each, step=step)
        for optimizer in (built, adamw, muon):
            optimizer.step()
    assert_same_weights(llama, alone)


def test_lambs_update_on_small_tensors_is_the_papers():
    weight = nn.Parameter(torch.linspace(-1, 2, 24).reshape(4, 6))
    expected = weight.detach().clone().double()
    built = build_optimizer(Optimizer.LAMB_8BIT, nn.ParameterList([weight]), lr=0.02, weight_decay=0.1)
    mean, square = torch.zeros_like(expected), torch.zeros_like(expected)
    for step in range(1, 5):
        weight.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        gradient = weight.grad.double()
        built.step()
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient**2
        update = mean / (1 - BETAS[0] ** step) / ((square / (1 - BETAS[1] ** step)).sqrt() + 1e-8) + 0.1 * expected
        expected -= 0.02 * expected.norm() / update.norm() * update
    assert torch.allclose(weight.double(), expected, atol=1e-5)


def test_w12_bitsandbytes_lamb_makes_adams_update():
    from bitsandbytes.optim import LAMB8bit

    updates = []
    for scale in (1.0, 100.0):
        weight = nn.Parameter(scale * torch.ones(64, 64))
        weight.grad = torch.ones(64, 64)
        LAMB8bit([weight], lr=1e-2).step()
        updates.append(scale - float(weight.detach().mean()))
    assert updates[1] == pytest.approx(updates[0], rel=1e-2), "LAMB's would be a hundred times larger"


RANK_8 = GaloreJob(rank=8, update_gap=2, scale=0.5)


def after_steps(inner: Optimizer = Optimizer.ADAMW, *, num_steps: int = 3, weight_decay: float = 0.1, **changes: Any):
    llama = tiny_llama()
    built = build_optimizer(inner, llama, lr=1e-2, weight_decay=weight_decay, galore=replace(RANK_8, **changes))
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
    galore = replace(RANK_8, **changes)
    built = build_optimizer(Optimizer.ADAMW, llama, lr=1e-2, weight_decay=0.0, galore=galore)
    random_gradients(llama, step=0)
    built.step()
    updates = {name: weight.detach() - before.get_parameter(name) for name, weight in llama.named_parameters()}
    return llama, built, updates


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_every_projection_updates_tall_and_wide_matrices_in_a_space_of_the_rank(projection):
    """A projector holds no singular vectors beyond its rank; as a view of all of them it would (W36)."""
    llama, built, updates = after_random_gradients(projection=projection)
    for name, update in updates.items():
        assert "_proj" not in name or 0 < torch.linalg.matrix_rank(update, rtol=1e-4) <= 8
    sides = {tuple(built.state[matrix]["exp_avg"].shape) for matrix in block_matrices(llama)}
    assert all(8 in shape for shape in sides)
    assert (sides == {(8, 8)}) == (projection == "full")
    for parameter in block_matrices(llama):
        found = built.state[parameter]["projector"].ortho_matrix
        for matrix in found if isinstance(found, list) else [found]:
            assert matrix.untyped_storage().nbytes() == 4 * RANK_8.rank * max(matrix.shape)
            assert matrix.is_contiguous()  # as it comes back from a checkpoint, or the two would round differently


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
    with pytest.raises(InputError, match=r"train\.method: galore"):  # without a matrix
        build_optimizer(Optimizer.ADAMW, nn.LayerNorm(4), lr=1e-2, weight_decay=0.1, galore=RANK_8)


def test_w13_galore_torchs_8_bit_arguments_have_moved_in_bitsandbytes_and_ours_are_built_without(monkeypatch):
    from galore_torch import GaLoreAdamW8bit

    plain = GaLoreAdamW8bit(tiny_llama().parameters())  # percentile_clipping=100, block_wise=True
    assert (plain.args.max_unorm, plain.args.skip_zeros) == (100, True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    built: Any = build_optimizer(Optimizer.ADAMW_8BIT, tiny_llama(), lr=1e-2, weight_decay=0.1, galore=RANK_8)
    assert (type(built).__module__, built.args.optim_bits) == ("galore_torch.adamw8bit", 8)
    assert (built.args.max_unorm, built.args.skip_zeros) == (0, False)


def test_w14_galore_torch_does_not_project_back_under_reverse_std_at_full_rank():
    from galore_torch import GaLoreAdamW

    wide = nn.Parameter(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    group = {"params": [wide], "rank": 4, "update_proj_gap": 10, "scale": 1.0, "proj_type": "reverse_std"}
    built = GaLoreAdamW([group], no_deprecation_warning=True)
    wide.grad = torch.ones_like(wide)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        built.step()


INSIDE = (Optimizer.LOMO, Optimizer.ADALOMO)
ANY_TIME = [kind for kind in Optimizer if kind not in (*INSIDE, Optimizer.DEEPSPEED_CPU_ADAM)]


@pytest.mark.parametrize("kind", ANY_TIME)
def test_the_weights_are_those_of_an_update_after_the_backward_pass(kind):
    """Under recomputation, and with a table that is used at both ends of the model."""
    after, inside = (tiny_llama(tie_word_embeddings=True) for _ in range(2))
    for llama in (after, inside):
        apply_checkpointing(llama.train(), Checkpointing.FULL)
    plain = build_optimizer(kind, after, lr=1e-3, weight_decay=0.1)
    hooked = build_optimizer(kind, inside, lr=1e-3, weight_decay=0.1, in_backward=True)
    assert (updates_in_backward(plain), updates_in_backward(hooked)) == (False, True)
    train_steps(after, plain, range(3), lr=1e-3)
    train_steps(inside, hooked, range(3), lr=1e-3)
    assert_same_weights(inside, after)


@pytest.mark.parametrize("kind", [*INSIDE, Optimizer.ADAMW, Optimizer.ADAMW_8BIT])
def test_no_two_gradients_are_ever_alive(kind):
    """LOMO's rules are inside the backward pass without being asked for."""
    llama, alive = tiny_llama(), []

    def count(_: torch.Tensor) -> None:
        alive.append(sum(parameter.grad is not None for parameter in llama.parameters()))

    for parameter in llama.parameters():
        parameter.register_post_accumulate_grad_hook(count)  # before ours, so that it sees what ours is given
    built = build_optimizer(kind, llama, lr=1e-3, weight_decay=0.1, in_backward=kind not in INSIDE)
    random_loss(llama, step=0).backward()
    assert alive == [1] * 21 and updates_in_backward(built)
    fact = "inside the backward pass, by hooks on 21 parameters, 21 so far"
    assert optimizer_facts(built)["updates"].startswith(fact)


def test_lomo_is_sgd_and_adalomo_is_adafactor_inside_the_backward_pass():
    """AdaLomo's paper has a factored second moment, a bounded update, a step relative to the weight."""
    sgd, factored, lomo, adalomo = (tiny_llama() for _ in range(4))
    groups = parameter_groups(factored, weight_decay=0.1)
    for llama, optimizer, lr in (
        (sgd, torch.optim.SGD(sgd.parameters(), lr=0.1), 0.1),
        (lomo, build_optimizer(Optimizer.LOMO, lomo, lr=0.1, weight_decay=0.0), 0.1),
        (factored, Adafactor(groups, lr=1e-2, scale_parameter=True, relative_step=False), 1e-2),
        (adalomo, build_optimizer(Optimizer.ADALOMO, adalomo, lr=1e-2, weight_decay=0.1), 1e-2),
    ):
        train_steps(llama, optimizer, range(5), lr=lr)
    assert_same_weights(lomo, sgd)
    assert_same_weights(adalomo, factored, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", INSIDE)
def test_weights_in_16_bit_are_rounded_once(kind):
    exact = nn.ParameterList([nn.Parameter(torch.linspace(-1, 2, 24).reshape(4, 6).bfloat16().float())])
    rounded = nn.ParameterList([nn.Parameter(exact[0].detach().bfloat16())])
    for each in (exact, rounded):
        built = build_optimizer(kind, each, lr=1e-2, weight_decay=0.5)
        each[0].grad = torch.ones_like(each[0])
        built.step()
    assert rounded[0].dtype is torch.bfloat16
    assert torch.equal(rounded[0], exact[0].bfloat16())


def test_parameters_that_an_engine_puts_in_get_hooks_before_the_next_step():
    old, new = nn.Linear(4, 4), nn.Linear(4, 4)
    built = build_optimizer(Optimizer.SGD, old, lr=0.1, weight_decay=0.0, in_backward=True)
    for group in built.param_groups:  # as Accelerate does for FSDP2
        group["params"] = [p for p in new.parameters() if (p.ndim >= 2) == (group["name"] == "decay")]
    set_learning_rate(built, 0.1)
    before = new.weight.detach().clone()
    new(torch.ones(1, 4)).sum().backward()
    assert torch.allclose(new.weight, before - 0.1) and new.weight.grad is None
    old(torch.ones(1, 4)).sum().backward()
    assert old.weight.grad is not None, "the hooks of parameters that are gone are gone too"


def candidate(*, accumulation: int = 1, method: Method = Method.FULL, in_backward: bool = False, **strategy: Any):
    made = make_candidate(accumulation=accumulation, method=method, optimizer_in_backward=in_backward)
    return replace(made, strategy=replace(made.strategy, **strategy))


def test_what_cannot_run_inside_backward_is_refused_in_words():
    check_in_backward(candidate(accumulation=4))
    check_in_backward(candidate(optimizer=Optimizer.LOMO))
    check_in_backward(candidate(in_backward=True, sharding=Sharding.FSDP))
    with pytest.raises(InputError, match=r"lomo does not accumulate gradients over 4 micro batches.*micro_batch: 16"):
        check_in_backward(candidate(optimizer=Optimizer.LOMO, accumulation=4))
    with pytest.raises(InputError, match=r"pin.optimizer_in_backward uses gradients before ddp"):
        check_in_backward(candidate(in_backward=True, sharding=Sharding.DDP))
    with pytest.raises(InputError, match=r"optimizer adalomo uses gradients before zero2"):
        check_in_backward(candidate(optimizer=Optimizer.ADALOMO, sharding=Sharding.ZERO2))
    with pytest.raises(InputError, match=r"layerwise .* before fp16's loss scale"):
        check_in_backward(candidate(method=Method.GALORE, precision=Precision.FP16_MIXED), is_layerwise=True)
    with pytest.raises(InputError, match="not inside it"):
        build_optimizer(Optimizer.DEEPSPEED_CPU_ADAM, nn.Linear(2, 2), lr=1.0, weight_decay=0.0, in_backward=True)
