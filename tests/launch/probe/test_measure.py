"""Measuring disks and devices: real files, a real subprocess, and nothing left behind."""

import io
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from hanging_programs import under_a_limit
from msgspec.structs import replace

from shardwise.launch.commands.housekeeping import run_probe
from shardwise.launch.options import ProbeOptions
from shardwise.launch.probe import measure
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import Disk, Gpu, Hardware, Host, Link, LinkKind, MeasuredRates, PeerCopy
from shardwise.trainer.spec.messages.worker_requests import Measurement
from shardwise.trainer.spec.units import GIB

HOST = Host(cpu_name=None, num_cores=1, ram_bytes=None, ram_available_bytes=None)


def make_disk(path):
    return Disk(path=str(path), filesystem="ext4", total_bytes=GIB, free_bytes=GIB)


def test_a_folder_has_both_speeds_and_nothing_is_left_in_it(tmp_path):
    """Also where the budget ends after a block, and on a tmpfs, which refuses direct access."""
    for folder, num_blocks, budget_s in ((tmp_path, 2, 60), (tmp_path, 64, 0), (Path("/dev/shm"), 1, 60)):
        before = set(folder.iterdir())
        speed = measure.measure_folder(folder, file_bytes=num_blocks * measure.BLOCK_BYTES, budget_s=budget_s)
        assert speed is not None and speed.write_bytes_per_s > 0 and speed.read_bytes_per_s > 0
        assert not [path for path in set(folder.iterdir()) - before if "shardwise" in path.name]
    assert measure.measure_folder(Path("/proc/self")) is measure.measure_folder(Path("/no/such/folder")) is None


def test_a_disk_whose_mount_point_cannot_be_written_is_measured_in_another_folder_of_it(tmp_path):
    (tmp_path / "no folder").write_text("")  # not even root may enter it
    disk = make_disk(tmp_path / "no folder")
    assert measure.writable_folder(disk, [Path("/dev/shm"), tmp_path / "missing", tmp_path]) == tmp_path
    assert measure.writable_folder(disk, [Path("/dev/shm")]) is None  # another disk
    assert measure.writable_folder(make_disk(tmp_path), []) == tmp_path
    assert measure.writable_folder(make_disk("/no/such/disk"), [tmp_path]) is None
    disks, (note,) = measure.measure_disks([make_disk(tmp_path), make_disk("/no/such/disk")], [])
    assert disks[0].read_bytes_per_s is not None
    assert disks[1] == make_disk("/no/such/disk") and "/no/such/disk" in note


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module that the processes that measure run; it stands in for the one that needs torch and a GPU."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "stand_in.py"


HEAD = "import os, pathlib, sys, time\nresult = pathlib.Path(sys.argv[1])\n"
RESULT_7 = HEAD + 'result.write_text(\'{"rates": {"memory_bytes_per_s": 7}}\')\n'
ONE_CPU = Hardware(gpus=(), host=HOST)
TWO_CPU_RANKS = Hardware(gpus=(), host=replace(HOST, num_cores=2), num_cpu_devices=2)


def machine_of(*indices: int, **fields: object) -> Hardware:
    plain = Gpu(index=0, name="x", spec_name=None, memory_bytes=GIB)
    gpus = (replace(plain, index=index, uuid=f"GPU-{index}", **fields) for index in indices)
    return Hardware(gpus=tuple(gpus), host=HOST)


def only_note(found: Measurement) -> str:
    (note,) = found.notes
    return note


@pytest.mark.parametrize(
    ("hardware", "device", "visible", "threads"),
    [(replace(ONE_CPU, host=replace(HOST, num_cores=3)), "cpu", "", "3"), (machine_of(2, 3), "cuda", "GPU-2", "1")],
)
def test_the_subprocess_gets_the_device_and_the_cores(stand_in, hardware, device, visible, threads):
    stand_in.write_text(
        RESULT_7 + f"seen = [sys.argv[2], *map(os.environ.get, ('CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS'))]\n"
        f"assert seen == {[device, visible, threads]}, seen\n"
    )
    assert measure.measure_device(hardware, module="stand_in") == Measurement(rates=MeasuredRates(memory_bytes_per_s=7))


