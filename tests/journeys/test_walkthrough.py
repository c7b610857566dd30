"""The jobs of docs/walkthrough.md, of fewer epochs, and the notebook are executed, beside the other documents."""

import json
import shutil
import warnings
from pathlib import Path

import nbformat
import pytest
from workplace_factory import LIMIT_S, make_workplace

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.report import Ending, Report

pytestmark = [pytest.mark.long, pytest.mark.documents]
EXAMPLES = Path(__file__).parents[2] / "examples"
WALKTHROUGH = EXAMPLES / "walkthrough"


@pytest.mark.timeout(1800)
def test_the_jobs_of_the_walkthrough_learn_one_after_the_other(tmp_path: Path) -> None:
    there = make_workplace(tmp_path / "walkthrough")
    shutil.copytree(WALKTHROUGH, there.folder / "examples" / "walkthrough")

    def train(name: str, *overrides: str) -> Report:
        there.run("train", f"examples/walkthrough/{name}.yaml", *overrides, "--run-dir", f"runs/{name}")
        report = codec.read(there.folder / "runs" / name / "report.json", Report)
        assert report.ending is Ending.FINISHED and report.incidents == ()
        assert report.evaluations[-1].loss < report.evaluations[0].loss
        return report

    train("1-pretrain")
    there.run("export", "runs/1-pretrain", "my-base")
    shown = there.run("data", "examples/walkthrough/2-chat.yaml").stdout
    learned = [line for line in shown.splitlines() if line.startswith("learned |")]
    assert "sft" in shown and learned and not any("<|im_start|>" in line or "What is" in line for line in learned)
    assert (train("2-chat", "train.epochs=6").evaluations[-1].accuracy or 0) > 0.2
    there.run("export", "runs/2-chat", "my-chat")
    chat = there.folder / "my-chat"
    assert json.loads((chat / "config.json").read_text())["vocab_size"] == 4160
    added = json.loads((chat / "tokenizer.json").read_text())["added_tokens"]
    assert {"<|im_start|>", "<|im_end|>"} <= {token["content"] for token in added}
    assert "<|im_start|>" in (chat / "chat_template.jinja").read_text()
    first, *_, last = train("5-preferences").evaluations
    assert last.reward_accuracy > 0.5 and last.reward_margin > first.reward_margin > -1
    for name, in_4_bit in (("3-lora", ""), ("4-qlora", "28 of nf4")):
        verified = train(name, "train.epochs=1").verified
        assert verified is not None and verified.facts["adapters"] == "float32, on 28 layers"
        assert verified.facts.get("4-bit layers", "")[: len("28 of nf4")] == in_4_bit
    there.run("export", "runs/4-qlora", "my-qlora", "--merge")
    train("6-extensions", "train.epochs=1")
    run_dir = there.folder / "runs" / "6-extensions"
    ratings = [json.loads(line)["rating"] for line in (WALKTHROUGH / "support_log.jsonl").read_text().splitlines()]
    num_documents = json.loads((run_dir / "plan.json").read_text())["data"]["num_documents"]
    assert 0.8 * sum(rating >= 3 for rating in ratings) <= num_documents <= sum(rating >= 3 for rating in ratings)
    assert "step 2: loss" in "".join(path.read_text() for path in (run_dir / "attempts").rglob("*.log"))
    (retained,) = (run_dir / "extensions").iterdir()
    assert retained.read_bytes() == (WALKTHROUGH / "support_log.py").read_bytes()


def test_the_notebook_executes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workplace = make_workplace(tmp_path / "work place")
    for name, value in workplace.environment.items():
        monkeypatch.setenv(name, value)
    shutil.copy(EXAMPLES / "quickstart.yaml", workplace.folder)
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its libraries
        from nbclient import NotebookClient

        place = {"metadata": {"path": str(workplace.folder)}}
        NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", resources=place).execute()
    shown = "".join(str(cell.outputs) for cell in notebook.cells if cell.cell_type == "code")
    assert "step 10 of 10" in shown and "Traceback" not in shown
