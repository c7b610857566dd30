"""Says what the installed torch is and whether it can use the GPUs here: `python -m trainer.runtime.torch_facts`.

One line of JSON on stdout, a `TorchFacts`. Whether a GPU is out of torch's reach is decided where every run decides it
(`torch_check`), so that a person who asks beforehand is told the same.
"""

import sys

import msgspec
import torch

from trainer.runtime.torch_check import find_fault, read_gpus
from trainer.spec.torch_facts import TorchFacts


def read_facts() -> TorchFacts:
    """The facts of this process's torch."""
    gpus = read_gpus()
    is_available = torch.cuda.is_available()
    fault = find_fault(
        gpus,
        torch_version=torch.__version__,
        cuda=torch.version.cuda,
        architectures=torch.cuda.get_arch_list() if gpus else [],
        is_available=is_available,
    )
    nccl = torch.cuda.nccl.version() if torch.version.cuda is not None and is_available else None
    return TorchFacts(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        nccl=None if nccl is None else ".".join(map(str, nccl)),
        is_available=is_available,
        num_devices=torch.cuda.device_count(),
        fault=tuple(fault),
    )


def main() -> int:
    """Prints them."""
    sys.stdout.write(msgspec.json.encode(read_facts()).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