def test_a_subprocess_that_fails_is_a_note(stand_in):
    stand_in.write_text(HEAD + "import no_such_library\n")
    found = measure.measure_device(ONE_CPU, module="stand_in")
    assert found.rates == MeasuredRates() and "No module named 'no_such_library'" in only_note(found)


def test_a_subprocess_over_its_time_limit_keeps_its_result(stand_in):
    stand_in.write_text(RESULT_7 + "time.sleep(600)\n")
    found, limit_s = under_a_limit(
        lambda limit_s: measure.measure_device(ONE_CPU, module="stand_in", timeout_s=limit_s),
        lambda found: found.rates.memory_bytes_per_s == 7,
    )
    assert f"{limit_s:g} s" in only_note(found)


@pytest.mark.cold
def test_a_file_of_the_same_name_in_the_working_folder_is_not_run(tmp_path, monkeypatch):
    (tmp_path / "trainer.py").write_text("import sys; sys.exit('the wrong trainer')\n")
    (tmp_path / "elsewhere.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert "No module named elsewhere" in only_note(measure.measure_device(ONE_CPU, module="elsewhere"))


def test_other_values_are_seen(stand_in: Path) -> None:
    stand_in.write_text(
        "import sys\nfrom torch import distributed\nfrom trainer.runtime.tools.measure import main\n"
        "whole = distributed.all_gather_into_tensor\n"
        "def corrupted(out, mine):\n    whole(out, mine)\n    out[-1] += 1\n"
        "distributed.all_gather_into_tensor = corrupted\nsys.exit(main(sys.argv[1:]))\n"
    )
    assert "other values" in only_note(measure.measure_gather(TWO_CPU_RANKS, module="stand_in"))


def test_gpus_that_gather_only_without_peer_access_are_a_note(stand_in: Path) -> None:
    stand_in.write_text(
        HEAD + "if os.environ.get('NCCL_P2P_DISABLE') != '1': time.sleep(600)\n"
        "(result / f'{sys.argv[3]}.json').write_text('{\"bytes_per_s\": 5, \"is_correct\": true}')\n"
    )
    found, limit_s = under_a_limit(
        lambda limit_s: measure.measure_gather(machine_of(0, 1), timeout_s=limit_s, module="stand_in"),
        lambda found: found.rates.all_gather_bytes_per_s is not None,
    )
    assert f"{limit_s:g} s" in only_note(found) and "works without peer access" in only_note(found)
    assert found.rates.all_gather_bytes_per_s == 5
    assert replace(machine_of(0, 1), rates=found.rates).needs_p2p_disabled
    stand_in.write_text(HEAD + "if sys.argv[3] == '1': sys.exit('NCCL error')\ntime.sleep(600)\n")
    found = measure.measure_gather(machine_of(0, 1), timeout_s=300, module="stand_in")  # waits not for the other rank
    assert "NCCL error" in only_note(found) and "works" not in only_note(found)
    assert not replace(machine_of(0, 1), rates=found.rates).needs_p2p_disabled


@pytest.mark.parametrize("hardware", [machine_of(0), machine_of(0, 1, is_mig_on=True), ONE_CPU])
def test_one_device_and_slices_of_one_have_no_links(hardware: Hardware) -> None:
    assert measure.measure_gather(hardware, module="no_such_module").notes == ()
    assert measure.measure_peers(hardware, module="no_such_module").notes == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ProbeOptions(nodes=2, node_rank=0, head="n1"), "--measure"),
        (ProbeOptions(nodes=2, measure=True), "--node-rank"),
        (ProbeOptions(nodes=2, node_rank=1, head="localhost", measure=True), "connect to itself"),
    ],
)
def test_a_probe_of_several_machines_that_cannot_be_is_refused_before_it_measures(options: ProbeOptions, words: str):
    with pytest.raises(InputError, match=words):
        run_probe(options, Console(io.StringIO()))


