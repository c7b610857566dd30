"""Writes, as text, the signatures of the library names that the product uses, and facts of torch's CUDA wheel.

    .venv/bin/python tests/factories/capture_signatures.py [--wheels DIR] [LIBRARY ...]

Archives of the lowest and the locked version are fetched by pip into DIR and read without being installed.
"""

import argparse
import ast
import copy
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

from library_calls import LIBRARIES, references
from lowest_versions import ROOT, lowest_versions

CAPTURED = ROOT / "tests" / "captured" / "signatures"
# Packages on the index, by the names of the libraries that are captured.
PACKAGES = {name: name.replace("_", "-") for name in LIBRARIES if name != "flash_attn"}

# Signatures are read from the Python files of a wheel or source archive, which is not installed. A dotted name is
# followed as Python would import it. A function with overloads has a line for each.
Found = tuple[str, ast.AST]  # of a module's file, and the definition in it


class Library:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str, str], list[Found]] = {}  # empty while a name is looked for: imports go in circles

    @cache  # noqa: B019  # a library lives as long as the script
    def _tree(self, file: str) -> ast.Module:
        return ast.parse((self._folder / file).read_text())

    def signatures(self, name: str) -> list[str] | None:
        """Parameter lists of a name; [] for a name that is no function or class; None where there is no such name."""
        parts = name.split(".")
        if self._module(parts) is not None:
            return []
        found = self._find(parts)
        lists = dict.fromkeys(text for each in found for text in self._parameters(each))
        return list(lists) if found else None

    def _module(self, parts: list[str]) -> str | None:
        path = "/".join(parts)
        for file in (f"{path}/__init__.py", f"{path}.py", f"{path}/__init__.pyi", f"{path}.pyi"):
            if (self._folder / file).is_file():
                return file
        return None

    def _find(self, parts: list[str]) -> list[Found]:
        for length in range(len(parts), 0, -1):
            file = self._module(parts[:length])
            if file is not None:
                found = self._in_module(file, parts[length]) if length < len(parts) else []
                return self._attributes(found, parts[length + 1 :])
        return []

    def _attributes(self, found: list[Found], names: list[str]) -> list[Found]:
        for name in names:
            found = [inner for each in found for inner in self._member(each, name)]
        return found

    def _member(self, found: Found, name: str) -> list[Found]:
        file, node = found
        if not isinstance(node, ast.ClassDef):
            return [(file, ast.Constant(None))]  # an attribute of a value: that it is there is all that can be read
        own: list[Found] = [(file, each) for each in node.body if _defines(each, name)]
        if own:
            return own
        if name == "apply" and any(ast.unparse(base).endswith("autograd.Function") for base in node.bases):
            return [(file, _without_context(each)) for _, each in self._member(found, "forward")]
        for base in self._bases(found):
            if inherited := self._member(base, name):
                return inherited
        return []

    def _bases(self, found: Found) -> Iterator[Found]:
        file, node = found
        assert isinstance(node, ast.ClassDef)
        for base in node.bases:
            target = base.value if isinstance(base, ast.Subscript) else base
            parts = ast.unparse(target).split(".")
            bases = self._attributes(self._in_module(file, parts[0]), parts[1:]) or self._find(parts)
            yield from (each for each in bases if each[1] is not node)  # a base may have the name of the class

    def _definitions(self, file: str, name: str) -> list[Found]:
        return [(file, node) for node in _statements(self._tree(file)) if _defines(node, name)]

    def _in_module(self, file: str, name: str) -> list[Found]:
        if (file, name) not in self._known:
            self._known[file, name] = []
            self._known[file, name] = self._definition(file, name)
        return self._known[file, name]

    def _definition(self, file: str, name: str) -> list[Found]:
        found = self._definitions(file, name)
        functions = [each for each in found if isinstance(each[1], ast.FunctionDef | ast.ClassDef)]
        return functions or self._renamed(file, found) or self._imported(file, name) or found

    def _renamed(self, file: str, found: list[Found]) -> list[Found]:
        """`name = other.thing` in a module."""
        for _, node in found:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if isinstance(value, ast.Name | ast.Attribute):
                parts = ast.unparse(value).split(".")
                inner = self._in_module(file, parts[0])
                if target := self._attributes(inner, parts[1:]) or self._find(parts):
                    return target
        return []

    def _imported(self, file: str, name: str) -> list[Found]:
        package = PurePosixPath(file).parent.parts
        starred: list[list[str]] = []
        for node in ast.walk(self._tree(file)):
            if not isinstance(node, ast.ImportFrom):
                continue
            outer = package[: len(package) - node.level + 1] if node.level else []
            module = [*outer, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                if (alias.asname or alias.name) == name and alias.name != "*":
                    parts = [*module, alias.name]
                    if self._module(parts[:1]) is None:
                        return [(file, ast.Constant(None))]  # of another library
                    if inner := self._module(parts):
                        return [(inner, ast.Module([], []))]
                    if target := self._find(parts):
                        return target
                elif alias.name == "*":
                    starred.append(module)
        for module in starred:
            inner = self._module(module)
            if inner is not None and inner != file and (target := self._in_module(inner, name)):
                return target
        return []

    def _parameters(self, found: Found) -> list[str]:
        """Of a class those of `__init__`, `__new__` or the fields of a dataclass, in the nearest class that has one."""
        _, node = found
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_classmethod = any(ast.unparse(each) == "classmethod" for each in node.decorator_list)
            return [_text(node.args, is_bound=is_classmethod)]
        if not isinstance(node, ast.ClassDef):
            return []
        for name in ("__init__", "__new__"):
            own = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == name]
            if own:
                return [_text(function.args, is_bound=True) for function in own]
        if any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            return [", ".join(dict.fromkeys(self._fields(found)))]
        for base in self._bases(found):
            if inherited := self._parameters(base):
                return inherited
        return []

    def _fields(self, found: Found) -> Iterator[str]:
        _, node = found
        assert isinstance(node, ast.ClassDef)
        for base in self._bases(found):
            if isinstance(base[1], ast.ClassDef):
                yield from self._fields(base)
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation):
                yield f"{ast.unparse(each.target)}=..."


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            waiting += ast.iter_child_nodes(node)


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.Assign):
        targets = [inner for target in node.targets for inner in ast.walk(target)]
        return any(isinstance(target, ast.Name) and target.id == name for target in targets)
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name


