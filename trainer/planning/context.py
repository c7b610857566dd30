"""Planning context: the job, the machine and the model, for one method. Every rule and search reads it."""

from functools import cached_property

from shardwise.trainer.planning.calibrate import NO_CORRECTIONS, Corrections
from shardwise.trainer.planning.device import Device
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.hardware import DeviceKind, Hardware
from shardwise.trainer.spec.host_ram import pinnable_ram, usable_ram
from shardwise.trainer.spec.job.sections import Job
from shardwise.trainer.spec.messages.extension import Hook
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import Fp8Gain, Schedule
from shardwise.trainer.spec.strategy import Method
from shardwise.trainer.spec.units import format_bytes
from shardwise.trainer.spec.value import Value


class PlanningContext(Value, frozen=True, kw_only=True, dict=True):
    """The inputs of a decision, put together once; with a dict for what a search reads thousands of times."""

    job: Job
    hardware: Hardware
    device: Device
    shape: ModelShape
    schedule: Schedule
    method: Method
    num_eval_tokens: int = 0
    data: DataProfile | None = None  # None: rows of seq_len tokens
    corrections: Corrections = NO_CORRECTIONS  # of every strategy, from earlier runs
    fp8_gain: Fp8Gain | None = None  # measured on this model's blocks
    hooks: tuple[Hook, ...] = ()  # of the user's extensions file

    @cached_property
    def num_ranks(self) -> int:
        return self.hardware.num_devices

    @cached_property
    def broken_rules(self) -> dict[tuple[str, str], int]:
        """The index of the first rule of the job that a setting breaks, by axis and value; `rules.rule` fills it."""
        return {}

    @cached_property
    def is_cpu(self) -> bool:
        return self.device.kind is DeviceKind.CPU

    @cached_property
    def sequences_per_rank(self) -> int:
        """Sequences of one step on the rank that has most of them."""
        return -(-self.schedule.sequences_per_step // self.num_ranks)

    @cached_property
    def host_ram_bytes(self) -> int | None:
        """Bytes of RAM that the processes of a node may use, or None if unknown."""
        return usable_ram(self.hardware.host, self.job.limits.host_ram)

    @cached_property
    def pinnable_ram_bytes(self) -> int | None:
        """Bytes of RAM that the processes of a node may pin, or None if unknown."""
        return pinnable_ram(self.hardware.host, self.job.limits.host_ram)

    @cached_property
    def knows_host_copies(self) -> bool:
        """True if copies between this machine's RAM and its devices were measured, or a run here depended on them."""
        return self.hardware.rates.host_to_device_bytes_per_s is not None or self.corrections.has_moved_activations

    @cached_property
    def nvme_bytes(self) -> int | None:
        """Bytes that offload may write under limits.nvme.path, or None if unknown."""
        nvme = self.job.limits.nvme
        if nvme.size is not None or nvme.path is None:
            return nvme.size
        disks = [disk for disk in self.hardware.host.disks if nvme.path.startswith(disk.path)]
        return max(disks, key=lambda disk: len(disk.path)).free_bytes if disks else None

    @cached_property
    def fast_bf16(self) -> bool:
        """Bf16 matrix products in hardware: compute capability 8.0, or AMX on a CPU."""
        if self.is_cpu:
            return "amx_bf16" in self.hardware.host.cpu_flags
        return (self.device.compute_capability or (0, 0)) >= (8, 0)

    def has_library(self, name: str) -> bool:
        """True if the probe found the package; names as on the package index."""
        return name in self.libraries

    @cached_property
    def libraries(self) -> frozenset[str]:
        """The packages that the probe found, with their names on the package index."""
        return self.hardware.library_names

    @cached_property
    def device_text(self) -> str:
        """`H100-SXM5-80GB has 79.1 GiB usable`."""
        capped = self.hardware.vram_cap_bytes
        limit = " (limits.vram)" if capped is not None and capped <= self.device.usable_bytes else ""
        return f"{self.device.name} has {format_bytes(self.device.usable_bytes)} usable{limit}"
