"""Writes, as text, the signatures of the library names that the product uses, and facts of torch's CUDA wheel.

For the lowest version that pyproject.toml allows and for the locked one:

    .venv/bin/python tests/factories/capture_signatures.py [--wheels DIR] [LIBRARY ...]

Archives are fetched by pip into DIR (kept there for the next call) and read without being installed. Run it after a
bound of pyproject.toml or requirements.lock has moved; `test_signatures.py` fails until it has run.
"""

import argparse
import ast
import copy
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath

from library_calls import references
from lowest_versions import ROOT, lowest_versions

CAPTURED = ROOT / "tests" / "captured" / "signatures"
# Libraries that are read, by the name of their package on the index.
PACKAGES = {
    "torch": "torch", "accelerate": "accelerate", "transformers": "transformers", "peft": "peft",
    "deepspeed": "deepspeed", "bitsandbytes": "bitsandbytes", "galore_torch": "galore-torch",
    "lion_pytorch": "lion-pytorch", "liger_kernel": "liger-kernel", "torchao": "torchao",
    "transformer_engine": "transformer-engine",
}  # fmt: skip


# Signatures are read from the Python files of a wheel or source archive, which is not installed. A dotted name is
# followed as Python would import it; what torch makes in C++ is read from its stub files. A function with overloads
# has a line for each.
_STUBS = ("torch/_C/_VariableFunctions.pyi", "torch/_C/_nn.pyi", "torch/_C/__init__.pyi")
_MAX_HOPS = 30


class Archive:
    """Python files of a wheel or a source archive by their path inside the package."""

    def __init__(self, path: Path) -> None:
        self._read: Callable[[str], bytes]
        if path.suffix in (".whl", ".zip"):
            wheel = zipfile.ZipFile(path)
            self._members = {name: name for name in wheel.namelist()}
            self._read = wheel.read
        else:
            source = tarfile.open(path)  # noqa: SIM115  # read from as long as this object lives
            inner = {name: name.split("/", 1)[1].removeprefix("src/") for name in source.getnames() if "/" in name}
            self._members = {short: name for name, short in inner.items()}
            self._read = lambda name: _bytes_of(source, name)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    @cache  # noqa: B019  # an archive lives as long as the script
    def tree(self, name: str) -> ast.Module:
        return ast.parse(self._read(self._members[name]).decode())


def _bytes_of(source: tarfile.TarFile, name: str) -> bytes:
    file = source.extractfile(name)
    assert file is not None
    return file.read()


Found = tuple[str, ast.AST]  # of a module's file, and the definition in it