def _without_context(forward: ast.AST) -> ast.AST:
    """`forward` of an autograd function as `apply` is called: torch itself passes the context."""
    called = copy.deepcopy(forward)
    assert isinstance(called, ast.FunctionDef)
    del called.args.args[0]
    return called


def _text(args: ast.arguments, *, is_bound: bool) -> str:
    """Parameter names in the form of a definition, `...` for every default; without the first of a bound method."""
    plain = copy.deepcopy(args)
    for each in ast.walk(plain):
        if isinstance(each, ast.arg):
            each.annotation = None
    plain.defaults = [ast.Constant(...) for _ in plain.defaults]
    plain.kw_defaults = [default and ast.Constant(...) for default in plain.kw_defaults]
    if is_bound:
        del (plain.posonlyargs or plain.args)[:1]
    return ast.unparse(plain)


def versions(library: str) -> tuple[str, ...]:
    package = PACKAGES[library]
    low = lowest_versions()[package]
    low = low if low.count(".") > 1 or library in ("galore_torch",) else f"{low}.0"
    lock = re.search(rf"^{package}==(\S+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    return tuple(dict.fromkeys([low, *([lock[1]] if lock else [])]))


def _archive(library: str, version: str, folder: Path) -> Path:
    pattern = re.compile(rf"{library}-{re.escape(version)}[+.-]")
    if not any(pattern.match(path.name) for path in folder.iterdir()):
        wheels = ["--only-binary=:all:"] if library != "deepspeed" else ["--no-build-isolation"]
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *wheels, "-d", str(folder)]
        subprocess.run([*pip, f"{PACKAGES[library]}=={version}"], check=True)
    return next(path for path in folder.iterdir() if pattern.match(path.name))


def _unpacked(archive: Path, folder: Path) -> Path:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith((".py", ".pyi"))])
        return folder
    shutil.unpack_archive(archive, folder)
    return next(folder.iterdir())


def capture(library: str, version: str, folder: Path) -> None:
    lines = [f"# {PACKAGES[library]} {version}; written by tests/factories/capture_signatures.py"]
    with tempfile.TemporaryDirectory() as place:
        lines += signature_lines(library, _unpacked(_archive(library, version, folder), Path(place)))
    (CAPTURED / f"{library}-{version}.txt").write_text("".join(f"{line}\n" for line in lines))


def signature_lines(library: str, folder: Path) -> list[str]:
    names = {each.name for each in references() if each.name.split(".")[0] == library}
    lines, read = list[str](), Library(folder)
    for name in sorted(names):
        if (found := read.signatures(name)) is not None:
            lines += [f"{name}({text})" for text in found] or [name]
    return lines


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
    (CAPTURED / f"torch-{version}-cuda.txt").write_text(
        head + "".join(f"{name}: {value}\n" for name, value in facts.items())
    )


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
