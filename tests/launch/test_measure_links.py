"""Links that hang or deliver other values: found in real processes, judged, and carried by the plan."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from launch.measure_links import judged_links, measure_gather, measure_peers
from trainer.spec.hardware import Gpu, Hardware, Host, Link, LinkKind, MeasuredRates, PeerCopy
from trainer.spec.units import GIB

HOST = Host(cpu_name=None, num_cores=2, ram_bytes=None, ram_available_bytes=None)
TWO_CPU_RANKS = Hardware(gpus=(), host=HOST, num_cpu_devices=2)


def cards(*indices: int, **fields: object) -> Hardware:
    gpus = [
        Gpu(index=index, name="x", spec_name=None, memory_bytes=GIB, uuid=f"GPU-{index}", **fields)  # type: ignore[arg-type]
        for index in indices
    ]
    return Hardware(gpus=tuple(gpus), host=HOST)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that is found by the processes that measure."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "stand_in.py"


def test_two_cpu_ranks_gather_over_gloo() -> None:
    found = measure_gather(TWO_CPU_RANKS)
    assert found.notes == ()
    assert (found.rates.all_gather_bytes_per_s or 0) > 10**6
    assert not replace(TWO_CPU_RANKS, rates=found.rates).needs_p2p_disabled


REAL = "import sys, time\nfrom trainer.runtime.measure_gather import main\n"


def test_a_rank_that_never_comes_is_a_note_in_time(stand_in: Path) -> None:
    stand_in.write_text(
        "import os, sys, time\nopen(os.path.join(os.environ['PIDS'], sys.argv[2]), 'w').write(str(os.getpid()))\n"
        "if sys.argv[2] == '1': time.sleep(600)\n" + REAL + "sys.exit(main(sys.argv[1:]))\n"
    )
    os.environ["PIDS"] = str(stand_in.parent)
    try:
        found = measure_gather(TWO_CPU_RANKS, timeout_s=6, module="stand_in")
    finally:
        del os.environ["PIDS"]
    assert found.notes == ("an all-gather over 2 devices did not end within 6 s",)
    assert found.rates == MeasuredRates()
    for rank in ("0", "1"):  # nothing is left behind, not even the rank that slept
        with pytest.raises(ProcessLookupError):
            os.kill(int((stand_in.parent / rank).read_text()), 0)


def test_a_rank_that_fails_is_not_waited_for(stand_in: Path) -> None:
    stand_in.write_text("import sys, time\nif sys.argv[2] == '1': sys.exit('no such backend')\ntime.sleep(600)\n")
    found = measure_gather(TWO_CPU_RANKS, timeout_s=300, module="stand_in")
    assert found.notes == ("an all-gather over 2 devices failed (no such backend)",)


def test_other_values_are_seen(stand_in: Path) -> None:
    stand_in.write_text(
        REAL + "from torch import distributed\nwhole = distributed.all_gather_into_tensor\n"
        "def corrupted(out, mine):\n    whole(out, mine)\n    out[-1] += 1\n"
        "distributed.all_gather_into_tensor = corrupted\nsys.exit(main(sys.argv[1:]))\n"
    )
    found = measure_gather(TWO_CPU_RANKS, module="stand_in")
    assert found.notes == ("an all-gather over 2 devices delivered other values",)


ANSWER = (
    "import os, pathlib, sys, time\ndef answer():\n    file = pathlib.Path(sys.argv[1], sys.argv[2] + '.json')\n"
    '    file.write_text(\'{"bytes_per_s": 5, "is_correct": true}\')\n'
)


def test_gpus_that_gather_only_without_peer_access_say_so(stand_in: Path) -> None:
    stand_in.write_text(ANSWER + "if os.environ.get('NCCL_P2P_DISABLE') != '1': time.sleep(600)\nanswer()\n")
    found = measure_gather(cards(0, 1), timeout_s=1.5, module="stand_in")
    (note,) = found.notes
    assert "did not end within 1.5 s, and works without peer access" in note
    assert found.rates.all_gather_bytes_per_s == 5
    assert replace(cards(0, 1), rates=found.rates).needs_p2p_disabled


def test_gpus_that_never_gather_are_no_finding_about_peer_access(stand_in: Path) -> None:
    stand_in.write_text("import sys; sys.exit('NCCL error')\n")
    found = measure_gather(cards(0, 1), module="stand_in")
    (note,) = found.notes
    assert "failed (NCCL error), and so without peer access" in note
    assert not replace(cards(0, 1), rates=found.rates).needs_p2p_disabled


@pytest.mark.parametrize("hardware", [cards(0), cards(0, 1, is_mig_on=True), Hardware(gpus=(), host=HOST)])
def test_one_device_and_slices_of_one_have_no_links(hardware: Hardware) -> None:
    assert measure_gather(hardware, module="no_such_module").notes == ()
    assert measure_peers(hardware, module="no_such_module").notes == ()


PEERS = 'import pathlib, sys, time\npathlib.Path(sys.argv[1]).write_text(\'{"rates": {"peer_copies": [%s]}}\')\n'
RIGHT = '{"a": 0, "b": 1, "bytes_per_s": 9, "is_correct": true}'
WRONG = '{"a": 1, "b": 0, "bytes_per_s": 9}'
AT_WORK = '{"a": 1, "b": 0}'


def test_copies_are_named_by_the_indices_of_the_cards(stand_in: Path) -> None:
    stand_in.write_text(PEERS % RIGHT)
    found = measure_peers(cards(4, 6), module="stand_in")
    assert found.rates.peer_copies == (PeerCopy(a=4, b=6, bytes_per_s=9, is_correct=True),)
    assert found.notes == ()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (PEERS % f"{RIGHT}, {WRONG}", "a copy from GPU 6 to GPU 4 arrived with other values"),
        (PEERS % f"{RIGHT}, {AT_WORK}" + "time.sleep(600)\n", "a copy from GPU 6 to GPU 4 did not end within 1.5 s"),
        (PEERS % f"{RIGHT}, {AT_WORK}" + "sys.exit('CUDA error')\n", "a copy from GPU 6 to GPU 4 failed (CUDA error)"),
    ],
)
def test_a_bad_pair_is_a_finding(stand_in: Path, body: str, sentence: str) -> None:
    stand_in.write_text(body)
    found = measure_peers(cards(4, 6), timeout_s=1.5, module="stand_in")
    assert found.notes == (f"{sentence}: plans set NCCL_P2P_DISABLE=1",)
    assert replace(cards(4, 6), rates=found.rates).needs_p2p_disabled


def test_copies_that_were_never_tried_condemn_nothing(stand_in: Path) -> None:
    stand_in.write_text("import sys; sys.exit('no torch')\n")
    found = measure_peers(cards(0, 1), module="stand_in")
    assert found.notes == ("copies between GPUs were not measured: no torch",)
    assert not replace(cards(0, 1), rates=found.rates).needs_p2p_disabled


def test_a_process_that_fails_between_two_copies_condemns_none(stand_in: Path) -> None:
    stand_in.write_text(PEERS % RIGHT + "sys.exit('CUDA-capable device is busy')\n")
    found = measure_peers(cards(4, 6), module="stand_in")
    assert found.notes == ("not all copies between GPUs were measured: CUDA-capable device is busy",)
    assert not replace(cards(4, 6), rates=found.rates).needs_p2p_disabled


def link(a: int, b: int, kind: LinkKind) -> Link:
    return Link(a=a, b=b, kind=kind, has_peer_access=True)


def test_a_copy_condemns_its_own_link_and_an_all_gather_every_link_over_pcie() -> None:
    links = (link(0, 1, LinkKind.NVLINK), link(0, 2, LinkKind.PCIE_HOST), link(1, 2, LinkKind.PCIE_HOST))

    def access(rates: MeasuredRates) -> list[bool | None]:
        return [judged.has_peer_access for judged in judged_links(links, rates)]

    assert access(MeasuredRates()) == [True, True, True]
    assert access(MeasuredRates(peer_copies=(PeerCopy(a=2, b=1, bytes_per_s=9),))) == [True, True, False]
    assert access(MeasuredRates(gathers_only_without_peers=True)) == [True, False, False]
