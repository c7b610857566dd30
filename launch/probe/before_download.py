"""Check, before gigabytes of torch are downloaded, that it has code for a GPU here. Standard library only.

    nvidia-smi --query-gpu=compute_cap,name --format=csv,noheader |
        python -m shardwise.launch.probe.before_download VERSION

VERSION is the torch that pip would install. Exit code 4: it could use none of the cards; the lines name one that can.
"""

import re
import sys

from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.packages import CUDA_12_INDEX, OLDEST_CAPABILITY, lacks_code


def obstacle(cards: str, torch_version: str) -> tuple[str, ...]:
    """Lines for the user if torch can use none of the cards that nvidia-smi lists; else empty."""
    known = [
        ((int(found[1]), int(found[2])), found[3].strip()) for found in re.finditer(r"(?m)^(\d+)\.(\d+), *(.+)$", cards)
    ]
    if not known or not all(lacks_code(torch_version, capability) for capability, _ in known):
        return ()
    (major, minor), name = max(known)
    oldest = ".".join(map(str, OLDEST_CAPABILITY))
    return (
        f"{name} has compute capability {major}.{minor}; torch {torch_version}, which pip would download, is built for "
        f"CUDA 13 and has code for {oldest} and newer: nothing was downloaded",
        f"a build for CUDA 12 has code for this card: export PIP_EXTRA_INDEX_URL={CUDA_12_INDEX}",
        "or train on the CPU: export CUDA_VISIBLE_DEVICES=",
    )


def main() -> ExitCode:
    """Reads the cards from stdin."""
    lines = obstacle(sys.stdin.read(), sys.argv[1])
    sys.stderr.writelines(f"{line}\n" for line in lines)
    return ExitCode.ENVIRONMENT if lines else ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
