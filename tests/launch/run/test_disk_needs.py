"""What a job still needs from a network is counted before it is fetched, and held against the room there is."""

from pathlib import Path

import pytest
from hub_kernel_factory import COMMIT, KERNEL, put_kernel
from msgspec.structs import replace
from small_disk import mounted_disk
from workplace_factory import make_workplace

from shardwise.launch.inputs.data_files import is_of_hub
from shardwise.launch.inputs.trusted_code import has_kernel
from shardwise.launch.plan.gather import read_inputs
from shardwise.launch.run.disk_needs import Need, check_room_of, missing_for
from shardwise.trainer.spec.data.profile import SourceFile
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.units import MIB


def test_what_shares_a_cache_is_added_up(tmp_path: Path):
    with mounted_disk(tmp_path / "disk", "1m") as disk:
        weights = Need("the weights of org/model", disk, MIB * 3 // 4, 2)
        data, here = Need("the data of org/rows", disk, MIB // 2, 1), Need("the data of org/more", disk, 0, 0)
        check_room_of([weights, here])
        with pytest.raises(EnvironmentFaultError, match=r"org/model.*org/rows"):
            check_room_of([weights, data, here])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/rows", True), ("org/rows@v1", True), ("python-stdlib", False), ("here", False), ("org/rows.jsonl", False),
        ("/nowhere/at/all", False),
    ],
)  # fmt: skip
def test_only_what_nothing_here_is_called_is_looked_for_on_the_hub(tmp_path: Path, monkeypatch, source, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").touch()
    assert is_of_hub(source) is expected


def test_what_is_missing_is_said_in_words(tmp_path: Path, monkeypatch):
    place = make_workplace(tmp_path / "place")
    monkeypatch.chdir(place.folder)
    inputs = read_inputs(place.job, (), environment=place.environment)
    assert missing_for(inputs) == ()
    address = "hf://datasets/org/rows@main/a.jsonl"
    remote = SourceFile(path=address, size_bytes=9, mtime_ns=0, hub=address)
    lacking = inputs._replace(
        model=replace(inputs.model, needs_download=True, repository="org/model"),
        request=replace(inputs.request, files=(remote, *inputs.request.files), eval_files=(remote,)),
    )
    (data,) = missing_for(inputs._replace(request=replace(inputs.request, eval_files=(remote,))))
    missing = missing_for(lacking, kernel=KERNEL, environment={"KERNELS_CACHE": str(tmp_path / "kernels")})
    assert "org/rows" in data and len(missing) == 3
    assert all(name in text for name, text in zip(("org/model", "org/rows", KERNEL), missing, strict=True))


def test_a_kernel_is_here_once_a_build_of_its_commit_is(tmp_path: Path):
    environment = {"HF_HOME": str(tmp_path)}
    assert not has_kernel(KERNEL, environment)
    put_kernel(tmp_path / "hub", "f" * 40)
    assert not has_kernel(KERNEL, environment), "another commit"
    put_kernel(tmp_path / "hub", COMMIT)
    assert has_kernel(KERNEL, environment)
    assert not has_kernel(KERNEL, environment | {"KERNELS_CACHE": str(tmp_path / "elsewhere")})
