"""Functions of a user's own: the file runs as it was planned, and gives a run its loss, its model, a call a step."""

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attempt_runs import metrics_of, run_attempt
from msgspec.structs import replace
from prepare_request_factory import extension_of
from rank_factory import rank_plan, write_packed_rows, write_rows

from shardwise.trainer.runtime.run.extension import load_hooks
from shardwise.trainer.runtime.run.state import RunState
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.messages.extension import Hook
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending
from shardwise.trainer.spec.strategy import LossHead

CROSS_ENTROPY = """
from torch.nn import functional

def loss(logits, labels):
    return {factor} * functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
"""


def run(folder: Path, plan: Plan, body: str | None, *hooks: Hook) -> tuple[RunState, list[dict[str, Any]]]:
    if body is not None:
        plan = replace(plan, extension=extension_of(folder, body, *hooks))
    ending, state = run_attempt(folder / "run", plan)
    assert ending is Ending.FINISHED
    return state, metrics_of(folder / "run")


plan_of = partial(rank_plan, num_steps=3, loss=LossHead.EAGER)


@pytest.mark.parametrize("writes", [write_rows, write_packed_rows])
def test_a_loss_of_ones_own_is_what_is_learned(tmp_path, writes):
    """Cross entropy gives the loss of every head; twice of it, twice the loss."""
    plan, lines = plan_of(writes(tmp_path / "rows")), {}
    for factor in (None, 1, 2):
        (tmp_path / str(factor)).mkdir()
        body = None if factor is None else CROSS_ENTROPY.format(factor=factor)
        _, lines[factor] = run(tmp_path / str(factor), plan, body, Hook.LOSS)
    for name, rel in (("loss", 1e-5), ("grad_norm", 1e-4)):
        assert [line[name] for line in lines[1]] == pytest.approx([line[name] for line in lines[None]], rel=rel)
    assert lines[2][0]["loss"] == pytest.approx(2 * lines[1][0]["loss"], rel=1e-5)


@pytest.mark.parametrize("answer", ["logits.sum().detach()", "logits.sum(0)", "1.0"])
def test_a_loss_that_is_no_number_with_a_gradient_is_refused(tmp_path, answer, cache_dir):
    plan = plan_of(cache_dir)
    with pytest.raises(InputError, match=r"extensions?: loss\b.*gradient"):
        run(tmp_path, plan, f"def loss(logits, labels):\n    return {answer}\n", Hook.LOSS)


def test_a_model_of_ones_own_is_the_one_that_is_trained(tmp_path, cache_dir):
    body = (
        "from transformers import AutoModelForCausalLM\n\ndef build_model(config, dtype):\n"
        "    model = AutoModelForCausalLM.from_config(config)\n"
        "    model.lm_head.weight.data.zero_()\n    return model\n"
    )
    plan = plan_of(cache_dir)
    _, lines = run(tmp_path, plan, body, Hook.BUILD_MODEL)
    assert lines[0]["loss"] == pytest.approx(math.log(plan.model_config["vocab_size"]), rel=1e-5), "all logits are 0"


def test_a_model_that_is_none_is_refused(tmp_path, cache_dir):
    with pytest.raises(InputError, match=r"build_model .*dict"):
        run(tmp_path, plan_of(cache_dir), "def build_model(config, dtype):\n    return {}\n", Hook.BUILD_MODEL)


def test_every_step_calls_on_step_with_its_metrics_and_an_error_in_it_is_an_incident(tmp_path, cache_dir):
    body = (
        "import json\n\ndef on_step(step, metrics):\n"
        f"    with open({str(tmp_path / 'calls.jsonl')!r}, 'a') as stream:\n"
        "        stream.write(json.dumps([step, metrics]) + '\\n')\n    assert step < 2, 'enough'\n"
    )
    state, lines = run(tmp_path, plan_of(cache_dir), body, Hook.ON_STEP)
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and [step for step, _ in calls] == [1, 2], "it is not called again"
    assert [metrics["loss"] for _, metrics in calls] == [line["loss"] for line in lines[:2]]
    (incident,) = state.incidents
    assert all(fact in incident for fact in ("on_step", "AssertionError: enough", "mine.py, line 6"))


def test_a_hook_is_called_with_its_arguments(tmp_path):
    """In a module in which dataclasses work and that knows its file."""
    text = (
        "from dataclasses import dataclass\n@dataclass\nclass Row:\n    text: str\n"
        "def format_row(row): return row | {'text': Row(__file__).text}\n"
    )
    assert load_hooks(None) is None
    hooks = load_hooks(extension_of(tmp_path, text, Hook.FORMAT_ROW))
    assert hooks.has(Hook.FORMAT_ROW) and not hooks.has(Hook.LOSS)
    assert hooks.call(Hook.FORMAT_ROW, {"a": 1}) == {"a": 1, "text": str(tmp_path / "mine.py")}


def test_a_file_that_changed_since_the_plan_or_is_missing_is_not_run_and_imports_nothing_of_its_folder(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("x = 1\n")
    extension = extension_of(tmp_path, "import neighbour_of_mine\n", Hook.LOSS)
    with pytest.raises(InputError, match=r"ModuleNotFoundError: .*neighbour_of_mine.*mine\.py, line 1"):
        load_hooks(extension)
    assert str(tmp_path) not in sys.path
    Path(extension.path).write_text("raise SystemExit\n")
    with pytest.raises(InputError, match=r"mine\.py.* changed"):
        load_hooks(extension)
    Path(extension.path).unlink()
    with pytest.raises(InputError, match=r"mine\.py.*No such file"):
        load_hooks(extension)
