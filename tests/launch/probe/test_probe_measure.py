"""Measuring disks and devices: real files, a real subprocess, and nothing left behind."""

from pathlib import Path

import pytest
from hanging_programs import under_a_limit

from launch.probe.measure import BLOCK_BYTES, measure_device, measure_disks, measure_folder, writable_folder
from trainer.spec.hardware import Disk, Gpu, Hardware, Host, MeasuredRates
from trainer.spec.messages.measurement import Measurement
from trainer.spec.units import GIB

HOST = Host(cpu_name=None, num_cores=1, ram_bytes=None, ram_available_bytes=None)


def make_disk(path):
    return Disk(path=str(path), filesystem="ext4", total_bytes=GIB, free_bytes=GIB)


def test_a_folder_has_both_speeds_and_nothing_is_left_in_it(tmp_path):
    speed = measure_folder(tmp_path, file_bytes=2 * BLOCK_BYTES)
    assert speed is not None and speed.write_bytes_per_s > 0 and speed.read_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_memory_file_systems_that_refuse_direct_access_are_measured_too():
    folder = Path("/dev/shm")  # the one tmpfs that every Linux has
    before = set(folder.iterdir())
    assert measure_folder(folder, file_bytes=BLOCK_BYTES) is not None
    assert not [path for path in set(folder.iterdir()) - before if "shardwise" in path.name]


def test_a_short_budget_ends_after_one_block(tmp_path):
    assert measure_folder(tmp_path, file_bytes=64 * BLOCK_BYTES, budget_s=0) is not None


@pytest.mark.parametrize("folder", ["/proc/self", "/no/such/folder"])
def test_a_folder_that_refuses_a_file_is_not_measured(folder):
    assert measure_folder(Path(folder)) is None


def test_a_disk_whose_mount_point_cannot_be_written_is_measured_in_another_folder_of_it(tmp_path):
    (tmp_path / "no folder").write_text("")  # not even root may enter it
    disk = make_disk(tmp_path / "no folder")
    assert writable_folder(disk, [Path("/dev/shm"), tmp_path / "gone", tmp_path]) == tmp_path
    assert writable_folder(disk, [Path("/dev/shm")]) is None  # another disk
    assert writable_folder(make_disk(tmp_path), []) == tmp_path
    assert writable_folder(make_disk("/no/such/disk"), [tmp_path]) is None


def test_a_disk_that_cannot_be_measured_is_named(tmp_path):
    disks, notes = measure_disks([make_disk(tmp_path), make_disk("/no/such/disk")], [])
    assert disks[0].read_bytes_per_s is not None
    assert disks[1] == make_disk("/no/such/disk")
    (note,) = notes
    assert "/no/such/disk" in note


def run_module(tmp_path, monkeypatch, body, hardware, measuring=measure_device, **changes):
    """Has a module of the given body measure `hardware`; it stands in for the one that needs torch and a GPU."""
    (tmp_path / "stand_in.py").write_text("import os, pathlib, sys, time\n" + body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return measuring(hardware, module="stand_in", **changes)


def answer_of(memory_bytes_per_s):
    return f'pathlib.Path(sys.argv[1]).write_text(\'{{"rates": {{"memory_bytes_per_s": {memory_bytes_per_s}}}}}\')\n'


def test_the_subprocess_is_told_the_device_and_the_cores(tmp_path, monkeypatch):
    body = (
        "assert sys.argv[2] == 'cpu' and os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
        "assert os.environ['OMP_NUM_THREADS'] == '1'\n" + answer_of(7)
    )
    found = run_module(tmp_path, monkeypatch, body, Hardware(gpus=(), host=HOST))
    assert found == Measurement(rates=MeasuredRates(memory_bytes_per_s=7))


def cards(*indices, **fields):
    return tuple(
        Gpu(index=index, name="x", spec_name=None, memory_bytes=GIB, uuid=f"GPU-{index}", **fields) for index in indices
    )


def test_the_subprocess_sees_one_of_the_chosen_cards(tmp_path, monkeypatch):
    body = "assert sys.argv[2] == 'cuda' and os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-2'\n" + answer_of(7)
    found = run_module(tmp_path, monkeypatch, body, Hardware(gpus=cards(2, 3), host=HOST))
    assert (found.rates.memory_bytes_per_s, found.notes) == (7, ())


@pytest.mark.parametrize(
    ("body", "fact"),
    [
        ("import no_such_library\n", "No module named 'no_such_library'"),
        ("", "nothing"),
        ("os.kill(os.getpid(), 11)\n", "code -11"),
    ],
    ids=["raises", "silent", "killed"],
)
def test_a_subprocess_that_fails_is_a_note(tmp_path, monkeypatch, body, fact):
    found = run_module(tmp_path, monkeypatch, body, Hardware(gpus=(), host=HOST))
    (note,) = found.notes
    assert found.rates == MeasuredRates() and fact in note


def test_a_subprocess_that_takes_too_long_keeps_what_it_had(tmp_path, monkeypatch):
    hardware, body = Hardware(gpus=(), host=HOST), answer_of(7) + "time.sleep(600)\n"
    found, limit_s = under_a_limit(
        lambda limit_s: run_module(tmp_path, monkeypatch, body, hardware, timeout_s=limit_s),
        lambda found: found.rates.memory_bytes_per_s == 7,
    )
    assert len(found.notes) == 1 and f"{limit_s:g} s" in found.notes[0]


@pytest.mark.cold
def test_a_file_of_the_same_name_in_the_working_folder_is_not_run(tmp_path, monkeypatch):
    (tmp_path / "trainer.py").write_text("import sys; sys.exit('the wrong trainer')\n")
    (tmp_path / "elsewhere.py").write_text("")
    monkeypatch.chdir(tmp_path)
    (note,) = measure_device(Hardware(gpus=(), host=HOST), module="elsewhere").notes
    assert "No module named elsewhere" in note