@pytest.mark.cold
def test_several_machines_gather_from_each_other() -> None:
    """Two machines, and one whose others do not come."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meetings = [measure.Meeting(2, rank, "127.0.0.1", port) for rank in (0, 1)]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(partial(measure.with_network, ONE_CPU), meetings))
    for hardware in found:
        assert hardware.num_nodes == 2 and hardware.notes == ()
        assert hardware.rates.between_nodes_bytes_per_s
    (note,) = measure.measure_between_nodes(ONE_CPU, meetings[0], timeout_s=0.2).notes
    assert "within 0.2 s" in note and f"127.0.0.1:{port}" in note


PEERS = HEAD + 'result.write_text(\'{"rates": {"peer_copies": [%s]}}\')\n'
RIGHT = '{"a": 0, "b": 1, "bytes_per_s": 9, "is_correct": true}'
WRONG = '{"a": 1, "b": 0, "bytes_per_s": 9}'
AT_WORK = '{"a": 1, "b": 0}'


@pytest.mark.parametrize(
    ("body", "fact"),
    [
        (PEERS % f"{RIGHT}, {WRONG}", "other values"),
        (PEERS % f"{RIGHT}, {AT_WORK}" + "time.sleep(600)\n", " s"),
        (PEERS % f"{RIGHT}, {AT_WORK}" + "sys.exit('CUDA error')\n", "CUDA error"),
    ],
    ids=["wrong", "hangs", "fails"],
)
def test_a_bad_pair_is_a_finding(stand_in: Path, body: str, fact: str) -> None:
    stand_in.write_text(body)
    found, _ = under_a_limit(
        lambda limit_s: measure.measure_peers(machine_of(4, 6), timeout_s=limit_s, module="stand_in"),
        lambda found: bool(found.rates.peer_copies) and fact in only_note(found),
    )
    assert "GPU 6 to GPU 4" in only_note(found) and "NCCL_P2P_DISABLE=1" in only_note(found)
    assert replace(machine_of(4, 6), rates=found.rates).needs_p2p_disabled


@pytest.mark.parametrize(
    ("body", "fact"),
    [("import sys; sys.exit('no torch')\n", "no torch"), (PEERS % RIGHT + "sys.exit('device is busy')\n", "is busy")],
    ids=["before the first", "between two"],
)
def test_a_process_that_fails_between_copies_condemns_none(stand_in: Path, body: str, fact: str) -> None:
    stand_in.write_text(PEERS % RIGHT)
    found = measure.measure_peers(machine_of(4, 6), module="stand_in")
    assert found.rates.peer_copies == (PeerCopy(a=4, b=6, bytes_per_s=9, is_correct=True),) and found.notes == ()
    stand_in.write_text(body)
    found = measure.measure_peers(machine_of(4, 6), module="stand_in")
    assert fact in only_note(found) and "NCCL_P2P_DISABLE" not in only_note(found)
    assert not replace(machine_of(4, 6), rates=found.rates).needs_p2p_disabled


def link(a: int, b: int, kind: LinkKind) -> Link:
    return Link(a=a, b=b, kind=kind, has_peer_access=True)


def test_a_copy_condemns_its_own_link_and_an_all_gather_every_link_over_pcie() -> None:
    links = (link(0, 1, LinkKind.NVLINK), link(0, 2, LinkKind.PCIE_HOST), link(1, 2, LinkKind.PCIE_HOST))

    def access(rates: MeasuredRates) -> list[bool | None]:
        return [judged.has_peer_access for judged in measure.judged_links(links, rates)]

    assert access(MeasuredRates()) == [True, True, True]
    assert access(MeasuredRates(peer_copies=(PeerCopy(a=2, b=1, bytes_per_s=9),))) == [True, True, False]
    assert access(MeasuredRates(gathers_only_without_peers=True)) == [True, False, False]
