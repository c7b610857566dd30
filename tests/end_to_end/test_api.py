"""`import shardwise`: the same answers as the command line, as values."""

import pytest

import shardwise


@pytest.fixture(autouse=True)
def in_workplace(workplace, monkeypatch):
    monkeypatch.chdir(workplace.folder)
    for name in ("HOME", "SHARDWISE_CACHE"):
        monkeypatch.setenv(name, workplace.environment[name])
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "SHARDWISE_SITE_CONFIG"):  # would lead out of that home
        monkeypatch.delenv(name, raising=False)


def test_a_plan_is_a_value_with_reasons():
    plan = shardwise.plan("job.yaml", "train.lr=1e-4", hardware="2xRTX-3090")
    assert isinstance(plan, shardwise.Plan) and plan.chosen.num_ranks == 2
    assert plan.schedule.lr == 1e-4 and plan.rejections and plan.chosen.reasons


def test_training_returns_the_report(capsys):
    report = shardwise.train("job.yaml", "train.steps=2", run_dir="runs/api")
    assert isinstance(report, shardwise.Report) and report.step == 2 and report.export == "export"
    assert "step 2 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: shardwise.plan("absent.yaml"), "absent.yaml"),
        (lambda: shardwise.plan("job.yaml", vram="8 apples"), "8 apples"),
        (lambda: shardwise.plan("job.yaml", hardware="8xH300"), "H200"),
    ],
)
def test_problems_are_shardwise_errors(call, words):
    with pytest.raises(shardwise.ShardwiseError, match=words):
        call()
