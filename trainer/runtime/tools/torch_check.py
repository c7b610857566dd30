"""A worker that tries every visible GPU and describes torch; its result is a `TorchFacts`.

A device is tried by using it, under the allocator's settings in the environment: memory of both of the allocator's
pools, and a product, which needs code for the card. `launch.probe.torch_fit`, which knows the cards and the driver,
decides what a failure means.
"""

import sys
from pathlib import Path

import torch

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.messages.worker_requests import DeviceTrial, TorchFacts

_SIDE = 1024  # a matrix of 4 MiB comes from the pool of large blocks, one of 64 x 64 from that of small ones


def read_facts() -> TorchFacts:
    """The facts of this process's torch; uses each GPU for a moment."""
    cuda = torch.version.cuda
    is_available = torch.cuda.is_available()
    devices = tuple(map(try_device, range(torch.cuda.device_count()))) if is_available else ()
    return TorchFacts(
        version=str(torch.__version__),
        cuda=cuda,
        architectures=() if cuda is None else tuple(torch.cuda.get_arch_list()),
        devices=devices,
        expands_segments=_expands_segments() if devices else None,
        problem=None if is_available or cuda is None else _initialisation_problem(),
    )


def try_device(index: int) -> DeviceTrial:
    """Allocates on a GPU and multiplies there."""
    try:
        device = torch.device("cuda", index)
        for side in (64, _SIDE):
            ones = torch.ones((side, side), device=device)
            product = float((ones @ ones)[0, 0])
            if product != side:
                return DeviceTrial(problem=f"it multiplies wrongly: {product:g} instead of {side}")
    except RuntimeError as error:  # torch.OutOfMemoryError and torch.AcceleratorError are some
        problem = _first_line(error)
        return DeviceTrial(
            problem=problem, is_out_of_memory=isinstance(error, torch.OutOfMemoryError) or "out of memory" in problem
        )
    return DeviceTrial()


def _expands_segments() -> bool | None:
    """True if every segment of the allocator is an expandable one."""
    kinds = [segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()]
    return None if not kinds or None in kinds else all(kinds)


def _initialisation_problem() -> str | None:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return _first_line(error)
    return None


def _first_line(error: BaseException) -> str:
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)


if __name__ == "__main__":
    codec.write(Path(sys.argv[2]), read_facts())  # the first file, the request, is empty
