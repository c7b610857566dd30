"""The configuration of a test cluster: slurm.conf, gres.conf, hosts and a key, in the cluster's folder.

Everything is private to that folder: nothing is read from /etc/slurm, and no cgroups and no systemd are needed. Times
are short where the defaults make a test wait: a requeued job starts after cred_expire (default 120 s), jobs are
scheduled at once, a dead node is noticed after SlurmdTimeout.
"""

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HEAD = "head"  # the controller's hostname
NUM_GPUS = 8
GRACE_S = 20  # of a preempted job

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
NodeName=c[1-4] NodeAddr={login} CPUs=96 RealMemory=1000000 Gres=gpu:h100:{num_gpus} Feature=h100,ib State=CLOUD
PrivateData=cloud
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=3600
SuspendExcNodes={node_names}
PartitionName=cpu Nodes={cpu_nodes} Default=YES PriorityTier=10 MaxTime=INFINITE State=UP
PartitionName=low Nodes={cpu_nodes} PriorityTier=1 GraceTime={grace_s} MaxTime=INFINITE State=UP
PartitionName=gpu Nodes={gpu_nodes} PriorityTier=10 MaxTime=INFINITE State=UP
PartitionName=h100 Nodes=c[1-4] DefaultTime=1:00:00 MaxTime=2-00:00:00 State=UP
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


def write_config(folder: Path, addresses: Addresses, *, cpu_nodes: Sequence[str], gpu_nodes: Sequence[str]) -> None:
    """Writes the files that the daemons read, and makes the fake GPUs."""
    small = f"CPUs={max(2, os.cpu_count() or 1)} RealMemory={_ram_mib()}"
    large = f"CPUs=96 RealMemory=1000000 Gres=gpu:{NUM_GPUS}"
    nodes = [
        f"NodeName={name} NodeAddr={addresses.of(name)} {large if name in gpu_nodes else small} State=UNKNOWN"
        for name in addresses.nodes
    ]
    (folder / "slurm.conf").write_text(
        _CONFIG.format(
            folder=folder, head=HEAD, head_address=addresses.of(HEAD), login=addresses.login, nodes="\n".join(nodes),
            node_names=",".join(addresses.nodes), cpu_nodes=",".join(cpu_nodes), gpu_nodes=",".join(gpu_nodes),
            num_gpus=NUM_GPUS, grace_s=GRACE_S,
        )
    )  # fmt: skip
    _write_gpus(folder, gpu_nodes)
    _write_names(folder, addresses)
    (folder / "munge.key").touch(mode=0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))


def _write_gpus(folder: Path, gpu_nodes: Sequence[str]) -> None:
    """Copies of /dev/null: slurmd counts only devices, and of a plain file it sets no CUDA_VISIBLE_DEVICES."""
    for number in range(NUM_GPUS):
        os.mknod(folder / "dev" / f"gpu{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    files = f"{folder}/dev/gpu[0-{NUM_GPUS - 1}]"
    lines = [
        "AutoDetect=off",
        f"NodeName={','.join(gpu_nodes)} Name=gpu File={files}",
        f"NodeName=c[1-4] Name=gpu Type=h100 File={files}",
    ]
    (folder / "gres.conf").write_text("\n".join(lines) + "\n")


def _write_names(folder: Path, addresses: Addresses) -> None:
    """Names of the nodes, and no DNS: looking up an IPv6 address there would wait seconds for a resolver."""
    names = (HEAD, *addresses.nodes)
    lines = ["127.0.0.1 localhost", f"{addresses.login} login", *(f"{addresses.of(name)} {name}" for name in names)]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    system = Path("/etc/nsswitch.conf").read_text()
    (folder / "nsswitch.conf").write_text(re.sub(r"(?m)^hosts:.*$", "hosts: files", system))


def _ram_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
