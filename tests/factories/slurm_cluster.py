"""A real Slurm on this machine for tests: every node has its own network, hostname and hosts.

    n1 .. n4   slurmd runs; the cores and the memory of this machine, no GPU   cpu (default), low (preemptable by cpu)
    g1, g2     slurmd runs; 96 pretended cores, 8 fake GPUs                    gpu
    c1 .. c4   nothing runs: for `sbatch --test-only`; 8 x H100                h100

Needs root, slurm-wlm 22.05 or later, munge and iproute2. A file lock holds the slot of a cluster, so that several run
side by side; `suite_remains` removes what a killed run of tests leaves.
"""

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import pytest
import suite_remains
from suite_remains import cluster_folder, remove_cluster, run_ip_lines

CPU_NODES = ("n1", "n2", "n3", "n4")
GPU_NODES = ("g1", "g2")
INSTALLED_BY = "sudo apt-get install --no-install-recommends slurm-wlm munge iproute2"
ENDED = frozenset(
    {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE"}
)
HEAD = "head"  # the controller's hostname

_CONFIG = """\
ClusterName=test
SlurmctldHost={head}({head_address})
SlurmctldPort=6817
SlurmdPort=6818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/run/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
# neither cgroups nor systemd; nodes may claim more than this machine has
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SlurmdParameters=config_overrides
# scheduling, preemption, requeueing
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
EnforcePartLimits=ALL
ReturnToService=2
MailProg=/bin/true
KillWait=5
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=5
InactiveLimit=0
CompleteWait=0
UnkillableStepTimeout=20
# sacct needs slurmdbd: ended jobs stay with the controller instead
MinJobAge=86400
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp.txt
# nodes with a slurmd; CLOUD nodes have none, are shown all the same and take jobs of `sbatch --test-only`
GresTypes=gpu
{nodes}
NodeName=c[1-4] NodeAddr={login} CPUs=96 RealMemory=1000000 Gres=gpu:h100:8 Feature=h100,ib State=CLOUD
PrivateData=cloud
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=3600
SuspendExcNodes=n[1-4],g[1-2]
PartitionName=cpu Nodes=n[1-4] Default=YES PriorityTier=10 MaxTime=INFINITE State=UP
PartitionName=low Nodes=n[1-4] PriorityTier=1 GraceTime=20 MaxTime=INFINITE State=UP
PartitionName=gpu Nodes=g[1-2] PriorityTier=10 MaxTime=INFINITE State=UP
PartitionName=h100 Nodes=c[1-4] DefaultTime=1:00:00 MaxTime=2-00:00:00 State=UP
"""
CALL_TIMEOUT_S = 300  # a machine may be busy; one that hangs is ended by the limit of the test
_PROGRAMS = ("slurmctld", "slurmd", "munged", "ip", "nsenter", "unshare", "setpriv")
_UP = frozenset({"idle", "mixed", "allocated", "completing"})  # and answering: otherwise a * is appended
_POLL_S = 0.05
_GPUS = """\
AutoDetect=off
NodeName=g[1-2] Name=gpu File={folder}/dev/gpu[0-7]
NodeName=c[1-4] Name=gpu Type=h100 File={folder}/dev/gpu[0-7]
"""


class Addresses(NamedTuple):
    """Addresses in a cluster's /24, by name; the login node is this machine."""

    network: str  # its first three numbers
    nodes: tuple[str, ...]

    @property
    def login(self) -> str:
        return f"{self.network}.1"

    def of(self, name: str) -> str:
        return f"{self.network}.2" if name == HEAD else f"{self.network}.{10 + self.nodes.index(name)}"


class JobState(NamedTuple):
    state: str
    restarts: int
    exit_code: str  # CODE:SIGNAL
    nodes: str
    text: str


def lacks_slurm() -> str | None:
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_search_path()) is None]
    if missing:
        return f"a real Slurm needs {', '.join(missing)}: {INSTALLED_BY}"
    if os.geteuid() != 0:
        return "a real Slurm with a network for each node needs root"
    argv = ["unshare", "--net", "--uts", "--mount", "true"]
    spaces = subprocess.run(argv, capture_output=True, text=True, check=False)
    return None if spaces.returncode == 0 else f"a real Slurm needs namespaces of its own: {spaces.stderr.strip()}"


