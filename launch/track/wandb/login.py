"""`python -m launch.track.wandb.login`: whether wandb can be online; exit code 0, or 1 and a line on what is missing.

A process of its own: wandb takes a second to load, and the command that asks must not.
"""

import sys

from launch.track.wandb.library import login_problem
from trainer.spec.secrets import redacted_output


def main() -> int:
    with redacted_output():
        problem = login_problem()
        if problem is not None:
            sys.stdout.write(f"{problem}\n")
        return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
