"""The six jobs of examples/walkthrough, one after the other, as docs/walkthrough.md has them; no network, on a CPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.report import Ending, Report

REPOSITORY = Path(__file__).resolve().parents[2]
JOBS = REPOSITORY / "examples" / "walkthrough"


class Place:
    """A folder with the examples in it, and commands run there."""

    def __init__(self, folder):
        self.folder = folder
        self.shown = ""
        shutil.copytree(JOBS, folder / "examples" / "walkthrough")

    def run(self, *words):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "shardwise.launch.cli", *words],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "XDG_STATE_HOME": str(self.folder / "state")},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def train(self, name, *overrides):
        return self.run("train", f"examples/walkthrough/{name}.yaml", *overrides, "--run-dir", f"runs/{name}")

    def report(self, name) -> Report:
        return codec.read(self.folder / "runs" / name / "report.json", Report)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    made = Place(tmp_path_factory.mktemp("walkthrough"))
    made.train("1-pretrain")
    made.run("export", "runs/1-pretrain", "my-base")
    made.shown = made.run("data", "examples/walkthrough/2-chat.yaml")
    made.train("2-chat", "train.epochs=6")
    made.run("export", "runs/2-chat", "my-chat")
    made.train("5-preferences")
    for name in ("3-lora", "4-qlora", "6-extensions"):
        made.train(name, "train.epochs=1")
    made.run("export", "runs/4-qlora", "my-qlora", "--merge")
    return made


@pytest.mark.parametrize("name", ["1-pretrain", "2-chat", "3-lora", "4-qlora", "5-preferences", "6-extensions"])
def test_a_job_ends_as_it_should_and_learns(place, name):
    report = place.report(name)
    assert report.ending is Ending.FINISHED and report.incidents == ()
    first, *_, last = report.evaluations
    assert last.loss < first.loss


def test_the_data_is_shown_with_what_is_learned_told_apart(place):
    assert "sft" in place.shown and "assistant" in place.shown
    learned = [line for line in place.shown.splitlines() if line.startswith("learned |")]
    assert learned and not any("<|im_start|>" in line or "What is" in line for line in learned)


def test_chats_add_their_tokens_and_the_export_has_them_and_the_template(place):
    config = json.loads((place.folder / "my-chat" / "config.json").read_text())
    assert config["vocab_size"] == 4160
    added = json.loads((place.folder / "my-chat" / "tokenizer.json").read_text())["added_tokens"]
    assert {"<|im_start|>", "<|im_end|>"} <= {token["content"] for token in added}
    assert "<|im_start|>" in (place.folder / "my-chat" / "chat_template.jinja").read_text()
    assert place.report("2-chat").evaluations[-1].accuracy > 0.2


@pytest.mark.parametrize(("name", "in_4_bit"), [("3-lora", ""), ("4-qlora", "28 of nf4")])
def test_adapters_on_such_a_base_are_what_was_trained(place, name, in_4_bit):
    verified = place.report(name).verified
    assert verified is not None
    assert verified.facts["adapters"] == "float32, on 28 layers"
    assert verified.facts.get("4-bit layers", "")[: len("28 of nf4")] == in_4_bit


def test_preferences_are_told_apart_better_than_by_chance(place):
    first, *_, last = place.report("5-preferences").evaluations
    assert last.reward_accuracy > 0.5
    assert last.reward_margin > first.reward_margin > -1


def test_the_extensions_file_reads_the_rows_is_told_of_steps_and_kept_with_the_run(place):
    rows = [json.loads(line) for line in (JOBS / "support_log.jsonl").read_text().splitlines()]
    plan = json.loads((place.folder / "runs" / "6-extensions" / "plan.json").read_text())
    num_used = sum(row["rating"] >= 3 for row in rows)
    assert 0.8 * num_used <= plan["data"]["num_documents"] <= num_used
    logs = "".join(path.read_text() for path in (place.folder / "runs" / "6-extensions" / "attempts").rglob("*.log"))
    assert "step 2: loss" in logs
    (retained,) = (place.folder / "runs" / "6-extensions" / "extensions").iterdir()
    assert retained.read_bytes() == (JOBS / "support_log.py").read_bytes()
