"""`doctor` if names, proxies, the hub, wandb or Slurm do not respond; no key is ever shown."""

import os
import socket

import pytest
from doctor_factory import BrokenMachine, assert_reported, reported
from http_answers import answering
from hub_server import Hub, login, serving
from network_factory import needs_own_network, without_loopback
from werkzeug.wrappers import Request, Response

from shardwise.launch.doctor.finding import Level, diagnosis_of
from shardwise.launch.doctor.network import fetch, judge_clock
from shardwise.trainer.spec import codec

TOKEN = "hf_" + "a1B2c3D4e5" * 4
KEY = "0123456789abcdef" * 3


@pytest.fixture
def broken(tmp_path):
    return BrokenMachine(tmp_path)


@pytest.fixture
def closed_port():
    """A port of this machine on which no process listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_a_name_or_an_interface_that_is_down_or_not_there(broken):
    broken.changes["hostname"] = "node7.invalid"
    remedy = "echo 127.0.1.1 node7.invalid | sudo tee -a /etc/hosts"
    assert_reported(broken.diagnose("hostname"), Level.WARNING, (remedy,))
    broken.changes["hostname"] = "localhost"
    assert_reported(broken.diagnose("hostname"), Level.WARNING)
    broken.write("sys/class/net/eth0/operstate", "up\n")
    broken.write("sys/class/net/lo/operstate", "down\n")
    broken.environment |= {"GLOO_SOCKET_IFNAME": "eth", "NCCL_SOCKET_IFNAME": "ib0,ib1"}
    facts = (
        ("sudo ip link set lo up",), ("NCCL_SOCKET_IFNAME=ib0,ib1", "eth0", "unset NCCL_SOCKET_IFNAME"),
        ("GLOO_SOCKET_IFNAME=eth", "eth0", "unset GLOO_SOCKET_IFNAME"),
    )  # fmt: skip
    assert_reported(broken.diagnose("interfaces"), Level.FAULT, *facts)
    broken.write("sys/class/net/lo/operstate", "unknown\n")
    for setting in ("eth", "=eth0", "^docker"):
        broken.environment |= {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": setting}
        assert_reported(broken.diagnose("interfaces"), Level.FAULT)


@needs_own_network
def test_a_loopback_that_is_down_is_a_fault_also_where_the_kernel_shows_another_network(broken):
    broken.write("sys/class/net/lo/operstate", "unknown\n")
    assert_reported(broken.diagnose("interfaces"), Level.FAULT)
    without_loopback(
        lambda: assert_reported(broken.diagnose("interfaces"), Level.FAULT, ("127.0.0.1", "sudo ip link set lo up"))
    )


def test_a_proxy_that_does_not_respond_is_a_warning(broken, closed_port):
    broken.environment["HTTPS_PROXY"] = f"http://ada:{KEY}@127.0.0.1:{closed_port}"
    found = broken.diagnose("proxies")
    facts = ("HTTPS_PROXY", f"127.0.0.1:{closed_port}", "Connection refused", "unset HTTPS_PROXY")
    assert_reported(found, Level.WARNING, facts)
    assert KEY not in codec.encode(found).decode()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        broken.environment |= {"HTTPS_PROXY": f"http://{address}", "http_proxy": "http://:port"}
        found = broken.diagnose("proxies")
    assert_reported(found, Level.FINE, (f"HTTPS_PROXY: the proxy {address}",))
    assert_reported(found, Level.WARNING, ("http_proxy", "unset http_proxy", "http://HOST:PORT"))


def test_a_hub_that_cannot_be_reached_or_is_not_to_be_contacted(broken, closed_port):
    broken.environment["HF_ENDPOINT"] = f"http://127.0.0.1:{closed_port}"
    facts = (f"http://127.0.0.1:{closed_port}", "Connection refused", "HF_HUB_OFFLINE=1")
    assert_reported(broken.diagnose("hub"), Level.WARNING, facts)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        broken.environment["HF_ENDPOINT"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        broken.changes["server_timeout_s"] = 0.3
        assert_reported(broken.diagnose("hub"), Level.WARNING, (broken.environment["HF_ENDPOINT"], "timed out"))
    broken.environment["HF_HUB_OFFLINE"] = "1"
    assert_reported(broken.diagnose("hub"), Level.FINE, ("HF_HUB_OFFLINE",))


@pytest.mark.parametrize(
    ("logins", "level", "facts"),
    [({TOKEN: login("ann")}, Level.FINE, ("ann",)), ({}, Level.WARNING, ("token", "hf auth login"))],
)
def test_a_token_is_not_shown_whether_the_hub_knows_it_or_not(broken, logins, level, facts):
    (broken.home / "hf").mkdir()
    (broken.home / "hf" / "token").write_text(f"{TOKEN}\n")
    with serving(Hub(logins=logins)) as hub:
        broken.environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(broken.home / "hf")}
        stored = broken.diagnose("hub")
        broken.environment |= {"HF_HOME": str(broken.home), "HF_TOKEN": TOKEN}
        named = broken.diagnose("hub")
    for found in (stored, named):
        assert_reported(found, level, (hub.url, *facts))
        assert TOKEN not in codec.encode(found).decode()
    assert hub.requests == ["GET /api/whoami-v2"] * 2


def test_a_clock_that_is_wrong():
    noon = 1767268800.0
    found = diagnosis_of(judge_clock("Thu, 01 Jan 2026 12:00:00 GMT", noon + 3600))
    facts = ("60 min ahead", "sudo timedatectl set-ntp true", "sudo hwclock -s")
    assert_reported(found, Level.WARNING, facts)
    assert list(judge_clock("Thu, 01 Jan 2026 12:00:00 GMT", noon + 60)) == []
    assert list(judge_clock(None, noon)) == list(judge_clock("yesterday", noon)) == []


def test_wandb_with_a_key_and_without(broken, closed_port):
    with serving(Hub()) as server:
        broken.environment["WANDB_BASE_URL"] = server.url
        assert_reported(broken.diagnose("wandb"), Level.FINE, (server.url, "no key", "wandb login"))
        (broken.home / ".netrc").write_text(f"machine 127.0.0.1\n  login user\n  password {KEY}\n")
        found = broken.diagnose("wandb")
    assert_reported(found, Level.FINE, (f"{server.url} responds", "a key"))
    assert KEY not in codec.encode(found).decode()
    broken.environment |= {"WANDB_BASE_URL": f"http://127.0.0.1:{closed_port}", "WANDB_API_KEY": KEY}
    found = broken.diagnose("wandb")
    facts = (f"http://127.0.0.1:{closed_port}", "Connection refused", "log.wandb=offline", "wandb sync")
    assert_reported(found, Level.WARNING, facts)
    assert KEY not in codec.encode(found).decode()
    broken.environment["WANDB_MODE"] = "offline"
    assert_reported(broken.diagnose("wandb"), Level.FINE, ("WANDB_MODE=offline",))


def test_wandb_is_asked_for_its_own_host(broken):
    """The environment names none: it is that of wandb's settings."""
    broken.environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    with serving(Hub()) as server:
        folder = broken.home / ".config" / "wandb"
        folder.mkdir(parents=True)
        (folder / "settings").write_text(f"[default]\nbase_url = {server.url}\n")
        assert_reported(broken.diagnose("wandb"), Level.FINE, (server.url, "responds"))


