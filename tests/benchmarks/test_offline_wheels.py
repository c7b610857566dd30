"""Wheels for a machine without a network: what is asked of pip, and bundles that are no larger than their limit."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from offline_wheels import MIB, PACKAGES, SOURCE, bundles_of, locked_versions

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "offline_wheels.py"
# Stands for pip: notes its arguments, and makes a wheel of a size that goes by the name.
FAKE_PIP = """
import os, re, sys
from pathlib import Path

words = sys.argv[2:]
Path(os.environ["NOTES"]).open("a").write(" ".join(words) + "\\n")
name = re.split("[=><]", words[-1])[0]
folder = words[words.index("--wheel-dir" if words[0] == "wheel" else "--dest") + 1]
size = int(os.environ.get("SIZE_" + name, 1000))
if not size:
    sys.exit("ERROR: No matching distribution found for " + words[-1])
with open(f"{folder}/{name.replace('-', '_')}-1.0-py3-none-any.whl", "wb") as file:
    file.truncate(size)
"""


def run(folder: Path, *words: str, **sizes: int) -> subprocess.CompletedProcess[str]:
    fake = folder / "fake" / "pip"
    fake.mkdir(parents=True)
    (fake / "__init__.py").touch()
    (fake / "__main__.py").write_text(FAKE_PIP)
    more = {"PYTHONPATH": str(fake.parent), "NOTES": str(folder / "notes.txt")}
    environment = {**os.environ, **more, **{f"SIZE_{name}": str(size) for name, size in sizes.items()}}
    command = [sys.executable, str(SCRIPT), "--out", str(folder / "out"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_bundles_hold_every_wheel_and_the_source_within_the_limit(tmp_path: Path):
    done = run(tmp_path, bitsandbytes=43 * MIB, pyarrow=45 * MIB)
    assert done.returncode == 0, done.stderr
    bundles = sorted((tmp_path / "out").glob("bundle-*.tar"))
    assert len(bundles) == 2 and all(bundle.stat().st_size <= 60 * MIB + 100_000 for bundle in bundles)
    held = []
    for bundle in bundles:
        with tarfile.open(bundle) as tar:
            held += tar.getnames()
    assert held[0] == SOURCE and len(held) == len(set(held)) == len(PACKAGES) + 1
    assert all(bundle.name in done.stdout for bundle in bundles)
    assert "pip install --no-index" in done.stdout and "benchmarks/gpu.py" in done.stdout


def test_pip_is_asked_for_locked_versions_and_wheels_of_the_other_python(tmp_path: Path):
    run(tmp_path, "--python", "3.12")
    notes = (tmp_path / "notes.txt").read_text().splitlines()
    assert len(notes) == len(PACKAGES)
    msgspec, deepspeed = (next(line for line in notes if f" {name}==" in line) for name in ("msgspec", "deepspeed"))
    assert "download" in msgspec and "--python-version=3.12" in msgspec and "--no-deps" in msgspec
    assert deepspeed.startswith("wheel") and "--no-deps" in deepspeed
    assert not any("index" in line or "://" in line for line in notes)


@pytest.mark.parametrize(("sizes", "code", "words"), [({"msgspec": 0}, 1, "msgspec"), ({"torchao": 61 * MIB}, 2, "62")])
def test_what_pip_does_not_have_or_fits_no_bundle_ends_it(sizes: dict[str, int], code: int, words: str, tmp_path: Path):
    done = run(tmp_path, **sizes)
    assert done.returncode == code and words in done.stderr


def test_a_wheel_goes_into_the_first_bundle_that_has_room():
    assert bundles_of({"a": 6, "b": 5, "c": 4, "d": 5}, limit_bytes=10) == [["a", "c"], ["b", "d"]]


def test_locked_versions_are_those_of_the_lines():
    assert locked_versions("a==1.0\nb-c==2 ; x\n# d==3\n    --hash=e==4\n") == {"a": "1.0", "b-c": "2"}
