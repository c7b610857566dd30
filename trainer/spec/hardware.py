"""A machine as the planner sees it. Bytes are ints, rates are bytes per second, and what is unknown is None.

Nothing here reads the machine: `launch.probe.machine` does, and `trainer.planning.tables.gpu_specs` describes
other machines. A machine without a GPU is one device, the CPU, whose memory is the RAM that the cgroup
grants.
"""

from enum import StrEnum

from msgspec import field

from shardwise.trainer.spec.value import Value


class DeviceKind(StrEnum):
    """Kind of device of a rank."""

    CUDA = "cuda"
    CPU = "cpu"


class LinkKind(StrEnum):
    """Connection of two GPUs of one node, in the terms of `nvidia-smi topo -m`."""

    NVLINK = "nvlink"  # NV#
    PCIE_SWITCH = "pcie_switch"  # PIX, PXB
    PCIE_HOST = "pcie_host"  # PHB
    NUMA_NODE = "numa_node"  # NODE
    SOCKET = "socket"  # SYS


class GpuProcess(Value, frozen=True, kw_only=True):
    """A process that holds memory of a GPU."""

    pid: int
    name: str | None
    memory_bytes: int | None


class Gpu(Value, frozen=True, kw_only=True):
    """One GPU, or one MIG slice of one."""

    index: int
    name: str
    spec_name: str | None  # its row in the GPU catalogue, None when it has none
    memory_bytes: int
    usable_bytes: int | None = None  # what a process can allocate, context included
    free_bytes: int | None = None
    uuid: str | None = None
    compute_capability: tuple[int, int] | None = None
    driver: str | None = None
    is_ecc_on: bool | None = None
    is_mig_on: bool | None = None
    power_limit_w: float | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    numa_node: int | None = None
    num_cuda_cores: int | None = None  # this and the next three: in files of 0.7, and not read
    max_clock_mhz: int | None = None
    memory_bus_bits: int | None = None
    max_memory_clock_mhz: int | None = None
    processes: tuple[GpuProcess, ...] = field(default=(), name="holders")


class Link(Value, frozen=True, kw_only=True):
    """Link between two GPUs of one node."""

    a: int
    b: int
    kind: LinkKind
    num_nvlinks: int = 0
    bytes_per_s: int | None = None  # each direction
    has_peer_access: bool | None = None


class Disk(Value, frozen=True, kw_only=True):
    """A local file system that could hold offloaded state."""

    path: str
    filesystem: str
    total_bytes: int
    free_bytes: int
    is_rotational: bool | None = None
    write_bytes_per_s: int | None = None
    read_bytes_per_s: int | None = None


class NetworkInterface(Value, frozen=True, kw_only=True):
    """A network interface that is up."""

    name: str
    address: str | None
    speed_bytes_per_s: int | None


class SlurmEnvironment(Value, frozen=True, kw_only=True):
    """Slurm's description of this process: a login node has the commands but no job."""

    has_sbatch: bool
    job_id: str | None = None
    num_nodes: int | None = None
    node_list: str | None = None


class Host(Value, frozen=True, kw_only=True):
    """The machine around the devices; every limit is the one the cgroup grants. None: not known (another machine)."""

    cpu_name: str | None
    num_cores: int | None
    ram_bytes: int | None
    ram_available_bytes: int | None
    usable_ram_bytes: int | None = None  # by a run, as probed or granted; None: `host_ram` follows from the two above
    is_ram_assumed: bool = False  # usual for such a machine, neither probed nor stated
    is_desktop: bool = False  # a machine of consumer cards, which people use meanwhile
    pinned_limit_bytes: int | None = None  # None: `host_ram` has a share of the RAM
    memlock_limit_bytes: int | None = None  # mlock and InfiniBand, not CUDA; None: no limit, or not known
    shm_bytes: int | None = None
    cpu_flags: tuple[str, ...] = ()  # those that decide a precision: avx2, avx512f, avx512_bf16, amx_bf16
    is_wsl: bool = False
    disks: tuple[Disk, ...] = ()
    interfaces: tuple[NetworkInterface, ...] = ()
    slurm: SlurmEnvironment | None = None


