"""Wheels for a machine without a network: what is asked of pip, and bundles that are no larger than their limit."""

import os
import subprocess
import sys
import tarfile
from importlib.metadata import distributions
from pathlib import Path

from offline_wheels import LOCKS, MIB, PACKAGES, PEER_LOCKS, PEERS, ROOT, SOURCE, bundles_of, locked_versions
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SCRIPT = ROOT / "benchmarks" / "offline_wheels.py"
# What the script's docstring names, and its dependencies.
ON_THE_MACHINE = {
    "torch", "transformers", "accelerate", "anyio", "click", "einops", "filelock", "fsspec", "httpx", "huggingface-hub",
    "jinja2", "msgpack", "numpy", "packaging", "pandas", "protobuf", "psutil", "pyyaml", "requests", "safetensors",
    "tqdm", "typing-extensions",
}  # fmt: skip
# Stands for pip: notes its arguments, and makes wheels of a size that goes by the name.
FAKE_PIP = """
import os, re, sys
from pathlib import Path

words = sys.argv[2:]
Path(os.environ["NOTES"]).open("a").write(" ".join(words) + "\\n")
if os.environ.get("LACKS", "nothing") in " ".join(words):
    sys.exit(1)
start = words.index("--wheel-dir" if words[0] == "wheel" else "--dest") + 1
for wanted in words[start + 1 :]:
    name = re.split("[=><]", Path(wanted).name.removesuffix(".tar.gz"))[0]
    size = int(os.environ.get("SIZE_" + name, 1000))
    with open(f"{words[start]}/{name.replace('-', '_')}-1.0-py3-none-any.whl", "wb") as file:
        file.truncate(size)
"""


def run(folder: Path, *words: str, lacks: str = "nothing", **sizes: int) -> subprocess.CompletedProcess[str]:
    fake = folder / "fake" / "pip"
    fake.mkdir(parents=True)
    (fake / "__init__.py").touch()
    (fake / "__main__.py").write_text(FAKE_PIP)
    more = {"PYTHONPATH": str(fake.parent), "NOTES": str(folder / "notes.txt"), "LACKS": lacks}
    environment = {**os.environ, **more, **{f"SIZE_{name}": str(size) for name, size in sizes.items()}}
    command = [sys.executable, str(SCRIPT), "--out", str(folder / "out"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_bundles_hold_every_locked_wheel_and_the_source_within_the_limit(tmp_path: Path):
    done = run(tmp_path, "--python", "3.12", bitsandbytes=43 * MIB, pyarrow=45 * MIB)
    assert done.returncode == 0, done.stderr
    bundles = sorted((tmp_path / "out").glob("bundle-*.tar"))
    assert len(bundles) == 2 and all(bundle.stat().st_size <= 60 * MIB + 100_000 for bundle in bundles)
    held = []
    for bundle in bundles:
        with tarfile.open(bundle) as tar:
            held += tar.getnames()
    assert held[:2] == [SOURCE, "wheels/shardwise-1.0-py3-none-any.whl"]
    of_peers = [name for name in held if name.startswith("peer-wheels/")]
    assert len(held) - len(of_peers) == len(set(held) - set(of_peers)) == len(PACKAGES) + 1
    assert {name: sum(f"/{name}/" in each for each in of_peers) for name in PEERS} == {
        name: len(locked_versions((PEER_LOCKS / f"{name}.lock").read_text())) for name in PEERS
    }
    assert all(bundle.name in done.stdout for bundle in bundles)
    assert "pip install --no-index" in done.stdout and "benchmarks/gpu.py" in done.stdout
    built, downloaded, *_ = (tmp_path / "notes.txt").read_text().splitlines()
    assert built.startswith("wheel") and "--no-deps" in built and " deepspeed==" in built
    assert f" {tmp_path / 'out' / SOURCE} " in built  # shardwise itself
    assert downloaded.startswith("download") and "--no-deps" in downloaded and "--python-version=3.12" in downloaded
    assert all(f" {name}==" in downloaded for name in ("msgspec", "pydantic", "pydantic-core", "wandb"))
    assert "index" not in built + downloaded and "://" not in built + downloaded


def test_what_the_packages_require_is_in_the_bundles_or_on_the_machine():
    names = {package.name for package in PACKAGES}
    locked = locked_versions("\n".join((ROOT / name).read_text() for name in LOCKS))
    for each in distributions():
        name = canonicalize_name(each.name)
        if name in names and each.version == locked.get(name):  # of another version they may differ
            required = [Requirement(line) for line in each.requires or ()]
            needed = {canonicalize_name(one.name) for one in required if not one.marker or one.marker.evaluate()}
            assert needed <= names | ON_THE_MACHINE, name


def test_bundles_without_a_peer_that_pip_does_not_find_say_so(tmp_path: Path):
    done = run(tmp_path, lacks="unsloth-zoo")
    assert done.returncode == 0 and "the bundles are without unsloth" in done.stderr
    assert not list((tmp_path / "out" / "peer-wheels" / "unsloth").iterdir())
    assert "for peer in axolotl; do" in done.stdout
    done = run(tmp_path / "large", torchao=61 * MIB)
    assert done.returncode == 2 and "62" in done.stderr, "what fits no bundle ends it"
    assert bundles_of({"a": 6, "b": 5, "c": 4, "d": 5}, limit_bytes=10) == [["a", "c"], ["b", "d"]]
