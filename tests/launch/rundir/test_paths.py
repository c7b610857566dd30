"""Run directories are never shared, overwritten or guessed."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shardwise.launch.rundir import paths as run_dir
from shardwise.trainer.spec.errors import InputError

NOON = datetime(2030, 1, 2, 12, 0, 0, tzinfo=UTC)


def test_runs_are_named_by_utc_time_attempts_are_numbered_on_and_committed_checkpoints_count(tmp_path: Path):
    made = [run_dir.make_run_dir(tmp_path / "bot", now=NOON).name for _ in range(2)]
    assert made == ["bot-20300102-120000", "bot-20300102-120000-2"]
    assert run_dir.output_base("elsewhere/bot", "job") == Path("elsewhere/bot")
    assert run_dir.output_base(None, "job") == Path("runs/job")
    for name in ("step-00000003", "step-00000010", "step-00000020", ".tmp-step-00000030-ab"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for name in ("step-00000003", "step-00000010", ".tmp-step-00000030-ab"):
        (tmp_path / "checkpoints" / name / "MANIFEST.json").write_text("{}")
    assert [path.name for path in run_dir.committed_checkpoints(tmp_path)] == ["step-00000003", "step-00000010"]
    assert run_dir.committed_checkpoints(tmp_path / "none") == []
    assert run_dir.next_attempt(tmp_path) == 1
    (tmp_path / "attempts" / "9").mkdir(parents=True)
    (tmp_path / "attempts" / "10").mkdir()
    assert run_dir.next_attempt(tmp_path) == 11


def test_an_empty_directory_is_used_and_no_file_and_no_used_one_without_resume_or_its_script(tmp_path: Path):
    for _ in range(2):
        assert run_dir.use_run_dir(tmp_path / "a" / "b").is_dir()
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "train.sbatch").touch()
    continues = re.escape(f"sbatch '{tmp_path}/a run/train.sbatch' continues it")
    cases = {tmp_path: "--resume", tmp_path / "plan.json": "plan.json", tmp_path / "a run": continues}
    for path, fact in cases.items():
        with pytest.raises(InputError, match=fact):
            run_dir.use_run_dir(path)
    assert (tmp_path / "plan.json").read_text() == "{}"


def test_resume_finds_the_newest_run_of_exactly_this_name(tmp_path: Path):
    for name in ("bot-20300101-000000", "bot-20300102-000000", "bot-b-20300104-000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text("{}")
    (tmp_path / "bot-20300103-000000").mkdir()
    assert run_dir.find_run_dir(tmp_path / "bot").name == "bot-20300102-000000"
    (tmp_path / "new-20300104-000000").mkdir()
    assert run_dir.find_run_dir(tmp_path / "new").name == "new-20300104-000000", "killed before its plan was written"
    for missing in (tmp_path / "other", tmp_path / "missing" / "other"):
        with pytest.raises(InputError, match=str(missing)):
            run_dir.find_run_dir(missing)
