"""`import shardwise`: the same answers as the command line, as values."""

from pathlib import Path

import msgspec
import pytest
from typed_command import in_empty_home

import shardwise
from shardwise.launch.commands.ui.chats import Chats

JOB = {"model": {"config": "model", "tokenizer": "train"}, "data": {"train": "text"}, "train": {"seq_len": 32}}


@pytest.fixture(autouse=True)
def in_workplace(workplace, monkeypatch):
    monkeypatch.chdir(workplace.folder)
    in_empty_home(Path(workplace.environment["HOME"]), monkeypatch)


def test_a_plan_is_a_value_with_reasons():
    plan = shardwise.plan("job.yaml", "train.lr=1e-4", "pin.sharding=ddp", hardware="2xRTX-3090")
    assert isinstance(plan, shardwise.Plan) and plan.chosen.num_ranks == 2
    assert plan.schedule.lr == 1e-4 and plan.rejections and plan.chosen.reasons


def test_a_model_by_its_name_is_planned_as_on_the_command_line():
    plan = shardwise.plan(model="Qwen/Qwen2.5-0.5B", hardware="RTX 4090", method="lora", seq_len=512)
    assert (plan.name, plan.chosen.method, plan.chosen.seq_len) == ("qwen2.5-0.5b", "lora", 512)
    options = ("train.method=lora", "train.seq_len=512")
    assert plan.chosen == shardwise.plan("Qwen/Qwen2.5-0.5B", *options, hardware="1xRTX-4090").chosen


def test_a_dict_is_a_job():
    plan = shardwise.plan(JOB, "train.steps=3", "train.lr=1e-4", hardware="RTX 4090")
    assert (plan.schedule.num_steps, plan.schedule.lr) == (3, 1e-4)
    with pytest.raises(shardwise.ShardwiseError, match="stepz"):
        shardwise.plan({**JOB, "train": {"stepz": 3}})


def test_a_notebook_shows_the_page_of_a_plan_with_text_that_is_escaped():
    shown = msgspec.structs.replace(shardwise.plan(JOB), warnings=("<script>alert(1)</script> & more",))._repr_html_()
    assert shown.startswith('<div class="shardwise">') and shown.endswith("</div>")
    assert "fits" in shown and "<svg" in shown and "&lt;script&gt;" in shown and "<script>" not in shown


def test_training_returns_a_run_that_is_reported_exported_and_answers(capsys):
    described = shardwise.data("job.yaml")
    assert described.num_rows > 0 and "the first example" in str(described)
    run = shardwise.train(JOB, "train.steps=2", run_dir="runs/api")
    assert isinstance(run, shardwise.Report) and run.step == 2 and run.export == "export"
    printed = capsys.readouterr().out
    assert "step 2 of 2" in printed and "\x1b" not in printed and "\r" not in printed
    assert shardwise.report(run.run_dir).step == 2
    shown = run._repr_html_()
    assert "finished at step 2" in shown and 'aria-label="training and held-out loss"' in shown
    exported, final = (shardwise.export(run, "exported", check=False), Path("runs", "api", "export"))
    assert (exported / "config.json").is_file()
    assert (exported / "model.safetensors").read_bytes() == (final / "model.safetensors").read_bytes()
    assert isinstance(shardwise.chat(run, "the cat", max_new_tokens=2, temperature=0), str)
    chats = Chats()  # of the pages of shardwise ui
    for question in ("the cat", "and\nthe mat"):
        chats.begin("api", Path("runs", "api"), question).join()
    talk = chats.talk("api")
    assert [turn.question for turn in talk.turns] == ["the cat", "and\nthe mat"]
    assert "without a chat template" in talk.note
    assert talk.problem == talk.waiting == ""


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: shardwise.plan("absent.yaml"), "absent.yaml"), (lambda: shardwise.plan(), "model="),
        (lambda: shardwise.plan(model="tiny-llama", method="lorra"), '^method: train.method is "lorra"'),
        (lambda: shardwise.data(model="tiny-llama", data="text", seq_len=-1), "^seq_len: train.seq_len is -1"),
        (lambda: shardwise.plan("job.yaml", "train.lr=x"), '^train.lr is "x"'),
        (lambda: shardwise.plan("job.yaml", model="Qwen/Qwen2.5-0.5B"), "model="),
        (lambda: shardwise.report("text"), "text"), (lambda: shardwise.chat("text", "the cat"), "plan.json"),
    ],
)  # fmt: skip
def test_problems_are_shardwise_errors(call, words):
    with pytest.raises(shardwise.ShardwiseError, match=words):
        call()
