"""What is saved comes back bit for bit, and a resumed run is the run that was never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from small_disk import flip_bit
from torch import nn

from shardwise.trainer.runtime.checkpoint import Ranks, import_state, import_weights
from shardwise.trainer.runtime.checkpoint.load import check_read_back
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError


def build(tiny: Any, *, steps: int = 0, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = tiny.build_model(**settings)
    optimizer = tiny.build_optimizer(model)
    tiny.train(model, optimizer, start=0, stop=steps)
    return model, optimizer


def test_a_checkpoint_of_format_1_is_read_as_it_was_saved(tiny, newest):
    """Written by 0.4: three steps of the tiny run. Later versions read it to the bit, and continue."""
    retained = Path(__file__).with_name("format-1")
    model, optimizer = tiny.resume(newest(retained))
    assert tiny.digest(model, optimizer) == (retained / "digest").read_text().strip()
    assert all(loss < 5 for loss in tiny.train(model, optimizer, start=3, stop=5))


def test_a_tied_weight_is_saved_once_and_stays_tied(tiny, newest, tmp_path):
    model, optimizer = build(tiny, steps=2, tie_word_embeddings=True)
    path = tiny.save(tmp_path, model, optimizer, 2)
    checkpoint = newest(tmp_path)
    entry = checkpoint.manifest.parameters["lm_head.weight"]
    assert (entry.tied_to, entry.weight, entry.state) == ("model.embed_tokens.weight", None, {})
    with safe_open(path / "shard-00000.safetensors", framework="pt") as shard:
        assert not [key for key in shard.keys() if "lm_head" in key]  # noqa: SIM118  # no mapping
    fresh, fresh_optimizer = build(tiny, seed=5, tie_word_embeddings=True)
    import_state(fresh, fresh_optimizer, checkpoint, sharding=Sharding.NONE)
    assert tiny.digest(fresh, fresh_optimizer) == tiny.digest(model, optimizer)
    tiny.save(tmp_path / "untied", *build(tiny), 1)
    with pytest.raises(InputError, match=r"lm_head\.weight: is tied to model\.embed_tokens\.weight in this job"):
        import_weights(fresh, newest(tmp_path / "untied"))


class Odd(nn.Module):
    """Everything that is not a plain matrix: buffers of several types, a scalar, an empty tensor, a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.narrow = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.randn(4), persistent=False)


def test_scalars_buffers_narrow_and_frozen_tensors_come_back(tiny, newest, tmp_path):
    torch.manual_seed(1)
    model, fresh = Odd(), Odd()
    optimizer, fresh_optimizer = (
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad]) for each in (model, fresh)
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    model.get_buffer("count").fill_(41)
    tiny.save(tmp_path, model, optimizer, 1)
    checkpoint = newest(tmp_path)
    fresh.get_buffer("mask").fill_(False)
    import_weights(fresh, checkpoint)
    import_state(fresh, fresh_optimizer, checkpoint, sharding=Sharding.NONE)
    assert tiny.digest(fresh, fresh_optimizer) == tiny.digest(model, optimizer)
    assert fresh.state_dict().keys() == model.state_dict().keys() == set(checkpoint.manifest.parameters)
    assert all(torch.equal(fresh.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (
            lambda model: setattr(model, "lm_head", nn.Linear(18, 130, bias=False)),
            r"lm_head\.weight: has shape \(127, 18\) in the checkpoint, \(130, 18\)",
        ),
        (lambda model: setattr(model, "extra", nn.Linear(2, 2)), r"the checkpoint has no extra\.bias, extra\.weight"),
        (lambda model: setattr(model, "lm_head", nn.Identity()), r"this job's model has no lm_head\.weight"),
        (lambda model: model.to(torch.bfloat16), r"model\.embed_tokens\.weight: is F32 .* rounded"),
    ],
    ids=["another vocabulary", "a layer more", "a layer less", "narrower"],
)
def test_weights_of_another_model_are_refused(tiny, newest, tmp_path, change, fact):
    """So is a weight that was trained, and that the optimizer of the job leaves out."""
    model, optimizer = build(tiny, steps=1)
    tiny.save(tmp_path, model, optimizer, 1)
    fewer = torch.optim.AdamW(list(model.parameters())[1:])
    with pytest.raises(InputError, match=r"embed_tokens\.weight: was trained .* is frozen"):
        import_state(model, fewer, newest(tmp_path), sharding=Sharding.NONE)
    change(model)
    with pytest.raises(InputError, match=fact):
        import_weights(model, newest(tmp_path))


def test_state_that_the_format_does_not_know_is_refused_not_dropped(tiny, tmp_path):
    model, optimizer = build(tiny, steps=1)
    optimizer.state[model.lm_head.weight]["mystery"] = torch.zeros(3)
    with pytest.raises(InputError, match="checkpoints do not know the state mystery that AdamW keeps"):
        tiny.save(tmp_path, model, optimizer, 1)
    with pytest.raises(InputError, match="there are no checkpoints of RMSprop"):
        tiny.save(tmp_path, model, torch.optim.RMSprop(model.parameters()), 1)


def test_the_reader_in_the_documentation_works(tiny, tmp_path, capsys):
    document = (Path(__file__).parents[3] / "docs" / "surviving.md").read_text()
    code = document.partition("```python\n")[2].partition("```")[0]
    model, optimizer = build(tiny)
    path = tiny.save(tmp_path, model, optimizer, 30)
    exec(code.replace("runs/NAME/checkpoints/step-00000030", str(path)), {})
    assert capsys.readouterr().out == f"{model.lm_head.weight.detach()}\n"


def flip_a_bit(tensor):
    """Which no tolerance would see."""
    tensor.data.view(torch.int32)[0] ^= 1


def add_a_parameter(folder, model, optimizer):
    model.register_parameter("adapter", nn.Parameter(torch.zeros(3)))
    optimizer.add_param_group({"params": [model.adapter], "name": "adapters"})


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (lambda folder, *_: flip_bit(folder / "shard-00000.safetensors"), "hashes to "),
        (lambda _, model, __: flip_a_bit(model.model.norm.weight), r"model\.norm\.weight was read back otherwise"),
        (
            lambda _, model, optimizer: flip_a_bit(optimizer.state[model.model.norm.weight]["exp_avg"]),
            r"model\.norm\.weight \(exp_avg\) was read back otherwise",
        ),
        (add_a_parameter, "has no adapter"),
    ],
    ids=["disk", "weight", "moment", "parameter"],
)
def test_what_differs_from_memory_ends_the_run_with_its_name(tiny, damage, fact, tmp_path):
    model, optimizer = build(tiny, steps=1, tie_word_embeddings=True)
    folder = tiny.save(tmp_path, model, optimizer, 1)
    settings = {"model": model, "optimizer": optimizer, "sharding": Sharding.NONE, "ranks": Ranks.alone()}
    check_read_back(folder, **settings)
    damage(folder, model, optimizer)
    with pytest.raises(EnvironmentFaultError, match=fact):
        check_read_back(folder, **settings)
