"""A real Slurm on this machine for tests: every node has its own network, hostname, processes' view of /etc/hosts.

    with running_cluster() as cluster:            # tests use the fixture `slurm` (slurm_fixture.py)
        job = cluster.submit("--wrap=hostname")
        assert cluster.wait_for(job, "COMPLETED").exit_code == "0:0"

Nodes and partitions (slurm.conf is written by `slurm_config`):

    n1 .. n4   slurmd runs; the cores and the memory of this machine, no GPU   cpu (default), low (preemptable by cpu)
    g1, g2     slurmd runs; 96 pretended cores, 8 fake GPUs                    gpu
    c1 .. c4   nothing runs: for `sbatch --test-only`; 8 x H100                h100

Needs root, slurm-wlm 22.05 or later, munge and iproute2. Everything is named by a slot that a file lock holds, so
that several clusters run side by side; `suite_remains` removes what a killed run of tests leaves.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from slurm_config import HEAD, Addresses, write_config
from suite_remains import (
    NUM_SLOTS,
    SEARCH_PATH_OF_ROOT,
    cluster_folder,
    kill_all_in,
    lock_slot,
    pids_in,
    remove_cluster,
    run_ip_lines,
)

CPU_NODES = ("n1", "n2", "n3", "n4")
GPU_NODES = ("g1", "g2")
INSTALLED_BY = "sudo apt-get install --no-install-recommends slurm-wlm munge iproute2"
ENDED = frozenset(
    {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE"}
)
CALL_TIMEOUT_S = 300  # a machine may be busy; one that hangs is ended by the limit of the test
_PROGRAMS = ("slurmctld", "slurmd", "munged", "ip", "nsenter", "unshare", "setpriv")
_UP = frozenset({"idle", "mixed", "allocated", "completing"})  # and answering: otherwise a * is appended
_POLL_S = 0.05


class JobState(NamedTuple):
    """The fields of `scontrol show job`; `text` is the whole line."""

    state: str
    reason: str
    restarts: int
    exit_code: str  # CODE:SIGNAL
    nodes: str
    text: str


def lacks_slurm() -> str | None:
    """The reason why no cluster can be started here, with a remedy; None if one can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_search_path()) is None]
    if missing:
        return f"a real Slurm needs {', '.join(missing)}: {INSTALLED_BY}"
    if os.geteuid() != 0:
        return "a real Slurm with a network for each node needs root"
    spaces = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True, check=False
    )
    return None if spaces.returncode == 0 else f"a real Slurm needs namespaces of its own: {spaces.stderr.strip()}"


@contextmanager
def running_cluster() -> Iterator["SlurmCluster"]:
    """A cluster with every node idle, stopped at the end."""
    slot, lock = _take_slot()
    with lock:
        cluster = SlurmCluster(slot)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


