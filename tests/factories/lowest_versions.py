"""The lowest versions that pyproject.toml allows; run as a program, constraints for pip with those of training."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def lowest_versions(*extras: str) -> dict[str, str]:
    """Lower bounds of the dependencies and of these extras, or of all extras, by the name of the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(each for extra in extras or optional for each in optional[extra])]
    bounds = (re.fullmatch(r"([\w-]+)(?:\[.*\])?>=([\w.]+)(?:,.*)?", each) for each in requirements)
    return {bound[1]: bound[2] for bound in bounds if bound}


if __name__ == "__main__":
    sys.stdout.writelines(f"{package}=={version}\n" for package, version in lowest_versions("train").items())