class PeerCopy(Value, frozen=True, kw_only=True):
    """Result of copying memory of GPU `a` to GPU `b` and reading it there."""

    a: int
    b: int
    bytes_per_s: int | None = None  # None: it did not end in time, or failed
    is_correct: bool = False


class MeasuredRates(Value, frozen=True, kw_only=True):
    """Ceilings measured on this machine by `probe --measure`; each replaces a datasheet figure."""

    matmul_flops_per_s: int | None = None  # in the precision a plan would train in on this device
    matmul_precision: str | None = None  # fp32, fp16 or bf16: what was measured, the fastest this device trains in
    fp32_flops_per_s: int | None = None
    fp8_flops_per_s: int | None = None
    attention_flops_per_s: int | None = None  # a causal forward, masked scores not counted
    memory_bytes_per_s: int | None = None
    host_to_device_bytes_per_s: int | None = None
    device_to_host_bytes_per_s: int | None = None
    host_adam_bytes_per_s: int | None = None  # of state, weight and gradient, by all cores
    all_gather_bytes_per_s: int | None = None  # each way through one device of a ring over all of them
    between_nodes_bytes_per_s: int | None = None  # the same over all devices of several nodes, into one of them
    gathers_only_without_peers: bool = False  # with peer access the all-gather hung, failed or delivered other values
    peer_copies: tuple[PeerCopy, ...] = ()


class Hardware(Value, frozen=True, kw_only=True):
    """Everything a plan needs to know of one machine, or of several equal ones.

    `gpus` are those a plan may use; `excluded` lists the others with the reason, as text. `num_cpu_devices` counts
    the ranks that share the CPU of a machine without a GPU.
    """

    gpus: tuple[Gpu, ...]
    host: Host
    num_nodes: int = 1
    num_cpu_devices: int = 1
    links: tuple[Link, ...] = ()
    excluded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    libraries: dict[str, str] = {}
    unfit_libraries: dict[str, str] = {}  # installed, but at a version that another does not support: the reason
    rates: MeasuredRates = MeasuredRates()
    vram_cap_bytes: int | None = None  # --vram or limits.vram
    network_bytes_per_s: int | None = None  # of a node, all adapters together, as it is stated; None: assumed
    can_expand_segments: bool = True  # torch's expandable segments: not under WSL, nor where a trial allocation failed
    source: str = "probe"  # probe | catalogue SPEC | file

    @property
    def device_kind(self) -> DeviceKind:
        return DeviceKind.CUDA if self.gpus else DeviceKind.CPU

    @property
    def library_names(self) -> frozenset[str]:
        """The packages that the probe found, with their names on the package index."""
        return frozenset(name.replace("_", "-").lower() for name in self.libraries)

    @property
    def is_one_cpu_machine(self) -> bool:
        """True for one machine without GPUs: `2xCPU` states ranks on the CPU of the machine that plans."""
        return not self.gpus and self.num_nodes == 1

    @property
    def other_python(self) -> str | None:
        """Python as a person types it on another machine; None: this one's, by its path."""
        return None if self.source == "probe" else "python"

    @property
    def num_devices_per_node(self) -> int:
        return len(self.gpus) or self.num_cpu_devices

    @property
    def needs_p2p_disabled(self) -> bool:
        """True if GPUs of this machine hang or deliver wrong values when they copy to each other."""
        return self.rates.gathers_only_without_peers or any(not copy.is_correct for copy in self.rates.peer_copies)

    @property
    def num_devices(self) -> int:
        """Devices over all nodes: the number of ranks a plan starts."""
        return self.num_nodes * self.num_devices_per_node
