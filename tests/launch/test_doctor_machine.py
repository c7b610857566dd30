"""`doctor` on machines whose kernel, disks, Python or environment stand in the way."""

import os
from pathlib import Path

import pytest
from doctor_factory import CUDA_13, BrokenMachine, add_package, told
from msgspec.structs import replace
from small_disk import mounted_disk

from launch.doctor_finding import Level, diagnosis_of
from launch.doctor_limits import SharedMemory, judge_shared_memory
from launch.doctor_python import judge_python
from trainer.spec.errors import ExitCode
from trainer.spec.units import GIB, MIB

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max file size             {file}               unlimited            bytes
Max core file size        {core}               unlimited            bytes
Max processes             {processes}          96365                processes
Max open files            {files}              {files_hard}         files
Max locked memory         {locked}             8388608              bytes
Max address space         {addresses}          unlimited            bytes
"""
USUAL = {
    "file": "unlimited", "core": "0", "processes": "96365", "files": "20000", "files_hard": "524288",
    "locked": "8388608", "addresses": "unlimited",
}  # fmt: skip
CGROUP_2 = "30 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


@pytest.fixture
def broken(tmp_path):
    machine = BrokenMachine(tmp_path)
    machine.write("proc/self/limits", LIMITS.format(**USUAL))
    return machine


def limited(broken, **changes: str) -> None:
    broken.write("proc/self/limits", LIMITS.format(**{**USUAL, **changes}))


def test_usual_limits_are_fine(broken):
    found = broken.diagnose("memory", "open-files", "processes", "locked-memory", "other-limits")
    assert (found.num_faults, found.num_warnings) == (0, 0)
    assert ("locked memory: 8 MiB; only offload_nvme needs more", None) in told(found, Level.FINE)
    assert ("57.2 GiB of 62.5 GiB of RAM are available; no swap", None) in told(found, Level.FINE)


def test_a_container_with_the_shared_memory_that_docker_gives():
    shared = SharedMemory(total_bytes=64 * MIB, free_bytes=64 * MIB)
    larger = "docker run --shm-size=16g (or --ipc=host); elsewhere: sudo mount -o remount,size=50% /dev/shm"
    expected = [("/dev/shm has 64 MiB; NCCL shares memory there", larger)]
    several, one = (diagnosis_of(judge_shared_memory(shared, num_gpus=number)) for number in (8, 1))
    assert told(several, Level.FAULT) == told(one, Level.WARNING) == expected
    assert (several.exit_code, one.exit_code) == (ExitCode.ENVIRONMENT, ExitCode.DONE)


def test_shared_memory_that_is_full_or_not_there(broken):
    full = SharedMemory(total_bytes=16 * GIB, free_bytes=MIB)
    assert told(diagnosis_of(judge_shared_memory(full, num_gpus=0)), Level.WARNING) == [
        ("/dev/shm has 1 MiB free of 16 GiB", "ls -l /dev/shm shows what ended processes left; remove that")
    ]
    assert told(broken.diagnose("shared-memory"), Level.FAULT) == [
        ("/dev/shm is not there", "sudo mount -t tmpfs tmpfs /dev/shm")
    ]


@pytest.mark.parametrize(("files", "level"), [("128", Level.FAULT), ("512", Level.WARNING)])
def test_too_few_open_files(broken, files, level):
    limited(broken, files=files)
    assert told(broken.diagnose("open-files"), level) == [
        (
            f"a process may have {files} files open; 1024 are usual for no GPUs",
            "ulimit -n 65536; for good: nofile in /etc/security/limits.conf, --ulimit nofile=65536 for a container",
        )
    ]


def test_a_container_that_may_start_few_processes(broken):
    broken.write("sys/fs/cgroup/pids.max", "100\n")
    found = broken.diagnose("processes")
    assert told(found, Level.FAULT) == [
        ("100 processes and threads are allowed in this control group", "docker run --pids-limit=-1")
    ]
    assert found.exit_code is ExitCode.ENVIRONMENT


def test_a_user_who_may_start_few_processes(broken):
    limited(broken, processes="1000")
    assert told(broken.diagnose("processes"), Level.WARNING) == [
        (
            "1000 processes and threads are allowed for this user",
            "ulimit -u 65536, or nproc in /etc/security/limits.conf",
        )
    ]


def test_infiniband_without_memory_to_lock(broken):
    broken.write("sys/class/infiniband/mlx5_0/node_type", "1: CA\n")
    ((sentence, fix),) = told(broken.diagnose("locked-memory"), Level.WARNING)
    assert sentence == "8 MiB may be locked in RAM, and there is InfiniBand, which locks its buffers"
    assert fix.startswith("ulimit -l unlimited")


def test_addresses_files_and_cores_that_are_limited_the_wrong_way(broken):
    broken.install_gpu()
    broken.write("proc/sys/kernel/core_pattern", "core.%p\n")
    limited(broken, addresses="1073741824", file="1048576", core="unlimited")
    found = broken.diagnose("other-limits")
    assert told(found, Level.FAULT) == [
        (
            "a process may have 1 GiB of addresses (ulimit -v); CUDA reserves more than all RAM and GPU memory",
            "ulimit -v unlimited",
        )
    ]
    assert [fix for _, fix in told(found, Level.WARNING)] == ["ulimit -f unlimited", "ulimit -c 0"]
    broken.write("proc/sys/kernel/core_pattern", "|/usr/lib/systemd/systemd-coredump\n")
    assert [fix for _, fix in told(broken.diagnose("other-limits"), Level.WARNING)] == ["ulimit -f unlimited"]


def test_a_control_group_that_has_a_part_of_the_memory(broken):
    broken.write("proc/self/cgroup", "0::/\n")
    broken.write("proc/self/mountinfo", CGROUP_2)
    broken.write("sys/fs/cgroup/memory.max", str(4 * GIB))
    broken.write("sys/fs/cgroup/memory.current", str(GIB // 2))
    ((sentence, fix),) = told(broken.diagnose("memory"), Level.WARNING)
    assert sentence == "this control group may use 4 GiB of 62.5 GiB of RAM; what goes over is killed"
    assert "docker run --memory" in fix


def test_memory_that_others_hold(broken):
    broken.write("proc/meminfo", "MemTotal: 65536000 kB\nMemAvailable: 1048576 kB\n")
    ((sentence, fix),) = told(broken.diagnose("memory"), Level.WARNING)
    assert sentence == "1 GiB of RAM are available; loading torch and a small model takes 2 GiB"
    assert fix == "end what holds it: ps aux --sort=-rss | head"


def test_wsl_says_what_windows_does_differently(broken):
    broken.install_gpu()
    broken.write("proc/version", "Linux version 6.6.87.2-microsoft-standard-WSL2\n")
    broken.write("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 8000000 kB\n")
    broken.write("mnt/c/Users/ada/.wslconfig", "[wsl2]\nmemory=8GB\n")
    broken.write("proc/self/mountinfo", "40 22 0:50 / /mnt/c rw - 9p C:\\134 rw\n")
    broken.changes["working"] = Path("/mnt/c/work")
    spilling, ram, disk = told(broken.diagnose("wsl"), Level.WARNING)
    assert "moves GPU memory to RAM instead of failing" in spilling[0] and "Prefer No Sysmem Fallback" in spilling[1]
    assert ram[0].startswith("WSL has 8 GiB of RAM (memory=8GB in ") and ram[0].endswith("pin 4 GiB of it for offload")
    assert ram[1] == "[wsl2] memory=SIZE in %UserProfile%\\.wslconfig, then wsl --shutdown"
    assert disk[0].startswith("/mnt/c/work lies on a disk of Windows") and disk[1].startswith("move it below the home")


def test_without_wsl_nothing_is_said_of_it(broken):
    assert broken.diagnose("wsl").findings == ()


def test_a_cache_that_is_a_file(broken):
    (broken.folder / "cache").write_text("")
    found = broken.diagnose("folders")
    assert told(found, Level.FAULT) == [
        (
            f"the cache cannot be written: {broken.folder}/cache is a file",
            "export SHARDWISE_CACHE=/a/folder, or folders: {cache: /a/folder} in config.yaml",
        )
    ]
    assert found.exit_code is ExitCode.ENVIRONMENT


def test_a_hub_cache_that_is_a_link_to_a_disk_that_is_gone(broken):
    (broken.home / ".cache").mkdir()
    (broken.home / ".cache" / "huggingface").symlink_to("/gone/disk")
    broken.environment["HF_HOME"] = f"{broken.home}/.cache/huggingface"
    ((sentence, fix),) = told(broken.diagnose("folders"), Level.FAULT)
    assert sentence == (
        f"the hub's cache cannot be written: {broken.home}/.cache/huggingface is a link to /gone/disk, which is not "
        "there"
    )
    assert fix == "export HF_HOME=/a/folder, or folders: {huggingface: /a/folder} in config.yaml"


def test_temporary_files_that_have_no_folder(broken):
    broken.environment["TMPDIR"] = "/proc/nowhere"
    ((sentence, fix),) = told(broken.diagnose("folders"), Level.FAULT)
    assert sentence.startswith("temporary files cannot be written: /proc: ") and fix == "export TMPDIR=/a/folder"


def test_a_disk_and_a_home_that_are_full(broken, tmp_path):
    with mounted_disk(tmp_path / "small", "2m") as small:
        broken.environment |= {"SHARDWISE_CACHE": str(small / "cache"), "HOME": str(small)}
        found = broken.diagnose("room", "home")
        faults = told(found, Level.FAULT)
    assert (
        f"{small}/cache: 2 MiB are free; the cache needs more than that",
        "make room (shardwise cache --prune, hf cache prune), or name another folder",
    ) in faults
    assert (
        f"the home directory is full: {small}: 2 MiB are free",
        f"du -xh {small} | sort -h | tail shows what fills it",
    ) in faults


def test_folders_on_disks_that_are_slow_or_only_read(broken):
    broken.write(
        "proc/self/mountinfo",
        f"40 22 0:50 / {broken.folder}/cache rw - cifs //nas/share rw\n"
        f"41 22 0:51 / {broken.working} ro - ext4 /dev/sdb1 ro\n"
        f"42 22 0:52 / {broken.home} rw - nfs4 nas:/home rw\n",
    )
    found = broken.diagnose("mounts")
    assert told(found, Level.FAULT) == [
        (
            f"the output ({broken.working}) lies on {broken.working}, which is mounted read-only",
            "name another folder with output or --run-dir, or make it yours: sudo chown $USER FOLDER",
        )
    ]
    assert told(found, Level.WARNING) == [
        (
            f"the cache ({broken.folder}/cache) lies on cifs of //nas/share, which is slow for many small files",
            "export SHARDWISE_CACHE=/a/folder, or folders: {cache: /a/folder} in config.yaml",
        )
    ]
    assert any("lies on nfs4 of nas:/home, which other machines see too" in text for text, _ in told(found, Level.FINE))


def test_a_model_of_the_hub_whose_files_are_gone(broken):
    broken.environment["HF_HUB_CACHE"] = str(broken.folder / "hub")
    snapshot = broken.folder / "hub" / "models--org--name" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/gone")
    assert told(broken.diagnose("hub-cache"), Level.FAULT) == [
        (
            f"model/org/name in {broken.folder}/hub is broken: 1 file of it is a link to nothing",
            "hf cache rm model/org/name, and fetch it again",
        )
    ]


def test_a_file_that_is_named_as_a_module_is(broken):
    (broken.working / "trainer.py").write_text("")
    (broken.working / "yaml.py").write_text("")
    found = broken.diagnose("shadowed-modules")
    assert told(found, Level.WARNING) == [
        (
            f"{broken.working}/{name}.py has the name of the module {name}; ranks are kept from it, other programs "
            "started here are not",
            f"rename it: mv {broken.working}/{name}.py {broken.working}/my_{name}.py",
        )
        for name in ("trainer", "yaml")
    ]
    assert found.exit_code is ExitCode.DONE


def test_a_file_that_comes_before_a_library_breaks_every_run(broken):
    folder = broken.add_module("yaml", "")
    found = broken.diagnose("shadowed-modules")
    assert told(found, Level.FAULT) == [
        (
            f"{folder}/yaml.py comes before the module yaml: PYTHONPATH names its folder",
            f"rename it, or take {folder} out of PYTHONPATH",
        )
    ]
    assert found.exit_code is ExitCode.ENVIRONMENT


def test_packages_that_a_module_system_puts_first(broken, tmp_path):
    folder = tmp_path / "easybuild" / "site-packages"
    add_package(folder, "numpy", "1.26.0")
    (folder / "numpy").mkdir()
    (folder / "numpy" / "__init__.py").touch()
    broken.environment["PYTHONPATH"] = str(folder)
    assert told(broken.diagnose("shadowed-modules"), Level.WARNING) == [
        (
            f"PYTHONPATH names {folder}: its numpy come before those of this environment",
            "unset PYTHONPATH, or unload the environment module that set it (module purge)",
        )
    ]


def test_gpus_that_a_variable_hides(broken):
    broken.install_gpu()
    broken.environment["CUDA_VISIBLE_DEVICES"] = ""
    assert told(broken.diagnose("variables"), Level.WARNING) == [
        (
            "CUDA_VISIBLE_DEVICES='' hides GPU 0 (NVIDIA H100 80GB HBM3): training runs on the CPU",
            "unset CUDA_VISIBLE_DEVICES",
        )
    ]


def test_a_home_of_python_without_a_python(broken):
    broken.environment["PYTHONHOME"] = "/nowhere"
    assert told(broken.diagnose("variables"), Level.FAULT) == [
        ("PYTHONHOME=/nowhere: no Python of this version is there", "unset PYTHONHOME")
    ]


def test_libraries_of_another_cuda_that_are_loaded_first(broken):
    folder = broken.folder / "cuda-11.8" / "lib64"
    folder.mkdir(parents=True)
    (folder / "libcudart.so.11.0").touch()
    broken.environment["LD_LIBRARY_PATH"] = f"/usr/lib:{folder}"
    ((sentence, fix),) = told(broken.diagnose("variables", torch=CUDA_13), Level.WARNING)
    assert sentence == (
        f"LD_LIBRARY_PATH holds {folder}, which is of CUDA 11.0; torch is built for CUDA 13.0 and brings its own"
    )
    assert fix == "unset LD_LIBRARY_PATH, or take this folder out of it"
    assert told(broken.diagnose("variables", torch=replace(CUDA_13, cuda="11.8")), Level.WARNING) == []


def test_variables_that_slow_training_down(broken):
    (broken.folder / "file").touch()
    broken.environment |= {
        "CUDA_LAUNCH_BLOCKING": "1",
        "NCCL_P2P_DISABLE": "1",  # of no account with one device
        "TORCH_DISTRIBUTED_DEBUG": "OFF",
        "TORCH_EXTENSIONS_DIR": str(broken.folder / "file"),
        "CUDA_HOME": "/nowhere",
    }
    assert told(broken.diagnose("variables"), Level.WARNING) == [
        (
            "CUDA_LAUNCH_BLOCKING=1: each kernel is waited for, which is slow",
            "unset CUDA_LAUNCH_BLOCKING, unless a fault here asks for it",
        ),
        (
            f"TORCH_EXTENSIONS_DIR={broken.folder}/file cannot be written: {broken.folder}/file is a file (runs use a "
            "folder of their own)",
            "unset TORCH_EXTENSIONS_DIR",
        ),
        ("CUDA_HOME=/nowhere: no such folder", "unset CUDA_HOME"),
    ]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core is all there is")
def test_one_thread_for_everything(broken):
    broken.environment["OMP_NUM_THREADS"] = "1"
    ((sentence, fix),) = told(broken.diagnose("variables"), Level.WARNING)
    assert sentence.startswith("OMP_NUM_THREADS=1: export, import and chat use one of")
    assert fix == "unset OMP_NUM_THREADS"


def test_a_library_that_is_older_than_shardwise_takes(broken, tmp_path, monkeypatch):
    add_package(tmp_path / "old", "accelerate", "0.1.0")
    monkeypatch.syspath_prepend(tmp_path / "old")
    found = broken.diagnose("libraries")
    ((sentence, fix),) = told(found, Level.FAULT)
    assert sentence.startswith("accelerate 0.1.0 is installed; shardwise ") and ">=1.15" in sentence
    assert fix == "pip install 'accelerate>=1.15'"
    assert found.exit_code is ExitCode.ENVIRONMENT


def test_a_python_that_shardwise_does_not_run_on():
    assert told(diagnosis_of(judge_python((3, 14), python="/usr/bin/python3")), Level.FAULT) == [
        (
            "this is Python 3.14 (/usr/bin/python3); shardwise runs on 3.11 to 3.13",
            "make an environment of its own: python3.12 -m venv .venv, or sh launch/bootstrap.sh install",
        )
    ]


def test_a_machine_without_a_compiler(broken, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = broken.diagnose("compiler", "libaio")
    assert told(found, Level.WARNING) == [
        (
            "DeepSpeed's cpu_adam must be compiled on this machine, and there is no C++ compiler (no-such-compiler)",
            "apt install g++ (Debian, Ubuntu) or dnf install gcc-c++ (Fedora, RHEL)",
        )
    ]


def test_a_machine_without_pythons_headers_or_libaio(broken, monkeypatch):
    monkeypatch.setenv("CXX", str(broken.install("c++", "! grep -q Python.h")))
    ((sentence, fix),) = told(broken.diagnose("compiler", "libaio"), Level.WARNING)
    assert "Python's headers are missing" in sentence and "apt install python3." in fix
    monkeypatch.setenv("CXX", str(broken.install("c++", "! grep -q libaio.h")))
    ((sentence, fix),) = told(broken.diagnose("compiler", "libaio"), Level.WARNING)
    assert "libaio is missing" in sentence
    assert (
        fix
        == "apt install libaio-dev (Debian, Ubuntu) or dnf install libaio-devel (Fedora, RHEL); offload_nvme needs it"
    )


def test_no_ninja(broken):
    broken.changes["python"] = str(broken.folder / "bin" / "python")
    broken.environment["PATH"] = str(broken.laid_out.programs)
    assert told(broken.diagnose("ninja"), Level.WARNING) == [
        (
            "ninja is neither beside Python nor on PATH: no operator can be built",
            f"{broken.folder}/bin/python -m pip install ninja",
        )
    ]


def test_a_lock_that_a_killed_build_left_behind(broken):
    lock = broken.home / ".cache" / "torch_extensions" / "py311_cu130" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w"):
        assert told(broken.diagnose("build-locks"), Level.WARNING) == []  # its build is at work
    assert told(broken.diagnose("build-locks"), Level.WARNING) == [
        (
            f"{lock} was left by a build that was killed; another program that uses cpu_adam waits for it for ever "
            "(shardwise removes its own)",
            f"rm {lock}",
        )
    ]
