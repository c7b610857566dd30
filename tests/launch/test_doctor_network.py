"""`doctor` where names, proxies, the hub, wandb or Slurm do not answer; and no key is ever shown."""

import socket

import pytest
from doctor_factory import BrokenMachine, told
from hub_server import Hub, login, serving

from launch.doctor_finding import Level, diagnosis_of
from launch.doctor_network import fetch, judge_clock
from trainer.spec import codec
from trainer.spec.errors import ExitCode

TOKEN = "hf_" + "a1B2c3D4e5" * 4
KEY = "0123456789abcdef" * 3


@pytest.fixture
def broken(tmp_path):
    return BrokenMachine(tmp_path)


@pytest.fixture
def closed_port():
    """A port of this machine that nobody listens at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_a_machine_that_does_not_know_its_own_name(broken):
    broken.changes["hostname"] = "node7.invalid"
    found = broken.diagnose("hostname")
    assert told(found, Level.WARNING) == [
        (
            "the machine's own name, node7.invalid, does not resolve: ranks wait for it, or use the loopback alone",
            "echo 127.0.1.1 node7.invalid | sudo tee -a /etc/hosts",
        )
    ]
    assert found.exit_code is ExitCode.DONE
    broken.changes["hostname"] = "localhost"
    assert told(broken.diagnose("hostname"), Level.WARNING) == []


def test_interfaces_that_are_down_or_not_there(broken):
    broken.write("sys/class/net/eth0/operstate", "up\n")
    broken.write("sys/class/net/lo/operstate", "down\n")
    broken.environment |= {"GLOO_SOCKET_IFNAME": "eth", "NCCL_SOCKET_IFNAME": "ib0,ib1"}
    found = broken.diagnose("interfaces")
    assert told(found, Level.FAULT) == [
        ("the loopback interface is down: ranks of one machine meet there", "sudo ip link set lo up"),
        ("NCCL_SOCKET_IFNAME=ib0,ib1 names no interface of this machine (eth0)", "unset NCCL_SOCKET_IFNAME"),
        ("GLOO_SOCKET_IFNAME=eth names no interface of this machine (eth0)", "unset GLOO_SOCKET_IFNAME"),
    ]
    assert found.exit_code is ExitCode.ENVIRONMENT
    broken.write("sys/class/net/lo/operstate", "unknown\n")
    broken.environment |= {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth"}
    assert told(broken.diagnose("interfaces"), Level.FAULT) == []


def test_a_proxy_that_is_gone(broken, closed_port):
    broken.environment["HTTPS_PROXY"] = f"http://ada:{KEY}@127.0.0.1:{closed_port}"
    assert told(broken.diagnose("proxies"), Level.WARNING) == [
        (
            f"HTTPS_PROXY: the proxy 127.0.0.1:{closed_port} does not answer (Connection refused): nothing can be "
            "fetched",
            "unset HTTPS_PROXY, or name a proxy that is there",
        )
    ]


def test_a_hub_that_cannot_be_reached(broken, closed_port):
    broken.environment["HF_ENDPOINT"] = f"http://127.0.0.1:{closed_port}"
    found = broken.diagnose("hub")
    ((sentence, fix),) = told(found, Level.WARNING)
    assert sentence == f"http://127.0.0.1:{closed_port} does not answer: Connection refused"
    assert "HF_HUB_OFFLINE=1" in fix and found.exit_code is ExitCode.DONE


def test_a_hub_that_is_not_to_be_asked(broken, closed_port):
    broken.environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{closed_port}", "HF_HUB_OFFLINE": "1"}
    ((sentence, _),) = told(broken.diagnose("hub"), Level.FINE)
    assert sentence.startswith("HF_HUB_OFFLINE is set: models and data come from ")


def test_a_token_that_the_hub_knows_is_not_shown(broken):
    with serving(Hub(logins={TOKEN: login("ann")})) as hub:
        broken.environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        found = broken.diagnose("hub")
    assert told(found, Level.FINE) == [(f"{hub.url} answers; logged in as ann", None)]
    assert hub.requests == ["GET /api/whoami-v2"]
    assert TOKEN not in codec.encode(found).decode()


def test_a_token_that_the_hub_does_not_know(broken):
    (broken.home / "hf").mkdir()
    (broken.home / "hf" / "token").write_text(f"{TOKEN}\n")
    with serving(Hub()) as hub:
        broken.environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(broken.home / "hf")}
        found = broken.diagnose("hub")
    assert told(found, Level.WARNING) == [
        (f"{hub.url} does not know the token that is kept: it was revoked, or is another hub's", "hf auth login")
    ]
    assert TOKEN not in codec.encode(found).decode()


def test_a_server_that_never_answers_is_given_its_time(broken):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        broken.environment["HF_ENDPOINT"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        ((sentence, _),) = told(broken.diagnose("hub"), Level.WARNING)
    assert "does not answer: timed out" in sentence


def test_a_clock_that_is_wrong():
    noon = 1767268800.0
    assert told(diagnosis_of(judge_clock("Thu, 01 Jan 2026 12:00:00 GMT", noon + 3600)), Level.WARNING) == [
        (
            "the clock is 60 min ahead: certificates, tokens and munge are refused",
            "sudo timedatectl set-ntp true; under WSL: sudo hwclock -s",
        )
    ]
    assert list(judge_clock("Thu, 01 Jan 2026 12:00:00 GMT", noon + 60)) == []
    assert list(judge_clock(None, noon)) == list(judge_clock("yesterday", noon)) == []


def test_wandb_with_a_key_and_without(broken, closed_port):
    with serving(Hub()) as server:
        broken.environment["WANDB_BASE_URL"] = server.url
        assert told(broken.diagnose("wandb"), Level.FINE) == [
            (f"{server.url} answers; no key is kept (for log.wandb=online: wandb login)", None)
        ]
        (broken.home / ".netrc").write_text(f"machine 127.0.0.1\n  login user\n  password {KEY}\n")
        found = broken.diagnose("wandb")
    assert told(found, Level.FINE) == [(f"{server.url} answers; a key is kept", None)]
    assert KEY not in codec.encode(found).decode()
    broken.environment |= {"WANDB_BASE_URL": f"http://127.0.0.1:{closed_port}", "WANDB_API_KEY": KEY}
    found = broken.diagnose("wandb")
    assert told(found, Level.WARNING) == [
        (
            f"http://127.0.0.1:{closed_port} does not answer: Connection refused; a key is kept",
            "log.wandb=offline, and wandb sync later",
        )
    ]
    assert KEY not in codec.encode(found).decode()
    broken.environment["WANDB_MODE"] = "offline"
    assert told(broken.diagnose("wandb"), Level.FINE) == [("WANDB_MODE=offline: wandb is not asked", None)]


def test_a_token_does_not_follow_to_another_server(broken):
    """A server that sends the question on must not send the token with it."""
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    seen: list[str | None] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            self.send_response(302 if len(seen) == 1 else 200)
            self.send_header("Location", f"http://localhost:{self.server.server_port}/elsewhere")
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


SLURM_CONF = "ClusterName=test\n"


@pytest.fixture
def login_node(broken):
    broken.install("sbatch", "exit 1")
    broken.write("etc/slurm/slurm.conf", SLURM_CONF)
    broken.install("munge", "echo MUNGE:abc:")
    broken.install("unmunge", "cat >/dev/null; echo STATUS: Success")
    broken.install("scontrol", "echo 'Slurmctld(primary) at head is UP'")
    return broken


def test_a_login_node_that_is_well(login_node):
    assert told(login_node.diagnose("slurm"), Level.FINE) == [
        ("this is a login node: shardwise submit; Slurmctld(primary) at head is UP", None)
    ]


def test_a_controller_that_does_not_answer(login_node):
    login_node.install(
        "scontrol", "echo 'slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    )
    found = login_node.diagnose("slurm")
    assert told(found, Level.FAULT) == [
        ("scontrol ping: the Slurm controller does not answer", "try again, or ask who runs the cluster")
    ]
    assert found.exit_code is ExitCode.ENVIRONMENT


def test_a_munge_that_is_not_at_work(login_node):
    login_node.install(
        "munge", "echo 'munge: Error: Failed to access \"/run/munge/munge.socket.2\": No such file' >&2; exit 6"
    )
    ((sentence, fix),) = told(login_node.diagnose("slurm"), Level.FAULT)
    assert sentence.startswith("munge does not speak for this user: munge: Error: Failed to access")
    assert fix == "sudo systemctl restart munge; its clock and its key must be those of the controller"


def test_a_slurm_that_hangs_beside_gpus_is_a_warning(login_node):
    login_node.install_gpu()
    login_node.install("scontrol", "exec sleep 600")
    found = login_node.diagnose("slurm")
    ((sentence, _),) = told(found, Level.WARNING)
    assert sentence == "scontrol ping: no answer within 6 s"
    assert found.exit_code is ExitCode.DONE


def test_a_machine_without_slurm_says_nothing_of_it(broken):
    assert broken.diagnose("slurm").findings == ()
