"""Writes, as text, the signatures of the library names that the product uses, and facts of torch's CUDA wheel.

For the lowest version that pyproject.toml allows and for the locked one:

    .venv/bin/python tests/factories/capture_signatures.py [--wheels DIR] [LIBRARY ...]

Archives are fetched by pip into DIR (kept there for the next call) and read without being installed. Run it after a
bound of pyproject.toml or requirements.lock has moved; `test_signatures.py` fails until it has run.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

from library_calls import references
from wheel_signatures import Archive, Library

ROOT = Path(__file__).resolve().parents[2]
CAPTURED = ROOT / "tests" / "captured" / "signatures"
# Libraries that are read, by the name of their package on the index.
PACKAGES = {
    "torch": "torch",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "peft": "peft",
    "deepspeed": "deepspeed",
    "bitsandbytes": "bitsandbytes",
    "galore_torch": "galore-torch",
    "lion_pytorch": "lion-pytorch",
    "liger_kernel": "liger-kernel",
    "torchao": "torchao",
    "transformer_engine": "transformer-engine",
}


def versions(library: str) -> tuple[str, ...]:
    """The lowest version that pyproject.toml allows, and the locked one if there is a lock for it."""
    package = PACKAGES[library]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    low = next(match[1] for each in bounds if (match := re.fullmatch(rf"{package}(?:\[.*\])?>=([\w.]+)(?:,.*)?", each)))
    low = low if low.count(".") > 1 or library in ("galore_torch",) else f"{low}.0"
    lock = re.search(rf"^{package}==(\S+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    return tuple(dict.fromkeys([low, *([lock[1]] if lock else [])]))


def captured_file(library: str, version: str) -> Path:
    return CAPTURED / f"{library}-{version}.txt"


def cuda_file(version: str) -> Path:
    return CAPTURED / f"torch-{version}-cuda.txt"


def _archive(library: str, version: str, folder: Path) -> Path:
    package = PACKAGES[library]
    there = [path for path in folder.iterdir() if re.match(rf"{library}-{re.escape(version)}[+.-]", path.name)]
    if not there:
        wheels = ["--only-binary=:all:"] if library != "deepspeed" else ["--no-build-isolation"]
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *wheels, "-d", str(folder)]
        subprocess.run([*pip, f"{package}=={version}"], check=True)
        there = [path for path in folder.iterdir() if re.match(rf"{library}-{re.escape(version)}[+.-]", path.name)]
    return there[0]


def _lines(library: Library, names: Iterable[str]) -> list[str]:
    lines: list[str] = []
    for name in sorted(names):
        found = library.signatures(name)
        if found is None:
            continue
        lines += [f"{name}({text})" for text in found] or [name]
    return lines


def capture(library: str, version: str, folder: Path) -> None:
    """Writes the captured text of one version; a name that the version does not have has no line."""
    names = {each.name for each in references() if each.name.split(".")[0] == library}
    lines = _lines(Library(Archive(_archive(library, version, folder))), names)
    head = f"# {PACKAGES[library]} {version}; written by tests/factories/capture_signatures.py\n"
    captured_file(library, version).write_text(head + "".join(f"{line}\n" for line in lines))


def capture_cuda_facts(version: str, folder: Path) -> None:
    """Writes what the plan takes for granted of torch's CUDA wheel; a build without CUDA has nothing to tell."""
    with zipfile.ZipFile(_archive("torch", version, folder)) as wheel:
        names = wheel.namelist()
        if "torch/lib/libtorch_cuda.so" not in names:
            sys.stderr.write(f"torch {version}: a build without CUDA; its facts are left as they are\n")
            return
        needs = wheel.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
        toolkit = re.search(r"^cuda.* = '(.*)'$", wheel.read("torch/version.py").decode(), re.MULTILINE)
        flags = re.search(rb"\0((?:sm_\d+[af]? ?)+)\0", wheel.read("torch/lib/libtorch_python.so"))
        prefers_cudnn = b"check_prefer_cudnn_attention" in wheel.read("torch/lib/libtorch_cuda.so")
    assert toolkit and flags
    facts = {
        "cuda": toolkit[1],
        "architectures": flags[1].decode(),  # of torch.cuda.get_arch_list()
        "cudnn": _required(needs, r"nvidia-cudnn-cu\d+"),
        "nccl": _required(needs, r"nvidia-nccl-cu\d+"),
        "triton": _required(needs, "triton"),
        "has_cudnn_preference": str(prefers_cudnn),  # scaled_dot_product_attention asks check_prefer_cudnn_attention
    }
    head = f"# torch {version} for CUDA; written by tests/factories/capture_signatures.py\n"
    cuda_file(version).write_text(head + "".join(f"{name}: {value}\n" for name, value in facts.items()))


def _required(metadata: str, package: str) -> str:
    found = re.search(rf"^Requires-Dist: {package}==([\w.]+)", metadata, re.MULTILINE)
    assert found
    return found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", choices=[*PACKAGES, []])
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="keep the archives in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.wheels or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        CAPTURED.mkdir(parents=True, exist_ok=True)
        for library in options.libraries or PACKAGES:
            for version in versions(library):
                capture(library, version, folder)
                if library == "torch":
                    capture_cuda_facts(version, folder)


if __name__ == "__main__":
    main()
