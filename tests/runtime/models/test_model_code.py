"""Code that comes with a model, in the process that runs it: the planned files, and nothing else."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils
from custom_model import CONFIG, MARKER, code_of, transformers_as_it_was, write_custom_model
from msgspec.structs import replace
from rank_factory import rank_plan
from transformers import CONFIG_MAPPING

from shardwise.trainer.runtime.data.documents import check_documents_apart
from shardwise.trainer.runtime.export.check import SAME, logits_of, prompt_ids, relative_difference, reloaded_logits
from shardwise.trainer.runtime.export.folder import write_model_folder
from shardwise.trainer.runtime.export.run import plan_on
from shardwise.trainer.runtime.memory.recomputation import blocks_of
from shardwise.trainer.runtime.models.build import build_meta_model, build_model, build_trainable
from shardwise.trainer.runtime.models.model_code import as_its_user, load_model_code
from shardwise.trainer.simulation.describe import describe
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.model.shape import DescriptionRequest
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Attention, Checkpointing

IDS = prompt_ids(320)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def each_test_registers_anew() -> Iterator[None]:
    with transformers_as_it_was():
        yield


def plan_with(folder: Path, **engine: Any) -> Plan:
    plan = rank_plan(Path("rows"), model_config=CONFIG, **engine)
    shape = describe(DescriptionRequest(model_config=CONFIG, origin="config.json", model_code=code_of(folder)))
    return replace(plan, model_code=code_of(folder), model_path=str(folder), model_shape=shape)


def test_its_weights_give_the_logits_that_transformers_gives_and_each_file_runs_once(tmp_path, monkeypatch):
    """No folder alone runs code that is beside its weights."""
    folder, marker = write_custom_model(tmp_path / "tiny"), tmp_path / "marker"
    monkeypatch.setenv(MARKER, str(marker))
    with pytest.raises(ValueError, match="contains custom code"):
        reloaded_logits(folder, IDS)
    assert not marker.exists()
    model = build_model(plan_on(plan_with(folder), DeviceKind.CPU))
    names = ["configuration_tiny", "modeling_tiny", "tiny_layers"]
    assert sorted(line.split()[1] for line in marker.read_text().splitlines()) == names
    with as_its_user(code_of(folder)) as trusts:
        expected = reloaded_logits(folder, IDS, trust_remote_code=trusts)
    assert relative_difference(expected, logits_of(model, IDS)) == 0
    assert "transformers_modules" not in sys.modules


def test_an_export_holds_the_code_and_loads_with_plain_transformers(tmp_path):
    plan = plan_with(write_custom_model(tmp_path / "tiny"))
    model = build_model(plan_on(plan, DeviceKind.CPU))
    assert write_model_folder(model, plan, tmp_path / "out") is None
    assert {path.name for path in (tmp_path / "out").glob("*.py")} == set(code_of(tmp_path / "tiny").files)
    with as_its_user(plan.model_code) as trusts:
        found = reloaded_logits(tmp_path / "out", IDS, trust_remote_code=trusts)
    assert relative_difference(logits_of(model, IDS), found) < SAME
    assert 'from_pretrained("THIS_FOLDER", trust_remote_code=True)' in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("origin", ["read", "drawn"])
@pytest.mark.parametrize("recomputes_buffers", [True, False])
def test_a_skeleton_and_a_whole_build_have_the_same_weights_and_buffers(origin, recomputes_buffers, tmp_path):
    """Code for older versions computes buffers in its constructor only, and transformers leaves them as they come."""
    folder = write_custom_model(tmp_path / "tiny", recomputes_buffers=recomputes_buffers)
    plan = plan_with(folder)
    plan = plan if origin == "read" else replace(plan, model_path=None)
    model, (meta_model, _) = build_model(plan), build_meta_model(plan)
    (frequencies,) = (buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq"))
    assert torch.equal(frequencies, 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))
    for name, buffer in meta_model.model.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name
    found = {}
    meta_model.source.deliver(lambda name, values: found.update({name: values.whole().clone()}))
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(weight, model.get_parameter(name)) for name, weight in found.items())


def test_changed_code_is_refused_by_the_process_that_would_run_it(tmp_path):
    folder = write_custom_model(tmp_path / "tiny")
    plan = plan_with(folder)
    planned = code_of(folder)
    (folder / "tiny_layers.py").write_text("x = 1\n")
    load_model_code(planned)  # what was run before is not read again
    other = write_custom_model(tmp_path / "other", recomputes_buffers=False)
    load_model_code(code_of(other))
    with pytest.raises(InputError, match=r"tiny_layers\.py changed since the plan was made; start again"):
        build_model(plan)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("import no_such_package", r"raised ModuleNotFoundError: No module named 'no_such_package' \(tiny_layers"),
        ("from .setup_everything import x", r"raised ModuleNotFoundError: No module named '.*setup_everything'"),
        ("\n1 / 0", r"raised ZeroDivisionError: division by zero \(tiny_layers\.py, line 2\)"),
    ],
)
def test_code_that_cannot_be_imported_is_an_error_with_its_line(text, fact, tmp_path):
    folder = write_custom_model(tmp_path / "tiny")
    (folder / "tiny_layers.py").write_text(text)
    with pytest.raises(InputError, match=fact):
        load_model_code(code_of(folder))


@pytest.mark.parametrize("attention", [Attention.SDPA, Attention.EAGER])
@pytest.mark.parametrize("keeps_apart", [True, False])
def test_documents_of_a_packed_row_are_kept_apart_or_the_run_does_not_begin(keeps_apart, attention, tmp_path):
    folder = write_custom_model(tmp_path / "tiny", keeps_documents_apart=keeps_apart)
    plan = plan_with(folder, attention=attention)
    model = build_model(plan)
    packed = replace(plan, data=replace(plan.data, is_packed=True))
    check_documents_apart(model, plan, CPU)
    refused = pytest.raises(InputError, match=r"does not keep packed documents apart: .*;\ngive data\.packing=false")
    with nullcontext() if keeps_apart else refused:
        check_documents_apart(model, packed, CPU)
    assert model.training


def test_what_transformers_copies_goes_into_a_folder_of_its_own_that_goes(tmp_path, monkeypatch):
    folder = write_custom_model(tmp_path / "tiny")
    modules: Any = transformers.dynamic_module_utils
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "users"))
    load_model_code(code_of(folder))
    with as_its_user(code_of(folder)) as trusts:
        reloaded_logits(folder, IDS, trust_remote_code=trusts)
        private = Path(modules.HF_MODULES_CACHE)
        assert {path.name for path in private.rglob("*tiny*.py")} == set(code_of(folder).files)
    assert not private.exists() and not (tmp_path / "users").exists() and str(private) not in sys.path
    assert str(tmp_path / "users") == modules.HF_MODULES_CACHE
    assert "tiny_custom" in CONFIG_MAPPING, "the run's own classes are back"
    assert not (folder / "__pycache__").exists()


@pytest.mark.parametrize("checkpointing", [Checkpointing.FULL, Checkpointing.ATTENTION, Checkpointing.SELECTIVE])
def test_blocks_that_are_plain_modules_are_recomputed_with_the_same_gradients(checkpointing, tmp_path):
    folder = write_custom_model(tmp_path / "tiny")
    retained = build_model(plan_with(folder))
    recomputed, installed = build_trainable(plan_with(folder, checkpointing=checkpointing))
    gradients = []
    for model in (retained, recomputed):
        model(input_ids=IDS, labels=IDS).backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert [type(block).__name__ for block in blocks_of(recomputed)] == ["TinyBlock"] * 2
    assert [(each.num_forwards, each.num_repeats) for each in installed.recomputations] == [(1, 1)] * 2
