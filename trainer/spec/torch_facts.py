"""What the installed torch says of itself and of the GPUs here: asked of it in a process of its own."""

from trainer.spec.value import Value


class TorchFacts(Value, frozen=True, kw_only=True):
    """The answer of `python -m trainer.runtime.torch_facts`."""

    version: str
    cuda: str | None  # that torch was built for; None: a build for the CPU
    nccl: str | None
    is_available: bool  # torch.cuda.is_available()
    num_devices: int
    fault: tuple[str, ...] = ()  # what stands between torch and the GPUs, then the remedy; empty where nothing does
