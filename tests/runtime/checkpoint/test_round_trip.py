"""What is saved comes back bit for bit, and a resumed run is the run that was never stopped."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from shardwise.trainer.runtime.checkpoint import find_checkpoint, import_state, import_weights
from shardwise.trainer.runtime.checkpoint.layout.engines import ENGINES
from shardwise.trainer.runtime.checkpoint.manifest import CheckpointFolder
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.strategy import Sharding

KINDS = ("foreach", "fused", "amsgrad", "momentum", "sgd")


def newest(root: Path) -> CheckpointFolder:
    checkpoint = find_checkpoint(root, on_skip=pytest.fail)
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_is_bitwise_the_uninterrupted_one(tiny: ModuleType, tmp_path: Path, kind: str) -> None:
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model, kind)
    tiny.train(model, optimizer, start=0, stop=5)
    saved_digest = tiny.digest(model, optimizer)
    tiny.save(tmp_path, model, optimizer, 5)
    uninterrupted = tiny.train(model, optimizer, start=5, stop=10)

    resumed_model, resumed_optimizer = tiny.resume(newest(tmp_path), kind)
    assert tiny.digest(resumed_model, resumed_optimizer) == saved_digest
    assert tiny.train(resumed_model, resumed_optimizer, start=5, stop=10) == uninterrupted
    assert tiny.digest(resumed_model, resumed_optimizer) == tiny.digest(model, optimizer)


def test_a_checkpoint_of_format_1_is_read_as_it_was_saved(tiny: ModuleType) -> None:
    """Written by 0.4: three steps of the tiny run. Later versions read it to the bit, and go on."""
    kept = Path(__file__).with_name("format-1")
    model, optimizer = tiny.resume(newest(kept))
    assert tiny.digest(model, optimizer) == (kept / "digest").read_text().strip()
    assert all(loss < 5 for loss in tiny.train(model, optimizer, start=3, stop=5))


def _forget_moments(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def _forget_first_moment(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def _restart_step(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"].fill_(1)


def _count_one_more(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"] += 1


def _forget_everything(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def _forget_second_group(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[1]["params"]:
        del optimizer.state[parameter]


@pytest.mark.parametrize(
    "forget",
    [
        _forget_moments,
        _forget_first_moment,
        _restart_step,
        _count_one_more,
        _forget_everything,
        _forget_second_group,
    ],
)
def test_comparison_of_losses_and_digest_sees_what_is_forgotten(
    tiny: ModuleType, tmp_path: Path, forget: Callable[[torch.optim.Optimizer], None]
) -> None:
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model)
    tiny.train(model, optimizer, start=0, stop=5)
    tiny.save(tmp_path, model, optimizer, 5)
    uninterrupted = tiny.train(model, optimizer, start=5, stop=8)

    resumed_model, resumed_optimizer = tiny.resume(newest(tmp_path))
    whole = tiny.digest(resumed_model, resumed_optimizer)
    forget(resumed_optimizer)
    assert tiny.digest(resumed_model, resumed_optimizer) != whole
    losses = tiny.train(resumed_model, resumed_optimizer, start=5, stop=8)
    assert losses[0] == uninterrupted[0]  # the first loss alone would not show it
    assert max(abs(a - b) for a, b in zip(losses, uninterrupted, strict=True)) > 1e-5


def test_saving_before_the_first_step_changes_nothing(tiny: ModuleType, tmp_path: Path) -> None:
    model, untouched = tiny.build_model(), tiny.build_model()
    optimizer = tiny.build_optimizer(model)
    tiny.save(tmp_path, model, optimizer, 0)
    assert not optimizer.state
    resumed_model, resumed_optimizer = tiny.resume(newest(tmp_path))
    expected = tiny.train(untouched, tiny.build_optimizer(untouched), start=0, stop=3)
    assert tiny.train(model, optimizer, start=0, stop=3) == expected
    assert tiny.train(resumed_model, resumed_optimizer, start=0, stop=3) == expected


def test_going_back_to_before_the_first_step_leaves_no_state_of_later_ones(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model)
    tiny.save(tmp_path, model, optimizer, 0)
    losses = tiny.train(model, optimizer, start=0, stop=3)
    import_state(model, optimizer, newest(tmp_path), sharding=Sharding.NONE)
    assert not optimizer.state
    assert tiny.train(model, optimizer, start=0, stop=3) == losses


def test_settings_of_the_optimizer_stay_the_jobs(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model)
    tiny.train(model, optimizer, start=0, stop=2)
    tiny.save(tmp_path, model, optimizer, 2)
    fresh = tiny.build_model()
    changed = tiny.build_optimizer(fresh)
    for group in changed.param_groups:
        group |= {"lr": 7e-4, "weight_decay": 0.3, "betas": (0.8, 0.9)}
    checkpoint = newest(tmp_path)
    import_weights(fresh, checkpoint)
    import_state(fresh, changed, checkpoint, sharding=Sharding.NONE)
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in changed.param_groups] == [(7e-4, 0.3, (0.8, 0.9))] * 2
    assert checkpoint.manifest.groups["decay"]["weight_decay"] == 0.1
    assert checkpoint.manifest.groups["no_decay"]["weight_decay"] == 0.0
    assert checkpoint.manifest.groups["decay"]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("kind", ["foreach", "fused", "amsgrad"])
def test_state_is_made_as_torch_makes_it(tiny: ModuleType, tmp_path: Path, kind: str) -> None:
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model, kind)
    tiny.train(model, optimizer, start=0, stop=1)
    tiny.save(tmp_path, model, optimizer, 1)
    resumed_model, resumed = tiny.resume(newest(tmp_path), kind)
    for parameter, copy in zip(model.parameters(), resumed_model.parameters(), strict=True):
        made, ours = optimizer.state[parameter], resumed.state[copy]
        assert {key: (v.dtype, v.device, v.shape, v.stride()) for key, v in made.items()} == {
            key: (v.dtype, v.device, v.shape, v.stride()) for key, v in ours.items()
        }


def test_a_tied_weight_is_saved_once(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.build_model(is_tied=True)
    optimizer = tiny.build_optimizer(model)
    tiny.train(model, optimizer, start=0, stop=2)
    path = tiny.save(tmp_path, model, optimizer, 2)
    checkpoint = newest(tmp_path)
    entry = checkpoint.manifest.parameters["lm_head.weight"]
    assert (entry.tied_to, entry.weight, entry.state) == ("model.embed_tokens.weight", None, {})
    with safe_open(path / "shard-00000.safetensors", framework="pt") as shard:
        assert not [key for key in shard.keys() if "lm_head" in key]  # noqa: SIM118  # no mapping
    fresh = tiny.build_model(seed=5, is_tied=True)
    import_weights(fresh, checkpoint)
    fresh_optimizer = tiny.build_optimizer(fresh)
    import_state(fresh, fresh_optimizer, checkpoint, sharding=Sharding.NONE)
    assert tiny.digest(fresh, fresh_optimizer) == tiny.digest(model, optimizer)


def test_ties_are_neither_made_nor_cut_on_the_way(tiny: ModuleType, tmp_path: Path) -> None:
    untied = tiny.build_model()
    tiny.save(tmp_path, untied, tiny.build_optimizer(untied), 1)
    with pytest.raises(
        InputError, match=r"lm_head\.weight: is tied to model\.embed_tokens\.weight in this job and not"
    ):
        import_weights(tiny.build_model(is_tied=True), newest(tmp_path))


class _Odd(nn.Module):
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


def test_scalars_buffers_narrow_and_frozen_tensors_come_back(tiny: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, fresh = _Odd(), _Odd()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    model.get_buffer("count").fill_(41)
    tiny.save(tmp_path, model, optimizer, 1)
    checkpoint = newest(tmp_path)
    fresh.get_buffer("mask").fill_(False)
    import_weights(fresh, checkpoint)
    fresh_optimizer = torch.optim.AdamW([p for p in fresh.parameters() if p.requires_grad])
    import_state(fresh, fresh_optimizer, checkpoint, sharding=Sharding.NONE)
    assert tiny.digest(fresh, fresh_optimizer) == tiny.digest(model, optimizer)
    assert fresh.state_dict().keys() == model.state_dict().keys() == set(checkpoint.manifest.parameters)
    assert all(torch.equal(fresh.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("wrapper", ["ddp", "compiled", "checkpointed", "peft"])
def test_names_carry_no_trace_of_a_wrapper(tiny: ModuleType, tmp_path: Path, wrapper: str) -> None:
    plain = tiny.build_model()
    names = set(dict(plain.named_parameters()))
    wrapped = _wrapped(plain, wrapper)
    assert set(dict(wrapped.named_parameters())) != names
    tiny.save(tmp_path, wrapped, tiny.build_optimizer(plain), 1)
    assert set(newest(tmp_path).manifest.parameters) == names
    import_weights(tiny.build_model(seed=3), newest(tmp_path))


def _wrapped(model: Any, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return nn.ModuleDict({"module": model})
    if wrapper == "peft":
        return nn.ModuleDict({"base_model": nn.ModuleDict({"model": model})})
    if wrapper == "compiled":
        model.model = nn.ModuleDict({"_orig_mod": model.model})
        return nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": model})})
    model.model.layers[0] = nn.ModuleDict({"_checkpoint_wrapped_module": model.model.layers[0]})
    return model


def _another_vocabulary(tiny: ModuleType) -> nn.Module:
    model = tiny.build_model()
    model.lm_head = nn.Linear(18, 130, bias=False)
    return model


def _one_layer_more(tiny: ModuleType) -> nn.Module:
    model = tiny.build_model()
    model.extra = nn.Linear(2, 2)
    return model


def _one_layer_less(tiny: ModuleType) -> nn.Module:
    model = tiny.build_model()
    model.lm_head = nn.Identity()
    return model


def _narrower(tiny: ModuleType) -> nn.Module:
    return tiny.build_model().to(torch.bfloat16)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (_another_vocabulary, r"lm_head\.weight: has shape \(127, 18\) in the checkpoint, \(130, 18\) in this job"),
        (_one_layer_more, r"the checkpoint has no extra\.bias, extra\.weight"),
        (_one_layer_less, r"this job's model has no lm_head\.weight"),
        (_narrower, r"model\.embed_tokens\.weight: is F32 in the checkpoint; as BF16 it would be rounded"),
    ],
)
def test_weights_of_another_model_are_refused(
    tiny: ModuleType, tmp_path: Path, build: Callable[[ModuleType], nn.Module], sentence: str
) -> None:
    model = tiny.build_model()
    tiny.save(tmp_path, model, tiny.build_optimizer(model), 1)
    with pytest.raises(InputError, match=sentence):
        import_weights(build(tiny), newest(tmp_path))


@pytest.mark.parametrize(
    ("saved", "wanted", "sentence"),
    [
        ("foreach", "momentum", "holds exp_avg, exp_avg_sq, the optimizer of this job keeps momentum_buffer"),
        ("foreach", "amsgrad", "the optimizer of this job keeps exp_avg, exp_avg_sq, max_exp_avg_sq"),
        ("momentum", "sgd", "holds momentum_buffer, the optimizer of this job keeps nothing"),
    ],
)
def test_state_of_another_optimizer_is_refused(
    tiny: ModuleType, tmp_path: Path, saved: str, wanted: str, sentence: str
) -> None:
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model, saved)
    tiny.train(model, optimizer, start=0, stop=1)
    tiny.save(tmp_path, model, optimizer, 1)
    with pytest.raises(InputError, match=sentence):
        tiny.resume(newest(tmp_path), wanted)


def test_freezing_or_thawing_on_resume_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model)
    tiny.train(model, optimizer, start=0, stop=1)
    tiny.save(tmp_path, model, optimizer, 1)
    fewer = torch.optim.AdamW(list(model.parameters())[1:])
    with pytest.raises(
        InputError, match=r"embed_tokens\.weight: was trained when the checkpoint was saved and is frozen"
    ):
        import_state(model, fewer, newest(tmp_path), sharding=Sharding.NONE)


def test_every_engine_has_checkpoints() -> None:
    assert set(ENGINES) == set(Sharding)


def test_an_optimizer_without_a_layout_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.build_model()
    with pytest.raises(InputError, match="there are no checkpoints of RMSprop; there are those of Ada"):
        tiny.save(tmp_path, model, torch.optim.RMSprop(model.parameters()), 1)


def test_state_that_the_format_does_not_know_is_refused_not_dropped(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model)
    tiny.train(model, optimizer, start=0, stop=1)
    optimizer.state[model.lm_head.weight]["mystery"] = torch.zeros(3)
    with pytest.raises(InputError, match="checkpoints do not know the state mystery that AdamW keeps"):
        tiny.save(tmp_path, model, optimizer, 1)


def test_tensors_larger_than_a_block_come_back(tiny: ModuleType, tmp_path: Path) -> None:
    model, fresh = nn.Linear(1500, 1501), nn.Linear(1500, 1501)  # 9 MB: two blocks and a rest
    optimizer = torch.optim.SGD(model.parameters())
    tiny.save(tmp_path, model, optimizer, 1)
    import_weights(fresh, newest(tmp_path))
    assert torch.equal(fresh.weight, model.weight)


def test_facts_come_back(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.build_model()
    facts = tiny.build_facts(3, versions={"torch": "2.13"}, best_step=2)
    tiny.save(tmp_path, model, tiny.build_optimizer(model), 3, facts=facts)
    checkpoint = newest(tmp_path)
    assert (checkpoint.facts, checkpoint.step, checkpoint.path.name) == (facts, 3, "step-00000003")


def test_the_reader_in_the_documentation_works(
    tiny: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    code = document.partition("```python\n")[2].partition("```")[0]
    model = tiny.build_model()
    path = tiny.save(tmp_path, model, tiny.build_optimizer(model), 30)
    exec(code.replace("runs/NAME/checkpoints/step-00000030", str(path)), {})
    assert capsys.readouterr().out == f"{model.lm_head.weight.detach()}\n"
