"""Code that comes with a model: which files would run, where they are from, and that nothing here runs them."""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from custom_model import CONFIG, MARKER, custom_files, write_custom_model
from engine_plan_factory import engine_plan
from hub_kernel_factory import KERNEL
from hub_server import COMMIT, NO_HUB, Hub, ask_hub, serving
from msgspec.structs import replace
from planning_factory import plan_of

from shardwise.launch.inputs import trusted_code
from shardwise.launch.inputs.model_files import read_model_config
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job.reading import read_job
from shardwise.trainer.spec.job.sections import Job
from shardwise.trainer.spec.messages.extension import Hook
from shardwise.trainer.spec.model.shape import ModelCode
from shardwise.trainer.spec.plan import Plan

PROGRAM = """
import json, sys
from pathlib import Path
from shardwise.launch.inputs.trusted_code import read_model_code
from shardwise.launch.inputs.model_files import read_model_config
from shardwise.trainer.spec.errors import ShardwiseError
from shardwise.trainer.spec.job.reading import read_job

job, home = read_job({"model": json.loads(sys.argv[1]), "data": {"train": "x"}}, origin="job.yaml"), Path(sys.argv[2])
try:
    code = read_model_code(job, read_model_config(job, cache_home=home), cache_home=home)
except ShardwiseError as error:
    print(json.dumps([int(error.exit_code), str(error)]))
else:
    print(json.dumps([0, None if code is None else [code.revision, sorted(code.files), code.folder]]))
assert not {"torch", "transformers"} & sys.modules.keys()
"""
RUNS = ("configuration_tiny.py", "modeling_tiny.py", "tiny_layers.py")


def job_of(folder: Path, *, trusts: bool = True) -> Job:
    model = {"config": str(folder), "tokenizer": "train", **({"trust_remote_code": str(folder)} if trusts else {})}
    return read_job({"model": model, "data": {"train": "x"}}, origin="job.yaml")


def code_in(folder: Path) -> ModelCode | None:
    job = job_of(folder)
    return trusted_code.read_model_code(job, read_model_config(job))


def test_the_named_files_and_what_they_import_also_in_packages_are_hashed_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv(MARKER, str(tmp_path / "marker"))
    folder = write_custom_model(tmp_path / "tiny", has_weights=False)
    code = code_in(folder)
    assert code is not None
    assert code.files == {name: sha256((folder / name).read_bytes()).hexdigest() for name in RUNS}
    assert (code.repository, code.revision, code.folder) == (str(folder), None, str(folder))
    assert not (tmp_path / "marker").exists()
    (folder / "parts" / "deep").mkdir(parents=True)
    (folder / "tiny_layers.py").write_text("from .parts import one\nfrom .parts.deep.two import x\n")
    (folder / "parts" / "__init__.py").write_text("")
    (folder / "parts" / "one.py").write_text("from ..tiny_layers import y\nfrom .deep import three, missing\n")
    (folder / "parts" / "deep" / "two.py").write_text("from .... import outside\n")
    (folder / "parts" / "deep" / "three.py").write_text("import tiny_layers\n")
    code = code_in(folder)
    assert code is not None
    inside = {"parts/__init__.py", "parts/one.py", "parts/deep/two.py", "parts/deep/three.py"}
    assert set(code.files) == {*RUNS, *inside}


def test_a_job_that_trusts_nothing_has_no_code_and_is_told_what_there_is(tmp_path):
    folder = write_custom_model(tmp_path / "tiny", has_weights=False)
    job = job_of(folder, trusts=False)
    model = read_model_config(job)
    assert trusted_code.read_model_code(job, model) is None
    assert trusted_code.offered_code(job, model.config) == str(folder)
    no_model = {**model.config, "auto_map": {"AutoConfig": "configuration_tiny.TinyConfig"}}
    assert trusted_code.offered_code(job, no_model) is None


def named(model_class: str) -> dict[str, dict[str, str]]:
    return {"auto_map": {**CONFIG["auto_map"], "AutoModelForCausalLM": model_class}}


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        ({"auto_map": None}, "causal language model"),
        ({"auto_map": {"AutoConfig": "configuration_tiny.TinyConfig"}}, "causal language model"),
        ({"model_type": None}, "model_type"),
        (named("other/repo--modeling_tiny.TinyForCausalLM"), "other/repo"),
        (named("../modeling_tiny.TinyForCausalLM"), "MODULE.CLASS"),
        (named("TinyForCausalLM"), "MODULE.CLASS"),
        (named("modeling_gone.TinyForCausalLM"), "modeling_gone.py cannot be read"),
        (named("broken.TinyForCausalLM"), "broken.py"),
    ],
)
def test_what_cannot_run_is_refused_in_a_line(tmp_path, config, fact):
    folder = write_custom_model(tmp_path / "tiny", has_weights=False, config=config)
    (folder / "broken.py").write_text("def f(:\n")
    with pytest.raises(InputError) as refused:
        code_in(folder)
    assert fact in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_a_run_keeps_the_files_and_goes_on_with_its_own(tmp_path):
    folder, run_dir = write_custom_model(tmp_path / "tiny", has_weights=False), tmp_path / "run"
    plan = replace(plan_of("tiny", "1xRTX-4090"), model_code=code_in(folder))
    retained = trusted_code.keep_model_code(plan, run_dir).model_code
    assert retained is not None and plan.model_code is not None
    assert Path(retained.folder).is_relative_to(run_dir)
    assert {str(path.relative_to(retained.folder)) for path in Path(retained.folder).rglob("*.py")} == set(RUNS)
    shutil.rmtree(folder)
    assert trusted_code.keep_model_code(plan, run_dir).model_code == retained
    assert trusted_code.keep_model_code(replace(plan, model_code=retained), run_dir).model_code == retained


