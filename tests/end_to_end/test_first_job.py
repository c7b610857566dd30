"""The job that `shardwise init` writes trains: a few hundred chats lower the held-out loss, on the defaults alone."""

import pytest
from workplace_factory import Workplace, make_workplace, read_metrics, write_chats


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    made = make_workplace(tmp_path_factory.mktemp("first"))
    made.job.unlink()
    return made


def test_400_chats_on_a_written_job_lower_the_held_out_loss(place: Workplace) -> None:
    write_chats(place.folder / "chats.jsonl", 400)
    found = place.run("init", "--model", "model", "--data", "chats.jsonl").stdout
    assert all(fact in found for fact in ("llama", "128 positions", "sft on chats", "chat template chatml")), found
    planned = place.run("plan", "job.yaml").stdout
    trained = place.run("train", "job.yaml").stdout
    assert "WARNING" not in planned + trained
    losses = [line["eval_loss"] for _, line in sorted(read_metrics(place.only_run()).items()) if "eval_loss" in line]
    assert max(read_metrics(place.only_run())) >= 100
    assert losses[-1] < 0.8 * losses[0]


def test_a_run_of_one_step_is_a_warning_on_the_first_screen(place: Workplace) -> None:
    few = ("train.epochs=0.001", "train.tokens_per_step=8192")
    assert "WARNING: 1 optimizer step " in place.run("plan", "job.yaml", *few).stdout
    before = sorted((place.folder / "runs").iterdir())
    shown = place.run("train", "job.yaml", *few, "--hardware", "2xCPU", "--dry-run").stdout
    assert "WARNING: 1 optimizer step " in shown and "on 2 ranks" in shown
    assert sorted((place.folder / "runs").iterdir()) == before, "a dry run leaves nothing behind"
