"""New weights tensor by tensor: bit by bit those of a model that is built as a whole."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from architecture_factory import TINY, VARIANTS
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.trainer.runtime.models.build import model_from_config
from shardwise.trainer.runtime.models.meta_model import Values, draw, meta_model_from_config, plan_initialization
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.strategy import Attention

ALL = {**TINY, **VARIANTS}
EACH = pytest.mark.parametrize("config", ALL.values(), ids=ALL)


def build_of(config: dict[str, object]) -> Callable[[], PreTrainedModel]:
    is_fused = Attention.SDPA in read_model_shape(config).attentions
    attention = Attention.SDPA if is_fused else Attention.EAGER
    return partial(model_from_config, config, dtype=torch.float32, attention=attention)


def whole_model(build: Callable[[], PreTrainedModel]) -> tuple[PreTrainedModel, torch.Tensor]:
    """The model, and where the generator stands after it."""
    torch.manual_seed(7)
    return build(), torch.get_rng_state()


@EACH
def test_every_tensor_and_the_generator_are_those_of_a_whole_build(config):
    build = build_of(config)
    whole, state = whole_model(build)
    drawing = plan_initialization(build)
    assert drawing is not None
    delivered: dict[str, torch.Tensor] = {}

    def put(name: str, tensor: torch.Tensor) -> None:
        assert name not in delivered, "each is complete when it comes"
        delivered[name] = tensor.clone()
        torch.rand(3)  # the receiver may use the generator too

    torch.manual_seed(7)
    draw(build, drawing, put)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        assert torch.equal(delivered[name], tensor), name


def test_planning_draws_nothing():
    before = torch.get_rng_state()
    plan_initialization(build_of(TINY["llama"]))
    assert torch.equal(torch.get_rng_state(), before)


def test_transformers_builds_models_as_before_when_all_is_done():
    build = build_of(TINY["llama"])
    once, state = whole_model(build)
    draw(build, plan_initialization(build), lambda _name, _tensor: None)
    again, after = whole_model(build)
    assert torch.equal(state, after)
    assert all(torch.equal(one, other) for one, other in zip(once.parameters(), again.parameters(), strict=True))


class OwnConfig(PreTrainedConfig):
    model_type = "own"


class Computed(PreTrainedModel):
    """A model with a value that only its constructor knows."""

    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.layer = nn.Linear(4, 3)
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.25, 0.125]))
        self.post_init()


class Dependent(Computed):
    """A model whose initialisation reads what is there."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            self.slopes.data.mul_(self.layer.weight.data.abs().mean())


@pytest.mark.parametrize("kind", [Computed, Dependent])
def test_a_model_that_cannot_be_drawn_by_tensors_is_built_as_a_whole(kind):
    def build() -> PreTrainedModel:
        return kind(OwnConfig())

    assert plan_initialization(build) is None
    meta_model = meta_model_from_config(build, dtype=torch.float32, seed=7)
    found: dict[str, torch.Tensor] = {}

    def put(name: str, values: Values) -> None:
        found[name] = values.whole().clone()

    meta_model.source.deliver(put)
    whole, _ = whole_model(build)
    assert found.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(found[name], parameter) for name, parameter in whole.named_parameters())
