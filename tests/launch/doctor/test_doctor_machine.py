"""`doctor` on machines whose kernel, disks, Python or environment stand in the way."""

from importlib import metadata
from pathlib import Path

import pytest
from doctor_factory import CUDA_13, BrokenMachine, add_package, assert_reported, reported
from msgspec.structs import replace
from small_disk import mounted_disk

from shardwise.launch.doctor.finding import Level, diagnosis_of
from shardwise.launch.doctor.software import check_python, check_variables
from shardwise.launch.doctor.system import judge_shared_memory
from shardwise.trainer.spec.units import GIB, MIB

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
    "file": "unlimited", "core": "0", "processes": "2048", "files": "20000", "files_hard": "524288",
    "locked": "8388608", "addresses": "unlimited",
}  # fmt: skip


def group(limit_bytes: int, used_bytes: int) -> dict[str, str]:
    """The files of a control group with a limit of memory."""
    return {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "30 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/memory.max": str(limit_bytes),
        "sys/fs/cgroup/memory.current": str(used_bytes),
    }


LITTLE_RAM = {"proc/meminfo": "MemTotal: 65536000 kB\nMemAvailable: 1048576 kB\n"}
INFINIBAND = {"sys/class/infiniband/mlx5_0/node_type": "1: CA\n"}
FILES_REMEDY = ("1024", "ulimit -n 65536", "/etc/security/limits.conf", "--ulimit nofile=65536")


def limited(broken, **changes: str) -> None:
    broken.write("proc/self/limits", LIMITS.format(**{**USUAL, **changes}))


@pytest.fixture
def broken(tmp_path):
    machine = BrokenMachine(tmp_path)
    limited(machine)
    return machine


def test_usual_limits_are_fine_and_elsewhere_nothing_is_reported_of_wsl(broken):
    found = broken.diagnose("memory", "open-files", "processes", "locked-memory", "other-limits", "wsl")
    assert (found.num_faults, found.num_warnings) == (0, 0)
    text = str(reported(found, Level.FINE))
    assert "8 MiB" in text and "57.2 GiB of 62.5 GiB" in text and "WSL" not in text
    broken.write("proc/self/status", "CapEff:\t0000000000004000\n")  # CAP_IPC_LOCK
    assert_reported(broken.diagnose("locked-memory"), Level.FINE, ("no limit",))


