"""Facts about the installed torch and the GPUs it sees, read in a separate process."""

from trainer.spec.value import Value


class DeviceTrial(Value, frozen=True, kw_only=True):
    """Result of allocating and multiplying on a device."""

    problem: str | None = None  # the first line of what torch raised; None: it works
    is_out_of_memory: bool = False


class TorchFacts(Value, frozen=True, kw_only=True):
    """The answer of `python -m trainer.runtime.tools.torch_check`."""

    version: str
    cuda: str | None  # that torch was built for; None: a build for the CPU
    architectures: tuple[str, ...] = ()  # that it has code for; empty: torch does not say
    devices: tuple[DeviceTrial, ...] = ()  # that torch sees, in the order of CUDA_VISIBLE_DEVICES
    expands_segments: bool | None = None  # whether the trials' memory came from expandable segments; None: not known
    problem: str | None = None  # what torch raised when CUDA was to be initialised
