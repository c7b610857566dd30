"""`doctor` on machines whose disks, loopback, libraries, compiler or Slurm stand in the way."""

from importlib import metadata

import pytest
from doctor_factory import BrokenMachine, add_package, assert_reported, reported
from msgspec.structs import replace
from network_factory import needs_own_network, without_loopback
from small_disk import mounted_disk

from shardwise.launch.doctor.checks import CACHE, HUB_CACHE, OUTPUT, check_shared_memory, check_slurm
from shardwise.launch.doctor.finding import Level, diagnosis_of
from shardwise.trainer.spec.units import GIB, MIB


@pytest.fixture
def broken(tmp_path):
    return BrokenMachine(tmp_path)


@pytest.mark.parametrize(
    ("total", "num_gpus", "level", "facts"),
    [
        (None, 0, Level.FAULT, ("sudo mount -t tmpfs tmpfs /dev/shm",)),
        (64 * MIB, 8, Level.FAULT, ("64 MiB", "--shm-size=16g", "sudo mount -o remount,size=50% /dev/shm")),
        (64 * MIB, 1, Level.WARNING, ("64 MiB", "--shm-size=16g")),
        (16 * GIB, 8, Level.FINE, ("16 GiB",)),
    ],
)
def test_shared_memory_that_is_missing_or_small(broken, total, num_gpus, level, facts):
    broken.install_gpu()
    machine = broken.read()
    hardware = replace(
        machine.hardware, gpus=num_gpus * machine.hardware.gpus, host=replace(machine.hardware.host, shm_bytes=total)
    )
    found = diagnosis_of(check_shared_memory(replace(machine, hardware=hardware)))
    assert_reported(found, level, facts)


def test_folders_that_cannot_be_written(broken):
    (broken.folder / "cache").write_text("")
    (broken.home / "hf").symlink_to("/missing/disk")
    broken.folders |= {OUTPUT: broken.folder / "proc", HUB_CACHE: broken.home / "hf" / "hub"}
    (broken.folder / "proc").symlink_to("/proc")
    assert_reported(
        broken.diagnose("disk"), Level.FAULT,
        (f"{broken.folder}/proc: ", "output or --run-dir", f"sudo chown $USER {broken.folder}/proc"),
        (f"{broken.folder}/cache is a file", "SHARDWISE_CACHE", "folders: {cache: ", "config.yaml"),
        (f"{broken.home}/hf", "/missing/disk", "HF_HOME", "folders: {huggingface: "),
    )  # fmt: skip


def test_a_disk_that_is_full(broken, tmp_path):
    with mounted_disk(tmp_path / "small", "2m") as small:
        broken.folders[CACHE] = small / "cache"
        faults = dict(reported(broken.diagnose("disk"), Level.FAULT))
    (room,) = [fix for sentence, fix in faults.items() if sentence.startswith(f"{small}/cache: 2 MiB")]
    assert "shardwise cache," in room and "hf cache prune" in room


@needs_own_network
def test_a_loopback_that_is_down_is_a_fault(broken):
    assert_reported(broken.diagnose("loopback"), Level.FAULT)
    without_loopback(
        lambda: assert_reported(broken.diagnose("loopback"), Level.FAULT, ("127.0.0.1", "sudo ip link set lo up"))
    )


def test_a_library_that_shardwise_does_not_accept(broken, tmp_path, monkeypatch):
    add_package(tmp_path / "old", "accelerate", "0.1.0")
    monkeypatch.syspath_prepend(tmp_path / "old")
    (line,) = (line for line in metadata.requires("shardwise") or () if line.startswith("accelerate"))
    accepted = line.partition(";")[0]
    assert_reported(broken.diagnose("libraries"), Level.FAULT, ("accelerate 0.1.0", f"pip install '{accepted}'"))


@pytest.mark.parametrize(
    ("header", "facts"),
    [
        (None, ("cpu_adam", "no-such-compiler", "apt install g++", "dnf install gcc-c++")),
        ("Python.h", ("Python's headers", "apt install python3.")),
    ],
)
def test_a_machine_without_a_compiler_or_pythons_headers(broken, monkeypatch, header, facts):
    compiler = str(broken.install("c++", f"! grep -q {header}")) if header else "no-such-compiler"
    monkeypatch.setenv("CXX", compiler)
    assert_reported(broken.diagnose("compiler"), Level.WARNING, facts)


def test_a_login_node_whose_controller_fails_and_a_machine_with_gpus_where_it_hangs(broken):
    assert broken.diagnose("slurm").findings == (), "without Slurm nothing is reported"
    broken.install("sbatch", "exit 1")
    broken.write("etc/slurm/slurm.conf", "ClusterName=test\n")
    ready = "Slurmctld(primary) at head is UP"
    broken.install("scontrol", f"echo '{ready}'")
    assert_reported(broken.diagnose("slurm"), Level.FINE, ("shardwise submit", ready))
    refused = "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)"
    broken.install("scontrol", f"echo '{refused}' >&2; exit 1")
    assert_reported(broken.diagnose("slurm"), Level.FAULT, ("scontrol ping", "controller", "administrators"))
    broken.install_gpu()
    broken.install("scontrol", "exec sleep 600")
    found = diagnosis_of(check_slurm(broken.read(), timeout_s=0.5))
    assert_reported(found, Level.WARNING, ("scontrol ping", "0.5 s"))