@pytest.mark.parametrize(
    ("check", "limits", "files", "level", "facts"),
    [
        ("open-files", {"files": "128"}, {}, Level.FAULT, ("128", *FILES_REMEDY)),
        ("open-files", {"files": "512"}, {}, Level.WARNING, ("512", *FILES_REMEDY)),
        ("open-files", {"files": "512", "files_hard": "4096"}, {}, Level.WARNING, ("512", "ulimit -n 4096")),
        ("processes", {}, {"sys/fs/cgroup/pids.max": "100\n"}, Level.FAULT, ("100 ", "docker run --pids-limit=-1")),
        ("processes", {"processes": "1000"}, {}, Level.WARNING, ("1000 ", "ulimit -u 65536")),
        ("locked-memory", {}, INFINIBAND, Level.WARNING, ("8 MiB", "InfiniBand", "ulimit -l unlimited")),
        ("memory", {}, group(4 * GIB, GIB // 2), Level.WARNING, ("4 GiB of 62.5 GiB", "docker run --memory")),
        ("memory", {}, group(40 * GIB, 40 * GIB - 512 * MIB), Level.WARNING, ("512 MiB", "2 GiB")),
        ("memory", {}, LITTLE_RAM, Level.WARNING, ("1 GiB", "2 GiB", "ps aux --sort=-rss | head")),
        ("shared-memory", {}, {}, Level.FAULT, ("sudo mount -t tmpfs tmpfs /dev/shm",)),
    ],
)
def test_a_limit_that_is_too_low_is_reported_with_its_remedy(broken, check, limits, files, level, facts):
    limited(broken, **limits)
    for path, text in files.items():
        broken.write(path, text)
    assert_reported(broken.diagnose(check), level, facts)


@pytest.mark.parametrize(
    ("total", "free", "num_gpus", "level", "facts"),
    [
        (64 * MIB, 64 * MIB, 8, Level.FAULT, ("64 MiB", "--shm-size=16g", "sudo mount -o remount,size=50% /dev/shm")),
        (64 * MIB, 64 * MIB, 1, Level.WARNING, ("64 MiB", "--shm-size=16g")),
        (16 * GIB, MIB, 0, Level.WARNING, ("1 MiB", "16 GiB", "ls -l /dev/shm")),
        (16 * GIB, GIB, 8, Level.FINE, ("16 GiB",)),
    ],
)
def test_shared_memory_that_is_small_or_full(total, free, num_gpus, level, facts):
    assert_reported(diagnosis_of([judge_shared_memory(total, free, num_gpus=num_gpus)]), level, facts)


def test_addresses_files_and_cores_that_are_limited_the_wrong_way(broken):
    broken.install_gpu()
    broken.write("proc/sys/kernel/core_pattern", "core.%p\n")
    limited(broken, addresses="1073741824", file="1048576", core="unlimited")
    found = broken.diagnose("other-limits")
    assert_reported(found, Level.FAULT, ("1 GiB", "ulimit -v unlimited"))
    assert_reported(found, Level.WARNING, ("ulimit -f unlimited",), ("ulimit -c 0",))
    broken.write("proc/sys/kernel/core_pattern", "|/usr/lib/systemd/systemd-coredump\n")
    assert_reported(broken.diagnose("other-limits"), Level.WARNING, ("ulimit -f unlimited",))


def test_wsl_with_a_gpu_little_memory_and_folders_of_windows(broken):
    broken.install_gpu()
    broken.write("proc/version", "Linux version 6.6.87.2-microsoft-standard-WSL2\n")
    broken.write("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 8000000 kB\n")
    broken.write("mnt/c/Users/ada/.wslconfig", "[wsl2]\nmemory=8GB\n")
    broken.write("proc/self/mountinfo", "40 22 0:50 / /mnt/c rw - 9p C:\\134 rw\n")
    broken.working = broken.changes["working"] = Path("/mnt/c/work")
    ram = ("8 GiB", "memory=8GB", "4 GiB", "[wsl2] memory=SIZE", "wsl --shutdown")
    assert_reported(broken.diagnose("wsl"), Level.WARNING, ("Prefer No Sysmem Fallback",), ram, ("/mnt/c/work",))
    assert_reported(broken.diagnose("mounts"), Level.WARNING)  # it is told once


def test_folders_that_cannot_be_written(broken):
    (broken.folder / "cache").write_text("")
    (broken.home / "hf").symlink_to("/missing/disk")
    broken.environment |= {"HF_HOME": f"{broken.home}/hf", "TMPDIR": "/proc/nowhere"}
    assert_reported(
        broken.diagnose("folders"), Level.FAULT,
        (f"{broken.folder}/cache is a file", "export SHARDWISE_CACHE=", "folders: {cache: ", "config.yaml"),
        (f"{broken.home}/hf", "/missing/disk", "export HF_HOME=", "folders: {huggingface: "),
        ("/proc: ", "export TMPDIR="),
    )  # fmt: skip
    broken.environment["HOME"] = "/nowhere"
    assert_reported(broken.diagnose("home"), Level.WARNING, ("/nowhere is not there", "export HOME=", "HF_HOME"))


def test_a_disk_and_a_home_that_are_full(broken, tmp_path):
    with mounted_disk(tmp_path / "small", "2m") as small:
        broken.environment |= {"SHARDWISE_CACHE": str(small / "cache"), "HOME": str(small)}
        faults = dict(reported(broken.diagnose("room", "home"), Level.FAULT))
    (room,) = [fix for sentence, fix in faults.items() if sentence.startswith(f"{small}/cache: 2 MiB")]
    assert "shardwise cache --prune" in room and "hf cache prune" in room
    (home,) = [fix for sentence, fix in faults.items() if f" {small}: 2 MiB" in sentence]
    assert f"du -xh {small} | sort -h | tail" in home


def test_folders_on_disks_that_are_slow_or_only_read(broken):
    broken.write(
        "proc/self/mountinfo",
        f"40 22 0:50 / {broken.folder}/cache rw - cifs //nas/share rw\n"
        f"41 22 0:51 / {broken.working} ro - ext4 /dev/sdb1 ro\n"
        f"42 22 0:52 / {broken.home} rw - nfs4 nas:/home rw\n"
        f"43 22 0:53 / {broken.environment['TMPDIR']} rw - nfs4 nas:/tmp rw\n",
    )
    found = broken.diagnose("mounts")
    assert_reported(found, Level.FAULT, (str(broken.working), "read-only", "--run-dir", "sudo chown $USER"))
    slow = (f"{broken.folder}/cache", "cifs of //nas/share", "export SHARDWISE_CACHE=")
    assert_reported(found, Level.WARNING, slow, ("nfs4 of nas:/tmp", "sockets", "export TMPDIR=/tmp"))
    assert any("nfs4 of nas:/home" in sentence for sentence, _ in reported(found, Level.FINE))


def test_files_that_are_imported_in_place_of_modules(broken, tmp_path):
    """In the working folder a warning, on PYTHONPATH a fault; packages there, as a module system has, a warning."""
    (broken.working / "torch.py").write_text("")
    here = (f"mv {broken.working}/torch.py {broken.working}/my_torch.py",)
    assert_reported(broken.diagnose("shadowed-modules"), Level.WARNING, here)
    folder = broken.add_module("yaml", "")
    facts = (f"{folder}/yaml.py", "PYTHONPATH", f"remove {folder} from PYTHONPATH")
    assert_reported(broken.diagnose("shadowed-modules"), Level.FAULT, facts)
    packages = tmp_path / "easybuild" / "site-packages"
    add_package(packages, "numpy", "1.26.0")
    (packages / "numpy").mkdir()
    (packages / "numpy" / "__init__.py").touch()
    broken.environment["PYTHONPATH"] = str(packages)
    found = (f"PYTHONPATH names {packages}", "numpy", "unset PYTHONPATH", "module purge")
    assert_reported(broken.diagnose("shadowed-modules"), Level.WARNING, found, here)


def test_libraries_of_another_cuda_that_are_loaded_first(broken):
    folder = broken.folder / "cuda-11.8" / "lib64"
    folder.mkdir(parents=True)
    (folder / "libcudart.so.11.0").touch()
    broken.environment["LD_LIBRARY_PATH"] = f"/usr/lib:{folder}"
    facts = (f"{folder}, ", "CUDA 11.0", "CUDA 13.0", "unset LD_LIBRARY_PATH")
    assert_reported(broken.diagnose("variables", torch=CUDA_13), Level.WARNING, facts)
    assert_reported(broken.diagnose("variables", torch=replace(CUDA_13, cuda="11.8")), Level.WARNING)


def test_variables_that_break_training_or_slow_it_down(broken):
    broken.install_gpu()
    file = broken.folder / "file"
    file.touch()
    broken.environment |= {
        "CUDA_VISIBLE_DEVICES": "", "PYTHONHOME": "/nowhere", "CUDA_LAUNCH_BLOCKING": "1", "CUDA_HOME": "/nowhere",
        "TORCH_EXTENSIONS_DIR": str(file), "TORCH_DISTRIBUTED_DEBUG": "OFF",
        "NCCL_P2P_DISABLE": "1",  # of no account with one device
    }  # fmt: skip
    found = broken.diagnose("variables")
    assert_reported(found, Level.FAULT, ("PYTHONHOME=/nowhere", "unset PYTHONHOME"))
    assert_reported(
        found, Level.WARNING, ("GPU 0", "CPU", "unset CUDA_VISIBLE_DEVICES"),
        ("CUDA_LAUNCH_BLOCKING=1", "unset CUDA_LAUNCH_BLOCKING"),
        (f"TORCH_EXTENSIONS_DIR={file}", "is a file", "unset TORCH_EXTENSIONS_DIR"),
        ("CUDA_HOME=/nowhere", "unset CUDA_HOME"),
    )  # fmt: skip


def test_one_thread_for_everything_is_a_warning_where_there_are_more_cores(broken):
    broken.environment["OMP_NUM_THREADS"] = "1"
    machine = broken.read()
    for cores, facts in ((1, ()), (2, (("2 cores", "unset OMP_NUM_THREADS"),))):
        hardware = replace(machine.hardware, host=replace(machine.hardware.host, num_cores=cores))
        found = diagnosis_of(check_variables(replace(machine, hardware=hardware)))
        assert_reported(found, Level.WARNING, *facts)


def test_a_library_or_a_python_that_shardwise_does_not_accept_and_no_ninja(broken, tmp_path, monkeypatch):
    add_package(tmp_path / "old", "accelerate", "0.1.0")
    monkeypatch.syspath_prepend(tmp_path / "old")
    (line,) = (line for line in metadata.requires("shardwise") or () if line.startswith("accelerate"))
    accepted = line.partition(";")[0]
    assert_reported(broken.diagnose("libraries"), Level.FAULT, ("accelerate 0.1.0", f"pip install '{accepted}'"))
    facts = ("3.14", "3.11 to 3.13", "python3.12 -m venv .venv", "launch/bootstrap.sh install")
    assert_reported(diagnosis_of(check_python(broken.read(), (3, 14))), Level.FAULT, facts)
    python = broken.changes["python"] = str(broken.folder / "bin" / "python")
    broken.environment["PATH"] = str(broken.laid_out.programs)
    assert_reported(broken.diagnose("ninja"), Level.WARNING, ("PATH", f"{python} -m pip install ninja"))


def test_what_a_download_or_a_build_that_was_killed_left_behind(broken):
    snapshot = broken.folder / "hub" / "models--org--name" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/missing")
    broken.environment["HF_HUB_CACHE"] = str(broken.folder / "hub")
    facts = ("model/org/name", f"{broken.folder}/hub", "1 file", "hf cache rm model/org/name")
    assert_reported(broken.diagnose("hub-cache"), Level.FAULT, facts)
    lock = broken.home / ".cache" / "torch_extensions" / "py311_cu130" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w"):
        assert_reported(broken.diagnose("build-locks"), Level.WARNING)  # its build is at work
    assert_reported(broken.diagnose("build-locks"), Level.WARNING, ("cpu_adam", f"rm {lock}"))


@pytest.mark.parametrize(
    ("header", "facts"),
    [
        (None, ("cpu_adam", "no-such-compiler", "apt install g++", "dnf install gcc-c++")),
        ("Python.h", ("Python's headers", "apt install python3.")),
        ("libaio.h", ("offload_nvme", "apt install libaio-dev", "dnf install libaio-devel")),
    ],
)
def test_a_machine_without_a_compiler_pythons_headers_or_libaio(broken, monkeypatch, header, facts):
    compiler = str(broken.install("c++", f"! grep -q {header}")) if header else "no-such-compiler"
    monkeypatch.setenv("CXX", compiler)
    assert_reported(broken.diagnose("compiler", "libaio"), Level.WARNING, facts)
