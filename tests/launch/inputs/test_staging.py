"""Copies on a node's own disk: whole or not there, of the source as it is, and only where the job asks."""

import os
from pathlib import Path

import pytest
from engine_plan_factory import engine_plan
from msgspec.structs import replace
from small_disk import mounted_disk

from shardwise.launch.inputs.staging import copy_staged, with_stages
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job.sections import Job, SlurmJob, Stage
from shardwise.trainer.spec.plan import Plan


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """As a hub keeps a model: a folder of links."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (blobs / name).write_text(name * 100)
        (snapshot / name).symlink_to(blobs / name)
    return snapshot


def plan_for(source: Path, *stages: Stage) -> Plan:
    plan = engine_plan(Sharding.NONE, job=Job(slurm=SlurmJob(stage=stages)))
    return replace(plan, model_path=str(source), data=replace(plan.data, cache_dir=str(source.parent)))


def test_a_copy_holds_the_files_and_no_links(source, tmp_path):
    plan = with_stages(plan_for(source, Stage.MODEL), tmp_path / "scratch")
    lines: list[str] = []
    copy_staged(plan.staged, on_progress=lines.append)
    place = Path(plan.place_of(str(source)))
    assert place.is_relative_to(tmp_path / "scratch") and place.name == "abc"
    assert {path.name: path.read_text() for path in place.iterdir()} == {
        path.name: path.read_text() for path in source.iterdir()
    }
    assert not any(path.is_symlink() for path in place.iterdir()) and "copying" in lines[0]
    copy_staged(plan.staged, on_progress=lines.append)
    assert len(lines) == 2, "copied again"
    assert plan.model_path == str(source), "the plan names what was trained, not the copy"


def test_a_copy_that_was_cut_off_is_made_anew_and_one_of_a_source_that_changed_has_another_place(source, tmp_path):
    plan = with_stages(plan_for(source, Stage.MODEL), tmp_path / "scratch")
    place = Path(plan.place_of(str(source)))
    half = place.with_name(f".{place.name}.part")
    half.mkdir(parents=True)
    (half / "model.safetensors").write_text("half")
    copy_staged(plan.staged, on_progress=print)
    assert (place / "model.safetensors").read_text() == "model.safetensors" * 100 and not half.exists()
    before = with_stages(plan_for(source, Stage.DATA), tmp_path / "scratch").staged
    os.utime(source / "config.json", ns=(1, 1))
    assert with_stages(plan_for(source, Stage.DATA), tmp_path / "scratch").staged != before
    assert list(before) == [str(source.parent)]


def test_without_a_scratch_folder_the_job_is_refused_and_a_disk_without_room_is_named_with_both_sizes(source, tmp_path):
    with pytest.raises(InputError, match=r"slurm\.stage: .*folders: \{scratch: "):
        with_stages(plan_for(source, Stage.MODEL), None)
    (source / "weights.bin").write_bytes(bytes(300 << 10))
    with mounted_disk(tmp_path / "small", "256k") as disk:
        plan = with_stages(plan_for(source, Stage.MODEL), disk)
        with pytest.raises(EnvironmentFaultError, match=r" 30\d KiB.*/small .* 2\d\d KiB"):
            copy_staged(plan.staged, on_progress=print)
