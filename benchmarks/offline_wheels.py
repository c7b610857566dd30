"""Wheels for a GPU machine without a network, in bundles of limited size, and the commands to run there.

    python benchmarks/offline_wheels.py [--out DIR] [--python 3.12] [--machine x86_64] [--bundle-mib 60]

The machine is expected to have Python, a CUDA build of torch, transformers, accelerate, pandas, requests, protobuf,
einops and msgpack; these and their dependencies are not in the bundles. Versions are those of the lock files, or the
newest that pyproject.toml allows. DeepSpeed publishes no wheel, so one is built here, without operators: cpu_adam is
compiled on the machine and needs g++ and Python's headers. shardwise itself is there twice: as a wheel, which every
process imports, and as the tracked files, which contain benchmarks/ and tests/; both are those of the last commit.

Unsloth and Axolotl require other versions of transformers and TRL, so each has an environment of its own: a folder of
wheels that its lock file, benchmarks/on_gpu/peer_scripts/NAME.lock, lists. The lock files have what training imports,
not everything that the packages declare (web interfaces, cloud storage, evaluation); torch and triton are the
machine's. A peer whose wheels pip does not find is missing from the bundle, and a line names it.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ("requirements.lock", "requirements-dev.lock")
MIB = 2**20
SOURCE = "shardwise.tar.gz"
PEERS = ("unsloth", "axolotl")
BUILT_HERE = "# no wheel"  # ends the line of a lock file if the package has only its source
PEER_LOCKS = ROOT / "benchmarks" / "on_gpu" / "peer_scripts"


class Package(NamedTuple):
    """A package of the bundles."""

    name: str
    needed_for: str
    bound: str = ""  # if no lock file has it
    is_built_here: bool = False


PACKAGES = (  # in the order of the bundles
    Package("shardwise", "everything", is_built_here=True),
    Package("msgspec", "everything"),
    Package("peft", "LoRA"),
    Package("bitsandbytes", "QLoRA, 8-bit and paged optimizers"),
    Package("galore-torch", "GaLore"),
    Package("lion-pytorch", "Lion"),
    Package("deepspeed", "ZeRO and offload", is_built_here=True),
    Package("pydantic", "DeepSpeed, wandb"),
    Package("pydantic-core", "pydantic"),
    Package("annotated-types", "pydantic"),
    Package("typing-inspection", "pydantic"),
    Package("hjson", "DeepSpeed"),
    Package("py-cpuinfo", "DeepSpeed"),
    Package("ninja", "DeepSpeed's operators"),
    Package("nvidia-ml-py", "the memory of the whole card", ">=12.535"),
    Package("liger-kernel", "the fused loss", ">=0.8.5,<0.9"),
    Package("torchao", "FP8 without Transformer Engine", ">=0.18"),
    Package("trl", "the comparison with TRL"),
    Package("datasets", "TRL"),
    Package("dill", "datasets"),
    Package("multiprocess", "datasets"),
    Package("xxhash", "datasets"),
    Package("pyarrow", "datasets"),
    Package("wandb", "log.wandb, TRL"),
    Package("platformdirs", "wandb"),
    Package("cwevals", "wandb"),
    Package("distro", "cwevals"),
    Package("sniffio", "cwevals"),
    Package("opentelemetry-api", "wandb"),
    Package("opentelemetry-sdk", "wandb"),
    Package("opentelemetry-semantic-conventions", "opentelemetry-sdk"),
    Package("opentelemetry-exporter-otlp-proto-http", "wandb"),
    Package("opentelemetry-exporter-otlp-proto-common", "the exporter"),
    Package("opentelemetry-exporter-otlp-common", "the exporter"),
    Package("opentelemetry-exporter-http-transport", "the exporter"),
    Package("opentelemetry-proto", "the exporter"),
    Package("googleapis-common-protos", "the exporter"),
)
COMMANDS = """
copy the bundles to the machine, and there, in their folder:

    for bundle in bundle-*.tar; do tar xf "$bundle"; done
    mkdir -p shardwise && tar xzf {source} -C shardwise
    python3 -m pip install --no-index --no-deps --target site wheels/*.whl
    mkdir -p peers && for peer in {peers}; do
        python3 -m pip install --no-index --no-deps --target "peers/$peer" "peer-wheels/$peer"/*.whl
    done
    export PYTHONPATH="$PWD/site" HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
    cd shardwise && python3 benchmarks/gpu.py --minutes 30 --out ../out --peers ../peers

run it again to continue with the remaining steps; copy back ../out/*.json and ../out/*.jsonl
"""


def main() -> int:
    options = _options()
    out: Path = options.out
    wheels = out / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)  # may have other versions
    wheels.mkdir(parents=True)
    locked = locked_versions("\n".join((ROOT / name).read_text() for name in LOCKS))
    _write_source(out / SOURCE)
    for command in pip_commands(out / SOURCE, wheels, locked, python=options.python, machine=options.machine):
        done = subprocess.run(command)
        if done.returncode != 0:
            sys.stderr.write(f"pip ended with {done.returncode}; its error is above\n")
            return 1
    peers = [name for name in PEERS if _fetch_peer(name, out, python=options.python, machine=options.machine)]
    paths = [out / SOURCE, *(path for package in PACKAGES for path in wheels_of(package.name, wheels))]
    paths += [path for name in peers for path in sorted((out / "peer-wheels" / name).glob("*.whl"))]
    sizes = {str(path.relative_to(out)): path.stat().st_size for path in paths}
    try:
        bundles = bundles_of(sizes, limit_bytes=round(options.bundle_mib * MIB))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for number, names in enumerate(bundles, start=1):
        _write_bundle(out, out / f"bundle-{number}.tar", names)
        mib = sum(sizes[name] for name in names) / MIB
        sys.stdout.write(f"bundle-{number}.tar, {mib:.1f} MiB: {', '.join(Path(name).name for name in names)}\n")
    sys.stdout.write(COMMANDS.format(source=SOURCE, peers=" ".join(peers)))
    return 0


def _fetch_peer(name: str, out: Path, *, python: str, machine: str) -> bool:
    """Downloads the wheels of a peer; False, with a line that names it, if pip does not find them all."""
    wheels = out / "peer-wheels" / name
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    text = (PEER_LOCKS / f"{name}.lock").read_text()
    for command in peer_pip_commands(text, wheels, python=python, machine=machine):
        done = subprocess.run(command)
        if done.returncode != 0:
            sys.stderr.write(f"pip ended with {done.returncode}; its error is above; the bundles are without {name}\n")
            return False
    return True


def peer_pip_commands(lock: str, wheels: Path, *, python: str, machine: str) -> list[list[str]]:
    """The commands that download, and build from source where there is no wheel, what the lock of a peer lists."""
    wanted = [f"{name}=={version}" for name, version in locked_versions(lock).items()]
    built = [each for each in wanted if re.search(rf"^{re.escape(each)} .*{BUILT_HERE}$", lock, re.MULTILINE)]
    downloaded = [each for each in wanted if each not in built]
    build, download = _pip_prefixes(wheels, python=python, machine=machine)
    return [[*download, *downloaded], *([[*build, *built]] if built else [])]


def pip_commands(
    source: Path, wheels: Path, locked: Mapping[str, str], *, python: str, machine: str
) -> tuple[list[str], list[str]]:
    """The commands that build and download all wheels into `wheels`; that of shardwise is built from `source`."""
    built: list[str] = []
    downloaded: list[str] = []
    for package in PACKAGES:
        version = locked.get(package.name)
        wanted = f"{package.name}=={version}" if version else f"{package.name}{package.bound}"
        (built if package.is_built_here else downloaded).append(str(source) if package.name == "shardwise" else wanted)
    build, download = _pip_prefixes(wheels, python=python, machine=machine)
    return [*build, *built], [*download, *downloaded]


def _pip_prefixes(wheels: Path, *, python: str, machine: str) -> tuple[list[str], list[str]]:
    """The commands that build and that download wheels into `wheels`, without the packages."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in (28, 27, 24, 17)]
    platforms += [f"--platform=manylinux2014_{machine}"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels)]
    download = ["download", "--no-deps", "--only-binary=:all:", f"--python-version={python}", *platforms]
    return [*pip, *build], [*pip, *download, "--dest", str(wheels)]


def locked_versions(text: str) -> dict[str, str]:
    """Versions by name, in lower case and with hyphens, from lines `name==version` of lock files."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


def wheels_of(name: str, folder: Path) -> list[Path]:
    """The wheels of a package in a folder."""
    return sorted(folder.glob(f"{name.replace('-', '_')}-*.whl"))


def bundles_of(sizes: Mapping[str, int], *, limit_bytes: int) -> list[list[str]]:
    """Names in their order, each in the first bundle with enough space; ValueError if one exceeds the limit."""
    bundles: list[list[str]] = []
    for name, size in sizes.items():
        if size > limit_bytes:
            raise ValueError(
                f"{name} has {size / MIB:.1f} MiB, a bundle {limit_bytes / MIB:.1f}; "
                f"give --bundle-mib {size // MIB + 1} or more"
            )
        for bundle in bundles:
            if sum(sizes[each] for each in bundle) + size <= limit_bytes:
                bundle.append(name)
                break
        else:
            bundles.append([name])
    return bundles


def _write_source(path: Path) -> None:
    """The tracked files of this repository, as last committed."""
    subprocess.run(["git", "archive", "--format=tar.gz", "-o", str(path.absolute()), "HEAD"], cwd=ROOT, check=True)


def _write_bundle(folder: Path, path: Path, names: Sequence[str]) -> None:
    with tarfile.open(path, "w") as bundle:
        for name in names:
            bundle.add(folder / name, arcname=name)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "offline-wheels", help="wheels and bundles")
    parser.add_argument("--python", default="3.12", help="version of Python on the machine")
    parser.add_argument("--machine", default="x86_64", help="x86_64, or aarch64 for GH200 and GB10")
    parser.add_argument("--bundle-mib", type=float, default=60.0, help="largest bundle")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