def test_a_token_does_not_follow_to_another_server():
    """A redirected request carries no token."""
    seen: list[str | None] = []

    def answer(request: Request) -> Response:
        seen.append(request.headers.get("Authorization"))
        elsewhere = {"Location": f"http://localhost:{request.host.partition(':')[2]}/elsewhere"}
        return Response("", 302 if len(seen) == 1 else 200, elsewhere)

    with answering(answer) as url:
        fetch(url, {}, {"Authorization": f"Bearer {TOKEN}"})
    assert seen == [f"Bearer {TOKEN}", None]


@pytest.fixture
def login_node(broken):
    assert broken.diagnose("slurm").findings == (), "without Slurm nothing is reported"
    broken.install("sbatch", "exit 1")
    broken.write("etc/slurm/slurm.conf", "ClusterName=test\n")
    broken.install("munge", "echo MUNGE:abc:")
    broken.install("unmunge", "cat >/dev/null; echo STATUS: Success")
    broken.install("scontrol", "echo 'Slurmctld(primary) at head is UP'")
    return broken


def test_a_login_node_whose_controller_or_munge_fails(login_node):
    ready = "Slurmctld(primary) at head is UP"
    assert_reported(login_node.diagnose("slurm"), Level.FINE, ("shardwise submit", ready))
    login_node.install("munge", "echo 'munge: Error: Failed to access \"/run/munge/munge.socket.2\"' >&2; exit 6")
    facts = ("munge: Error: Failed to access", "sudo systemctl restart munge")
    assert_reported(login_node.diagnose("slurm"), Level.FAULT, facts)
    refused = "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)"
    login_node.install("scontrol", f"echo '{refused}' >&2; exit 1")
    assert_reported(login_node.diagnose("slurm"), Level.FAULT, facts, ("scontrol ping", "controller", "administrators"))


def test_a_slurm_that_hangs_on_a_machine_with_gpus_is_a_warning(login_node):
    login_node.install_gpu()
    login_node.install("scontrol", "exec sleep 600")
    login_node.changes["slurm_timeout_s"] = 0.5
    found = login_node.diagnose("slurm")
    assert found.num_faults == 0
    ((sentence, _),) = [row for row in reported(found, Level.WARNING) if "scontrol ping" in row[0]]
    assert "0.5 s" in sentence
