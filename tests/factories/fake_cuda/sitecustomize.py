"""Gives every Python that has this folder on PYTHONPATH a device `cuda`, as soon as it has imported torch."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch where it is, and installs the device once torch's own module has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader  # resources are asked of torch's own
        self._loader.exec_module(module)
        _install()


def _install() -> None:
    from fake_torch_cuda import install

    install()


if "torch" in sys.modules:
    _install()
else:
    sys.meta_path.insert(0, _AfterTorch())
