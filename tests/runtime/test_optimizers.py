"""Every optimizer of the enum: its class, groups, state and decay, and that it learns real text from scratch."""

import pytest
import torch
from optimizer_factory import (
    GALORE,
    NUM_LARGE,
    NUM_SMALL,
    assert_same_weights,
    losses_on_text,
    random_gradients,
    tiny_llama,
    train_steps,
)
from rank_factory import write_packed_rows
from torch import nn

from shardwise.trainer.runtime.optimizers import (
    BETAS,
    build_optimizer,
    expected_class_name,
    expected_groups,
    parameter_groups,
)
from shardwise.trainer.runtime.optimizers.rules import block_matrices
from shardwise.trainer.spec.optimizers import Optimizer

# DeepSpeed's is compiled: tests/distributed steps it.
STEPPED = [pytest.param(kind, id=kind) for kind in Optimizer if kind is not Optimizer.DEEPSPEED_CPU_ADAM]
EIGHT_BIT = (
    Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT, Optimizer.LION_8BIT, Optimizer.LAMB_8BIT, Optimizer.ADEMAMIX_8BIT,
)  # fmt: skip


def test_matrices_decay_and_everything_else_does_not():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    model[0].weight.requires_grad_(False)
    decay, no_decay = parameter_groups(model, weight_decay=0.1)
    assert (decay["name"], decay["weight_decay"], [p.shape for p in decay["params"]]) == ("decay", 0.1, [(4, 4)])
    assert (no_decay["name"], no_decay["weight_decay"]) == ("no_decay", 0.0)
    assert [tuple(p.shape) for p in no_decay["params"]] == [(4,), (4,), (4,)]


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


def test_matrices_of_blocks_are_neither_tables_nor_heads_nor_frozen():
    llama = tiny_llama()
    names = {id(parameter): name for name, parameter in llama.named_parameters()}
    assert {names[id(parameter)].split(".")[-2] for parameter in block_matrices(llama)} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    tied = tiny_llama(tie_word_embeddings=True)
    assert len(block_matrices(tied)) == len(block_matrices(llama)) == 14
    llama.model.layers[0].requires_grad_(False)
    assert len(block_matrices(llama)) == 7


def test_muons_rules_are_torchs_own():
    llama, alone = tiny_llama(), tiny_llama()
    built = build_optimizer(Optimizer.MUON, llama, lr=1e-3, weight_decay=0.1)
    others = [p for p in alone.parameters() if id(p) not in {id(q) for q in block_matrices(alone)}]
    adamw = torch.optim.AdamW(parameter_groups(nn.ParameterList(others), weight_decay=0.1), lr=1e-3, betas=BETAS)
    muon = torch.optim.Muon(block_matrices(alone), lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
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


NUM_LAST = 5  # losses that the end is the mean of
SAME_UPDATE = {  # as another one makes, but for where its state lies or how it is rounded
    Optimizer.ADAMW_FUSED, Optimizer.PAGED_ADAMW, Optimizer.PAGED_ADAMW_8BIT, Optimizer.LION_8BIT,
    Optimizer.DEEPSPEED_CPU_ADAM,
}  # fmt: skip
LONG = (pytest.mark.long, pytest.mark.products)
WHOLE = [
    pytest.param(
        kind, None, id=kind, marks=() if kind in {Optimizer.LION, Optimizer.MUON, Optimizer.ADAFACTOR} else LONG
    )
    for kind in Optimizer
    if kind not in SAME_UPDATE
]
PROJECTED = [pytest.param(kind, GALORE, id=f"galore-{kind}") for kind in (Optimizer.ADAMW, Optimizer.ADAFACTOR)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Full ones: grouped by length, steps would differ in how much they teach."""
    return write_packed_rows(tmp_path_factory.mktemp("data") / "rows")


@pytest.fixture(scope="module")
def adamws_fall(rows):
    return fall(rows, Optimizer.ADAMW)


def fall(rows, optimizer, galore=None):
    losses = list(losses_on_text(rows, optimizer, galore=galore))
    return losses[0] - sum(losses[-NUM_LAST:]) / NUM_LAST


@pytest.mark.parametrize(("optimizer", "galore"), [*WHOLE[1:], *PROJECTED])
def test_the_loss_falls_at_least_four_fifths_as_far_as_under_adamw(rows, adamws_fall, optimizer, galore):
    assert fall(rows, optimizer, galore) > 0.8 * adamws_fall


def test_adamw_itself_learns(adamws_fall):
    assert adamws_fall > 2, "of ln 256 = 5.5 at the start"
