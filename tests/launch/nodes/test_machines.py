"""Options for several machines on the command line, and their combined hardware."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from shardwise.launch.nodes import machines as nodes
from shardwise.launch.nodes.agent import Head
from shardwise.slurm.jobs import Allocation
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.hardware import Gpu, Hardware, Host

GIB = 2**30


def machine(*, num_gpus: int = 2, gpu: str = "NVIDIA H100", ram_gib: int = 64, cores: int = 16, **changes) -> Hardware:
    card = Gpu(index=0, name=gpu, spec_name=None, memory_bytes=80 * GIB, free_bytes=70 * GIB)
    gpus = tuple(replace(card, index=index) for index in range(num_gpus))
    ram, flags = ram_gib * GIB, ("avx2", "avx512f")
    host = Host(cpu_name="Xeon", num_cores=cores, ram_bytes=ram, ram_available_bytes=None, cpu_flags=flags)
    return replace(Hardware(gpus=gpus, host=host, libraries={"torch": "2.13.0"}), **changes)


def place(**changes):
    options: dict[str, Any] = {"nodes": 2, "node_rank": 1, "head": "n1:500", "run_dir": Path("/shared/run")} | changes
    return nodes.membership(**options)


@pytest.mark.parametrize(
    ("option", "value", "fact"),
    [
        ("head", None, "--head"),
        ("node_rank", 2, "--node-rank 2: .*0 to 1"),
        ("run_dir", None, "run.dir"),
        ("head", "127.0.0.1:29400", r"127\.0\.0\.1"),
        ("head", "0.0.0.0", r"0\.0\.0\.0"),
        ("head", "n1:abc", "HOST:PORT"),
    ],
)
def test_a_machine_knows_its_place_and_impossible_options_are_refused(option, value, fact):
    with pytest.raises(InputError, match=fact):
        place(**{option: value})
    assert place() == (2, 1, Head("n1", 500), Path("/shared/run")) and place(nodes=1, node_rank=0) is None
    assert nodes.membership(nodes=None, node_rank=None, head=None, run_dir=None) is None


def test_rank_0_belongs_on_the_head_which_others_can_reach():
    nodes._head_address("127.0.0.1")
    with pytest.raises(InputError, match=f"192.0.2.1.*{socket.gethostname()}"):
        nodes._head_address("192.0.2.1")
    with pytest.raises(EnvironmentFaultError, match=r"no-such-host\.invalid"):
        nodes._refuse_unknown_host("no-such-host.invalid")
    with pytest.raises(EnvironmentFaultError, match=r"localhost.*127\.0\.0\.1"):
        nodes._refuse_unknown_host("localhost")


def test_the_weakest_machine_decides():
    weak = machine(ram_gib=32, cores=8)
    weak = replace(weak, gpus=tuple(replace(gpu, free_bytes=60 * GIB, memory_bytes=79 * GIB) for gpu in weak.gpus))
    weak = replace(weak, host=replace(weak.host, cpu_flags=("avx2",)), notes=("ECC is off",), can_expand_segments=False)
    both = nodes.combined_hardware({"n1": machine(), "n2": weak})
    assert (both.num_nodes, both.num_devices, both.host.num_cores, both.host.ram_bytes) == (2, 4, 8, 32 * GIB)
    assert {(gpu.free_bytes, gpu.memory_bytes) for gpu in both.gpus} == {(60 * GIB, 79 * GIB)}
    assert both.host.cpu_flags == ("avx2",) and both.notes == ("n2: ECC is off",)
    assert machine().can_expand_segments and not both.can_expand_segments


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (machine(gpu="NVIDIA A100"), "n2 .*2 x NVIDIA A100.*\n.*--exclude=n2"),
        (machine(libraries={"torch": "2.11.0"}), "n1 .*torch 2.13.0, n2 .*2.11.0"),
        (machine(libraries={"torch": "2.13.0", "deepspeed": "0.19.8"}), "n1 .*deepspeed missing, n2 .*0.19.8"),
    ],
)
def test_machines_that_are_not_alike_are_refused_with_both_values(other, words):
    with pytest.raises(EnvironmentFaultError, match=words):
        nodes.combined_hardware({"n1": machine(), "n2": other})


def test_differences_from_the_plan_have_both_values():
    planned = replace(machine(), num_nodes=2)
    less = replace(planned, host=replace(planned.host, ram_bytes=32 * GIB))
    assert nodes.describe_difference(planned, planned) is nodes.describe_difference(less, planned) is None
    assert nodes.describe_difference(planned, less) == "RAM a node: 64 GiB planned, 32 GiB found"
    gpus = "GPUs a node: 2 x NVIDIA H100 planned, 4 x NVIDIA H100 found"
    assert nodes.describe_difference(planned, machine(num_gpus=4)) == f"nodes: 2 planned, 1 found; {gpus}"


def labelled(rank: int, hardware: Hardware) -> list[str]:
    return [f"{rank}: {line}" for line in codec.encode(hardware).decode().splitlines()]


def test_probes_that_srun_mixed_are_taken_apart_and_a_node_that_answers_something_else_is_named():
    pairs = zip(*(labelled(rank, machine(ram_gib=size)) for rank, size in enumerate((64, 32))), strict=True)
    probes = nodes.parse_labelled_probes("\n".join(["1: module loaded", *(line for pair in pairs for line in pair)]))
    assert [probe.host.ram_bytes for probe in probes] == [64 * GIB, 32 * GIB]
    with pytest.raises(EnvironmentFaultError, match=r"node 1.*: command not found"):
        nodes.parse_labelled_probes("\n".join([*labelled(0, machine()), "1: : command not found", "1: "]))


def test_the_agents_of_a_slurm_job_connect_to_the_address_that_is_listened_on(tmp_path, monkeypatch):
    """On a node of several interfaces its name may lead other nodes to another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        if route.connect_ex(("192.0.2.1", 9)) != 0:
            pytest.skip("this machine has no address besides its loopback")
        own = route.getsockname()[0]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (own, 0))])
    srun, called = tmp_path / "srun", tmp_path / "called"
    srun.write_text(f'#!/bin/sh\necho "$@" > {called}\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    allocation = Allocation("7", num_nodes=2, num_restarts=0, cores_per_node=None, is_in_step=False)
    machines = nodes.Machines(allocation, None, {**os.environ, "SLURMD_NODENAME": "n1"})
    with machines.serving(tmp_path, cache=tmp_path, on_line=print) as cluster:
        assert cluster is not None
        cluster.start_step(tmp_path).end()
        assert f"--head {own}:{cluster.server.port}" in called.read_text()