class Library:
    """A library's names and their signatures."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._known: dict[
            tuple[str, str], list[Found]
        ] = {}  # empty while a name is looked for: modules import in circles

    def signatures(self, name: str) -> list[str] | None:
        """Parameter lists of a name; [] for a name that is no function or class; None where there is no such name."""
        parts = name.split(".")
        if self._module(parts) is not None:
            return []
        found = self._find(parts)
        if not found:
            return None
        lists = [text for each in found for text in self._parameters(each)]
        return list(dict.fromkeys(lists))

    def _module(self, parts: list[str]) -> str | None:
        path = "/".join(parts)
        for file in (f"{path}/__init__.py", f"{path}.py", f"{path}/__init__.pyi", f"{path}.pyi"):
            if file in self._archive:
                return file
        return None

    def _find(self, parts: list[str], hops: int = 0) -> list[Found]:
        """Definitions of a dotted name: its longest prefix that is a module, then attributes."""
        for length in range(len(parts), 0, -1):
            file = self._module(parts[:length])
            if file is not None:
                found = self._in_module(file, parts[length], hops) if length < len(parts) else []
                return self._attributes(found, parts[length + 1 :], hops) or self._in_stubs(parts)
        return []

    def _in_stubs(self, parts: list[str]) -> list[Found]:
        if parts[0] != "torch":
            return []
        for file in _STUBS:
            if file in self._archive and (found := self._definitions(file, parts[-1])):
                return found
        if parts[1] == "Tensor" or len(parts) == 2:
            base = self._definitions(_STUBS[-1], "TensorBase")
            return self._attributes(base, parts[-1:], 0)
        return []

    def _attributes(self, found: list[Found], names: list[str], hops: int) -> list[Found]:
        for name in names:
            found = [inner for each in found for inner in self._member(each, name, hops)]
        return found

    def _member(self, found: Found, name: str, hops: int) -> list[Found]:
        file, node = found
        if not isinstance(node, ast.ClassDef):
            return [(file, ast.Constant(None))]  # an attribute of a value: that it is there is all that can be read
        own: list[Found] = [(file, each) for each in node.body if _defines(each, name)]
        if own or hops > _MAX_HOPS:
            return own
        if name == "apply" and any(ast.unparse(base).endswith("autograd.Function") for base in node.bases):
            return [(file, _without_context(each)) for _, each in self._member(found, "forward", hops)]
        for base in self._bases(found, hops):
            if inherited := self._member(base, name, hops + 1):
                return inherited
        return []

    def _bases(self, found: Found, hops: int) -> Iterator[Found]:
        file, node = found
        assert isinstance(node, ast.ClassDef)
        for base in node.bases:
            target = base.value if isinstance(base, ast.Subscript) else base
            parts = ast.unparse(target).split(".")
            inner = self._in_module(file, parts[0], hops + 1)
            yield from self._attributes(inner, parts[1:], hops + 1) or self._find(parts, hops + 1)

    def _definitions(self, file: str, name: str) -> list[Found]:
        return [(file, node) for node in _statements(self._archive.tree(file)) if _defines(node, name)]

    def _in_module(self, file: str, name: str, hops: int) -> list[Found]:
        if (file, name) not in self._known:
            self._known[file, name] = []
            self._known[file, name] = self._definition(file, name, hops)
        return self._known[file, name]

    def _definition(self, file: str, name: str, hops: int) -> list[Found]:
        found = self._definitions(file, name)
        functions = [each for each in found if isinstance(each[1], ast.FunctionDef | ast.ClassDef)]
        if functions:
            return functions
        if (same := self._renamed(file, found, hops)) or (same := self._imported(file, name, hops)):
            return same
        return found

    def _renamed(self, file: str, found: list[Found], hops: int) -> list[Found]:
        """`name = other.thing` in a module."""
        for _, node in found:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if isinstance(value, ast.Name | ast.Attribute):
                parts = ast.unparse(value).split(".")
                inner = self._in_module(file, parts[0], hops + 1)
                if target := self._attributes(inner, parts[1:], hops + 1) or self._find(parts, hops + 1):
                    return target
        return []

    def _imported(self, file: str, name: str, hops: int) -> list[Found]:
        package = _package(file)
        starred: list[list[str]] = []
        for node in ast.walk(self._archive.tree(file)):
            if not isinstance(node, ast.ImportFrom):
                continue
            outer = package[: len(package) - node.level + 1] if node.level else []
            module = [*outer, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                if (alias.asname or alias.name) == name and alias.name != "*":
                    parts = [*module, alias.name]
                    if self._module(parts[:1]) is None:
                        return [(file, ast.Constant(None))]  # of another library
                    if self._module(parts) is not None:
                        return [(self._module(parts) or "", ast.Module([], []))]
                    if target := self._find(parts, hops + 1):
                        return target
                elif alias.name == "*":
                    starred.append(module)
        for module in starred:
            inner = self._module(module)
            if inner is not None and inner != file and (target := self._in_module(inner, name, hops + 1)):
                return target
        return []

    def _parameters(self, found: Found) -> Iterator[str]:
        _, node = found
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield _text(node.args, is_bound=_is_classmethod(node))
        elif isinstance(node, ast.ClassDef):
            yield from self._constructor(found)

    def _constructor(self, found: Found, hops: int = 0) -> list[str]:
        """Of `__init__`, `__new__` or the fields of a dataclass, in the nearest class that has one of them."""
        file, node = found
        if not isinstance(node, ast.ClassDef) or hops > _MAX_HOPS:
            return []
        for name in ("__init__", "__new__"):
            own = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == name]
            if own:
                return [_text(function.args, is_bound=True) for function in own]
        if any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            return [self._fields(found)]
        for base in self._bases((file, node), hops):
            if inherited := self._constructor(base, hops + 1):
                return inherited
        return []

    def _fields(self, found: Found) -> str:
        return ", ".join(dict.fromkeys(self._own_fields(found, 0)))

    def _own_fields(self, found: Found, hops: int) -> Iterator[str]:
        _, node = found
        assert isinstance(node, ast.ClassDef)
        if hops < _MAX_HOPS:
            for base in self._bases(found, hops):
                if isinstance(base[1], ast.ClassDef):
                    yield from self._own_fields(base, hops + 1)
        for each in node.body:
            if not isinstance(each, ast.AnnAssign) or "ClassVar" in ast.unparse(each.annotation):
                continue
            if isinstance(each.target, ast.Name):
                yield f"{each.target.id}=..."


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Of a module, and of what `if`, `try` and `with` hold at its top level."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        for block in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                waiting += getattr(node, block, [])
        if isinstance(node, ast.Try):
            waiting += [each for handler in node.handlers for each in handler.body]


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


def _is_classmethod(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "classmethod" for each in node.decorator_list)


def _package(file: str) -> list[str]:
    return list(PurePosixPath(file).parent.parts)


def _text(args: ast.arguments, *, is_bound: bool) -> str:
    """Parameter names in the form of a definition, `...` for every default; without the first of a bound method."""
    positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    num_required = len(positional) - len(args.defaults)
    texts = [name if index < num_required else f"{name}=..." for index, name in enumerate(positional)]
    if args.posonlyargs:
        texts.insert(len(args.posonlyargs), "/")
    if is_bound and texts:
        del texts[0]
        if texts[:1] == ["/"]:
            del texts[0]
    if args.vararg is not None:
        texts.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        texts.append("*")
    texts += [
        arg.arg if default is None else f"{arg.arg}=..."
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg is not None:
        texts.append(f"**{args.kwarg.arg}")
    return ", ".join(texts)


def versions(library: str) -> tuple[str, ...]:
    """The lowest version that pyproject.toml allows, and the locked one if there is a lock for it."""
    package = PACKAGES[library]
    low = lowest_versions()[package]
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