class SlurmCluster:
    """The daemons, and what a test asks of them."""

    def __init__(self, slot: int) -> None:
        self.folder = cluster_folder(slot)
        self._slot = slot
        self._prefix = f"swt{slot}"
        self._addresses = Addresses(f"10.213.{slot}", (*CPU_NODES, *GPU_NODES))
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        """Of a login node: the clients find this cluster, and `shardwise` and `python` are those of the tests."""
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        return {**outer, "PATH": _search_path(), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        for name in ("state", "spool", "run", "log", "dev"):
            (self.folder / name).mkdir()
        write_config(self.folder, self._addresses, cpu_nodes=CPU_NODES, gpu_nodes=GPU_NODES)
        self._add_networks()
        self._daemon(HEAD, "munged", *self._munge_options())
        self.wait_until((self.folder / "run" / "munge.sock").is_socket, "munged listens")
        self._daemon(HEAD, "slurmctld", "-D", "-c")
        for name in self._addresses.nodes:
            self._daemon(name, "slurmd", "-D", "-N", name)
        self.wait_until(lambda: self._are_up(*self._addresses.nodes), "every node is up")

    def stop(self) -> None:
        """Ends every process of the cluster and removes its networks and its folder."""
        remove_cluster(self._slot)
        for daemon in self._daemons:
            daemon.wait(CALL_TIMEOUT_S)

    def run(self, *words: str | Path, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs a program on the login node."""
        answer = subprocess.run(
            list(map(str, words)), env={**self.environment, **environment}, capture_output=True, text=True,
            timeout=CALL_TIMEOUT_S, check=False,
        )  # fmt: skip
        assert not check or answer.returncode == 0, f"{words}: {answer.returncode}\n{answer.stdout}\n{answer.stderr}"
        return answer

    def submit(self, *words: str | Path, **environment: str) -> str:
        """Submits by sbatch; the id of the job."""
        return self.run("sbatch", "--parsable", *words, check=True, **environment).stdout.strip().partition(";")[0]

    def job(self, job_id: str) -> JobState:
        """The current state of the job; of an array the task `ID_INDEX`."""
        text = self.run("scontrol", "-o", "show", "job", job_id).stdout.strip()
        fields = _fields(text)
        return JobState(
            state=fields["JobState"], reason=fields["Reason"], restarts=int(fields["Restarts"]),
            exit_code=fields["ExitCode"], nodes=fields.get("NodeList", ""), text=text,
        )  # fmt: skip

    def wait_for(
        self, job_id: str, *states: str, restarts: int | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> JobState:
        """The job once it is in one of `states`, having been started again so often; fails where it ends otherwise."""
        deadline = time.monotonic() + timeout_s
        while True:
            job = self.job(job_id)
            if job.state in states and restarts in (None, job.restarts):
                return job
            has_ended = job.state in ENDED and job.state not in states
            if has_ended or time.monotonic() > deadline:
                raise AssertionError(f"job {job_id} is not {' or '.join(states)}: {job.text}\n{self.log_tail()}")
            time.sleep(_POLL_S)

    def wait_until(self, claim: Callable[[], bool], words: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Returns once `claim()` holds; `words` say it where it does not come true."""
        deadline = time.monotonic() + timeout_s
        while not claim():
            assert time.monotonic() < deadline, f"not true after {timeout_s} s: {words}\n{self.log_tail()}"
            time.sleep(_POLL_S)

    def kill_node(self, name: str) -> None:
        """A power cut: the cable is out, then every process is gone."""
        run_ip_lines([f"link set {self._prefix}{name} down"])
        self.kill_all(name)

    def start_node(self, name: str) -> None:
        """Boots a node that was killed; returns once Slurm would use it."""
        run_ip_lines([f"link set {self._prefix}{name} up"])
        self._daemon(name, "slurmd", "-D", "-b", "-N", name)
        self.wait_until(lambda: self._are_up(name), f"{name} is up")

    def tidy(self) -> None:
        """No job is left, pending or running, and every node that was killed is up again."""
        self._cancel_all()
        for name in self._addresses.nodes:
            if not pids_in(self._namespace(name)):
                self.start_node(name)
        while self._cancel_all():
            time.sleep(_POLL_S)

    def log_tail(self) -> str:
        """The end of what the controller and the nodes said."""
        logs = sorted((self.folder / "log").glob("*.log"))
        return "\n".join(f"-- {path.name}\n" + "\n".join(path.read_text().splitlines()[-12:]) for path in logs)

    def _munge_options(self) -> list[str]:
        folder = self.folder
        return ["--foreground", f"--key-file={folder}/munge.key", f"--socket={folder}/run/munge.sock",
                f"--pid-file={folder}/run/munged.pid", f"--log-file={folder}/log/munged.log",
                f"--seed-file={folder}/run/munged.seed"]  # fmt: skip

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _add_networks(self) -> None:
        """A bridge, and on it for each node a namespace with an address of its own."""
        bridge, login = f"{self._prefix}br", self._addresses.login
        lines = [f"link add {bridge} type bridge", f"addr add {login}/24 dev {bridge}", f"link set {bridge} up"]
        names = (HEAD, *self._addresses.nodes)
        for name in names:
            cable = f"{self._prefix}{name}"
            lines += [
                f"netns add {self._namespace(name)}",
                f"link add {cable} type veth peer name eth0 netns {self._namespace(name)}",
                f"link set {cable} master {bridge} up",
            ]
        run_ip_lines(lines)
        for name in names:
            own = [f"addr add {self._addresses.of(name)}/24 dev eth0", "link set eth0 up", "link set lo up"]
            run_ip_lines([*own, f"route add default via {login}"], namespace=self._namespace(name))

    def on_node(self, node: str, *words: str | Path) -> list[str]:
        """The argv that runs a program on a node, with the node's network, hostname and hosts."""
        inside = (
            'hostname "$1" && mount --bind "$2/hosts" /etc/hosts && mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf '
            '&& shift 2 && exec "$@"'
        )
        enter = ["nsenter", f"--net=/run/netns/{self._namespace(node)}"]
        unshare = ["unshare", "--uts", "--mount", "--propagation", "private"]
        return [*enter, *unshare, "sh", "-c", inside, "sh", node, str(self.folder), *map(str, words)]

    def _daemon(self, node: str, *words: str) -> None:
        """Starts a program on a node; it is killed when the tests are, also where nothing else tidies up."""
        with (self.folder / "log" / f"{words[0]}.{node}.stderr").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *self.on_node(node, *words)],
                    env=self.environment,
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C at the tests is not for them
                )
            )

    def _are_up(self, *names: str) -> bool:
        answer = self.run("sinfo", "-h", "-N", "-n", ",".join(names), "-o", "%N %T", check=False)
        states = dict(line.split() for line in answer.stdout.splitlines())
        return len(states) == len(names) and set(states.values()) <= _UP

    def _cancel_all(self) -> bool:
        """True if there were jobs to cancel, ending ones included."""
        job_ids = self.run("squeue", "-h", "-a", "-o", "%A").stdout.split()
        if job_ids:
            self.run("scancel", "--full", "--signal=KILL", *job_ids, check=False)
            self.run("scancel", *job_ids, check=False)
        return bool(job_ids)

    def kill_all(self, name: str) -> None:
        """Kills whatever runs in the node's network until nothing does."""
        kill_all_in(self._namespace(name))


def _search_path() -> str:
    """Programs of the tests' interpreter first; daemons are in sbin, which a user's PATH often lacks."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], SEARCH_PATH_OF_ROOT])


def _take_slot() -> tuple[int, IO[str]]:
    """The first free slot, with nothing left in it, and the lock that holds it."""
    for slot in range(NUM_SLOTS):
        if lock := lock_slot(slot):
            remove_cluster(slot)
            cluster_folder(slot).mkdir(mode=0o755)
            return slot, lock
    raise AssertionError(f"{NUM_SLOTS} clusters run already")


def _fields(line: str) -> Mapping[str, str]:
    """Words `KEY=VALUE` of one line of scontrol behind the job's name; the first of each key: a comment comes last."""
    pairs = (word.partition("=") for word in line.partition(" UserId=")[2].split() if "=" in word)
    found: dict[str, str] = {}
    for key, _, value in pairs:
        found.setdefault(key, value)
    return found