def test_files_that_changed_since_the_plan_are_refused(tmp_path):
    folder = write_custom_model(tmp_path / "tiny", has_weights=False)
    plan = replace(plan_of("tiny", "1xRTX-4090"), model_code=code_in(folder))
    (folder / "tiny_layers.py").write_text("raise SystemExit\n")
    with pytest.raises(InputError, match=r"tiny_layers\.py changed"):
        trusted_code.keep_model_code(plan, tmp_path / "run")


def ask(home: Path, model: dict[str, str], hub: Hub | None) -> list[object]:
    endpoint = hub.url if hub is not None else NO_HUB
    marker = {MARKER: f"{home}/marker"}
    return ask_hub(PROGRAM, json.dumps(model), str(home), home=home, endpoint=endpoint, **marker)


def test_a_hub_is_asked_for_code_only_where_the_job_trusts_it_and_at_the_commit_of_the_config(tmp_path):
    content = {name: text.encode() for name, text in custom_files().items()}
    with serving(Hub(files={"org/tiny": {**content, "config.json": json.dumps(CONFIG).encode()}})) as hub:
        assert ask(tmp_path, {"config": "org/tiny", "tokenizer": "train"}, hub) == [0, None]
        assert not any(request.endswith(".py") for request in hub.requests)
        hub.requests.clear()
        code, found = ask(tmp_path, {"config": "org/tiny", "tokenizer": "train", "trust_remote_code": "org/tiny"}, hub)
        snapshot = f"{tmp_path}/hub/models--org--tiny/snapshots/{COMMIT}"
        assert (code, found) == (0, [COMMIT, list(RUNS), snapshot])
        asked = [request for request in hub.requests if request.endswith(".py")]
        assert asked and all(f"/resolve/{COMMIT}/" in request for request in asked)
    again = ask(tmp_path, {"config": "org/tiny", "tokenizer": "train", "trust_remote_code": "org/tiny"}, None)
    assert again == [code, found]
    assert not (tmp_path / "marker").exists()


# Stands in for the interpreter: says how it was asked, and loads what the cache or, online, the hub has.
PYTHON = """#!/bin/sh
echo "$* offline=$HF_HUB_OFFLINE" >> {folder}/asked
{then}
"""


@pytest.fixture(autouse=True)
def online(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def plan_with(kernel: str | None) -> Plan:
    plan = engine_plan(Sharding.NONE)
    return replace(plan, candidates=(replace(plan.chosen, flash_kernel=kernel),))


def fake_python(folder: Path, then: str) -> str:
    path = folder / "python"
    path.write_text(PYTHON.format(folder=folder, then=then))
    path.chmod(0o755)
    return str(path)


def asked(folder: Path) -> list[str]:
    lines = (folder / "asked").read_text().splitlines()
    return [line.removeprefix(f"-m shardwise.trainer.runtime.attention.flash_kernel {KERNEL} ") for line in lines]


@pytest.mark.parametrize(("offline", "num_asked"), [("1", 1), (None, 2)])
def test_what_cannot_be_had_stops_the_run_with_its_words(tmp_path, monkeypatch, offline, num_asked):
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    refuses = "echo noise >&2; echo 'attention: it cannot' >&2; echo 'do this' >&2; echo >&2; exit 4"
    python = fake_python(tmp_path, refuses)
    with pytest.raises(EnvironmentFaultError, match=r"^attention: it cannot\ndo this$"):
        trusted_code.fetch_flash_kernel(plan_with(KERNEL), on_progress=lambda _: None, python=python)
    assert len(asked(tmp_path)) == num_asked


def test_hooks_are_found_by_name_without_running_the_file(tmp_path):
    text = "raise SystemExit('ran')\ndef helper(): pass\ndef on_step(step, metrics): pass\ndef format_row(row): pass\n"
    path = tmp_path / "mine.py"
    path.write_text(text)
    found = trusted_code.read_extension(str(path))
    assert found.hooks == (Hook.FORMAT_ROW, Hook.ON_STEP)
    assert found.sha256 == sha256(text.encode()).hexdigest()
    assert found.path == str(path)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("def loss(logits): pass\n", ("line 1", "loss(logits, labels)")),
        ("def loss(a, b, c): pass\n", ("line 1", "loss(logits, labels)")),
        ("def loss(a, b, *, c): pass\n", ("line 1", "loss(logits, labels)")),
        ("\nasync def on_step(step, metrics): pass\n", ("line 2", "on_step", "async")),
        ("x = 1\n", ("format_row, build_model, loss, on_step",)),
        ("def fromat_row(row): pass\n", ("did you mean format_row?",)),
        ("def loss(:\n", ("Python", "line 1")),
        ("def loss(a, b): pass\0\n", ("Python",)),
        ("class loss: pass\n", ("format_row, build_model, loss, on_step",)),
    ],
)
def test_what_cannot_be_called_is_refused_with_the_line(tmp_path, text, facts):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        trusted_code.read_extension(str(path))
    assert str(caught.value).startswith(f"extensions: {path}")
    assert [fact for fact in facts if fact not in str(caught.value)] == []


def test_what_is_not_in_the_cache_is_fetched_once_and_said(tmp_path):
    lines: list[str] = []
    python = fake_python(tmp_path, 'test -z "$HF_HUB_OFFLINE"')
    trusted_code.fetch_flash_kernel(plan_with(KERNEL), on_progress=lines.append, python=python)
    assert asked(tmp_path) == ["offline=1", "offline="]
    assert len(lines) == 1 and KERNEL in lines[0]
