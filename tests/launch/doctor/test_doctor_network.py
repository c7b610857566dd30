"""`doctor` if names, proxies, the hub, wandb or Slurm do not respond; no key is ever shown."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from doctor_factory import BrokenMachine, assert_reported, reported
from hub_server import Hub, login, serving

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


def test_a_machine_that_does_not_know_its_own_name(broken):
    broken.changes["hostname"] = "node7.invalid"
    remedy = "echo 127.0.1.1 node7.invalid | sudo tee -a /etc/hosts"
    assert_reported(broken.diagnose("hostname"), Level.WARNING, (remedy,))
    broken.changes["hostname"] = "localhost"
    assert_reported(broken.diagnose("hostname"), Level.WARNING)


def test_interfaces_that_are_down_or_not_there(broken):
    broken.write("sys/class/net/eth0/operstate", "up\n")
    broken.write("sys/class/net/lo/operstate", "down\n")
    broken.environment |= {"GLOO_SOCKET_IFNAME": "eth", "NCCL_SOCKET_IFNAME": "ib0,ib1"}
    assert_reported(
        broken.diagnose("interfaces"),
        Level.FAULT,
        ("sudo ip link set lo up",),
        ("NCCL_SOCKET_IFNAME=ib0,ib1", "eth0", "unset NCCL_SOCKET_IFNAME"),
        ("GLOO_SOCKET_IFNAME=eth", "eth0", "unset GLOO_SOCKET_IFNAME"),
    )
    broken.write("sys/class/net/lo/operstate", "unknown\n")
    for setting in ("eth", "=eth0", "^docker"):
        broken.environment |= {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": setting}
        assert_reported(broken.diagnose("interfaces"), Level.FAULT)


def test_a_proxy_that_does_not_respond_is_a_warning(broken, closed_port):
    broken.environment["HTTPS_PROXY"] = f"http://ada:{KEY}@127.0.0.1:{closed_port}"
    found = broken.diagnose("proxies")
    facts = ("HTTPS_PROXY", f"127.0.0.1:{closed_port}", "Connection refused", "unset HTTPS_PROXY")
    assert_reported(found, Level.WARNING, facts)
    assert KEY not in codec.encode(found).decode()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        broken.environment |= {"HTTPS_PROXY": f"http://{address}", "http_proxy": "http://:port"}
        found = broken.diagnose("proxies")
    assert_reported(found, Level.FINE, (f"HTTPS_PROXY: the proxy {address}",))
    assert_reported(found, Level.WARNING, ("http_proxy", "unset http_proxy", "http://HOST:PORT"))


def test_a_hub_that_cannot_be_reached_or_is_not_to_be_contacted(broken, closed_port):
    broken.environment["HF_ENDPOINT"] = f"http://127.0.0.1:{closed_port}"
    facts = (f"http://127.0.0.1:{closed_port}", "Connection refused", "HF_HUB_OFFLINE=1")
    assert_reported(broken.diagnose("hub"), Level.WARNING, facts)
    broken.environment["HF_HUB_OFFLINE"] = "1"
    assert_reported(broken.diagnose("hub"), Level.FINE, ("HF_HUB_OFFLINE",))


def test_a_token_that_the_hub_knows_is_not_shown(broken):
    with serving(Hub(logins={TOKEN: login("ann")})) as hub:
        broken.environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        found = broken.diagnose("hub")
    assert_reported(found, Level.FINE, (hub.url, "ann"))
    assert hub.requests == ["GET /api/whoami-v2"]
    assert TOKEN not in codec.encode(found).decode()


def test_a_token_that_the_hub_does_not_know(broken):
    (broken.home / "hf").mkdir()
    (broken.home / "hf" / "token").write_text(f"{TOKEN}\n")
    with serving(Hub()) as hub:
        broken.environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(broken.home / "hf")}
        found = broken.diagnose("hub")
    assert_reported(found, Level.WARNING, (hub.url, "token", "hf auth login"))
    assert TOKEN not in codec.encode(found).decode()


def test_a_server_that_never_responds_has_a_time_limit(broken):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        broken.environment["HF_ENDPOINT"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        broken.changes["server_timeout_s"] = 0.3
        assert_reported(broken.diagnose("hub"), Level.WARNING, (broken.environment["HF_ENDPOINT"], "timed out"))


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


def test_a_token_does_not_follow_to_another_server(broken):
    """A redirected request carries no token."""
    seen: list[str | None] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            self.send_response(302 if len(seen) == 1 else 200)
            self.send_header("Location", f"http://localhost:{server.server_port}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Redirecting)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        fetch(f"http://127.0.0.1:{server.server_port}/", {}, {"Authorization": f"Bearer {TOKEN}"})
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
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