class SlurmCluster:
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
        _write_config(self.folder, self._addresses)
        self._add_networks()
        files = {"key-file": "munge.key", "socket": "run/munge.sock", "pid-file": "run/munged.pid"}
        files |= {"log-file": "log/munged.log", "seed-file": "run/munged.seed"}
        options = [f"--{name}={self.folder / file}" for name, file in files.items()]
        self._daemon(HEAD, "munged", "--foreground", *options)
        self.wait_until((self.folder / "run" / "munge.sock").is_socket, "munged listens")
        self._daemon(HEAD, "slurmctld", "-D", "-c")
        for name in self._addresses.nodes:
            self._daemon(name, "slurmd", "-D", "-N", name)
        self.wait_until(lambda: self._are_up(*self._addresses.nodes), "every node is up")

    def stop(self) -> None:
        remove_cluster(self._slot)
        for daemon in self._daemons:
            daemon.wait(CALL_TIMEOUT_S)

    def run(self, *words: str | Path, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
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
        text = self.run("scontrol", "-o", "show", "job", job_id).stdout.strip()
        words = text.partition(" UserId=")[2].split()  # behind the name of the job, which may hold anything
        fields = dict(word.split("=", 1) for word in reversed(words) if "=" in word)  # a comment comes last
        nodes = fields.get("NodeList", "")
        return JobState(fields["JobState"], int(fields["Restarts"]), fields["ExitCode"], nodes, text)

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
        run_ip_lines([f"link set {self._prefix}{name} up"])
        self._daemon(name, "slurmd", "-D", "-b", "-N", name)
        self.wait_until(lambda: self._are_up(name), f"{name} is up")

    def tidy(self) -> None:
        """No job is left, pending or running, and every node that was killed is up again."""
        self._cancel_all()
        for name in self._addresses.nodes:
            if not suite_remains.pids_in(self._namespace(name)):
                self.start_node(name)
        while self._cancel_all():
            time.sleep(_POLL_S)

    def log_tail(self) -> str:
        logs = sorted((self.folder / "log").glob("*.log"))
        return "\n".join(f"-- {path.name}\n" + "\n".join(path.read_text().splitlines()[-12:]) for path in logs)

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
            daemon = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self.on_node(node, *words)], env=self.environment, cwd="/",
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,  # Ctrl-C at the tests is not for them
            )  # fmt: skip
            self._daemons.append(daemon)

    def _are_up(self, *names: str) -> bool:
        answer = self.run("sinfo", "-h", "-N", "-n", ",".join(names), "-o", "%N %T", check=False)
        states = dict(line.split() for line in answer.stdout.splitlines())
        return len(states) == len(names) and set(states.values()) <= _UP

    def _cancel_all(self) -> bool:
        job_ids = self.run("squeue", "-h", "-a", "-o", "%A").stdout.split()
        if job_ids:
            self.run("scancel", "--full", "--signal=KILL", *job_ids, check=False)
            self.run("scancel", *job_ids, check=False)
        return bool(job_ids)

    def kill_all(self, name: str) -> None:
        """Kills whatever runs in the node's network until nothing does."""
        suite_remains.kill_all(suite_remains.in_network(self._namespace(name)))


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Started when the first test asks, with every node idle. Where it cannot be, tests skip; in CI they fail."""
    obstacle = lacks_slurm()
    if obstacle is not None:
        (pytest.fail if os.environ.get("SHARDWISE_CI") == "1" else pytest.skip)(obstacle)
    slot, lock = _take_slot()
    with lock:
        cluster = SlurmCluster(slot)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster; what a test leaves behind is cancelled, what it killed is booted."""
    yield slurm_cluster
    slurm_cluster.tidy()


def _write_config(folder: Path, addresses: Addresses) -> None:
    ram_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    small = f"CPUs={max(2, os.cpu_count() or 1)} RealMemory={ram_mib}"
    large = "CPUs=96 RealMemory=1000000 Gres=gpu:8"
    nodes = [
        f"NodeName={name} NodeAddr={addresses.of(name)} {large if name in GPU_NODES else small} State=UNKNOWN"
        for name in addresses.nodes
    ]
    facts = {"folder": folder, "head": HEAD, "head_address": addresses.of(HEAD), "login": addresses.login}
    (folder / "slurm.conf").write_text(_CONFIG.format(nodes="\n".join(nodes), **facts))
    # Copies of /dev/null: slurmd counts only devices, and of a plain file it sets no CUDA_VISIBLE_DEVICES.
    for number in range(8):
        os.mknod(folder / "dev" / f"gpu{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (folder / "gres.conf").write_text(_GPUS.format(folder=folder))
    # Names of the nodes, and no DNS: looking up an IPv6 address there would wait seconds for a resolver.
    names = (HEAD, *addresses.nodes)
    lines = ["127.0.0.1 localhost", f"{addresses.login} login", *(f"{addresses.of(name)} {name}" for name in names)]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    system = Path("/etc/nsswitch.conf").read_text()
    (folder / "nsswitch.conf").write_text(re.sub(r"(?m)^hosts:.*$", "hosts: files", system))
    (folder / "munge.key").touch(mode=0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))


def _search_path() -> str:
    """Programs of the tests' interpreter first; daemons are in sbin, which a user's PATH often lacks."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], suite_remains.SEARCH_PATH_OF_ROOT])


def _take_slot() -> tuple[int, IO[str]]:
    for slot in range(suite_remains.NUM_SLOTS):
        if lock := suite_remains.lock_slot(slot):
            remove_cluster(slot)
            cluster_folder(slot).mkdir(mode=0o755)
            return slot, lock
    raise AssertionError(f"{suite_remains.NUM_SLOTS} clusters run already")
