"""Runs the code that comes with a model: the files that the plan names, with their hashes in the plan, nothing else.

transformers would copy such files into a folder of the user's and run any file there. Here each file is read once,
compared with its SHA-256 and run from memory, as a module of a package that only this process has; its two classes are
then registered with transformers, which needs no `trust_remote_code` for them. So nothing is shared between ranks, and
no other file can be imported.

transformers builds a model without memory before it reads weights, and fills tensors that are in no file by the model's
`_init_weights`. Code written for older versions computes those in its constructor: `compute_buffers` runs that again.
"""

import importlib
import json
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
import transformers.dynamic_module_utils
from accelerate import init_empty_weights
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

from shardwise.trainer.spec.errors import InputError, ShardwiseError
from shardwise.trainer.spec.model.shape import ModelCode

_PACKAGE = "shardwise_model_code"
_SETTING = "model.trust_remote_code"


def load_model_code(code: ModelCode | None) -> None:
    """Runs a model's code, once in a process, and makes its classes those of its model type.

    InputError where a file changed since the plan was made, or the code cannot be imported.
    """
    if code is None or any(isinstance(finder, _Files) and finder.code.files == code.files for finder in sys.meta_path):
        return
    files = _Files(code)
    _forget_modules(_PACKAGE)
    sys.meta_path[:] = [files, *(finder for finder in sys.meta_path if not isinstance(finder, _Files))]
    try:
        with faults_of(code):
            config_class, model_class = (_class(name) for name in (code.config_class, code.model_class))
            CONFIG_MAPPING.register(config_class.model_type, config_class, exist_ok=True)
            with_generation = add_generation_mixin_to_remote_model(model_class)
            AutoModelForCausalLM.register(config_class, with_generation, exist_ok=True)
    except InputError:
        sys.meta_path.remove(files)
        raise


@contextmanager
def faults_of(code: ModelCode | None) -> Iterator[None]:
    """Makes what the code raises inside an InputError that names it; does nothing without code."""
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        if code is None:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [each for each in frames if Path(each.filename).is_relative_to(code.folder)]
        places = [f" ({Path(each.filename).name}, line {each.lineno})" for each in own]
        message = " ".join(str(error).split())
        raise InputError(
            f"{_SETTING}: the code of {code.repository} raised {type(error).__name__}: {message}{(places or [''])[-1]}"
        ) from error


def is_custom_code(model: PreTrainedModel) -> bool:
    """True if the model's class is not one of transformers; its own method for that is newer than 5.10."""
    return not type(model).__module__.startswith("transformers.")


def compute_buffers(model: PreTrainedModel, dtype: torch.dtype, *, with_persistent: bool) -> None:
    """Gives the buffers of a model with code of its own the values that its constructor computes.

    Those that are in no file, or `with_persistent` all of them. Parameters take no memory meanwhile.
    """
    if not is_custom_code(model):
        return
    with init_empty_weights(include_buffers=False), no_init_weights():
        built = type(model)._from_config(
            model.config, dtype=dtype, attn_implementation=model.config._attn_implementation
        )
    for path, module in built.named_modules():
        target = model.get_submodule(path)
        for name, buffer in module._buffers.items():
            if buffer is not None and (with_persistent or name in module._non_persistent_buffers_set):
                target._buffers[name] = buffer


def write_model_code(code: ModelCode | None, folder: Path) -> None:
    """Puts the code next to the config.json in an exported folder, which names it; does nothing without code."""
    if code is None:
        return
    for name, content in _verified(code).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    config["auto_map"] = {"AutoConfig": code.config_class, "AutoModelForCausalLM": code.model_class}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextmanager
def as_its_user(code: ModelCode | None) -> Iterator[bool]:
    """transformers as the recipient of an export has it: without the registered classes, copies in a temporary folder.

    Yields the value for `trust_remote_code`.
    """
    if code is None:
        yield False
        return
    seam: Any = transformers.dynamic_module_utils
    before = seam.HF_MODULES_CACHE
    registered = [(mapping, dict(mapping._extra_content)) for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)]
    with TemporaryDirectory(prefix="shardwise-modules-") as private:
        seam.HF_MODULES_CACHE = private
        for mapping, _ in registered:
            mapping._extra_content.clear()
        try:
            yield True
        finally:
            seam.HF_MODULES_CACHE = before
            for mapping, content in registered:
                mapping._extra_content.clear()
                mapping._extra_content.update(content)
            sys.path[:] = [each for each in sys.path if each != private]
            _forget_modules("transformers_modules")


class _Files(MetaPathFinder, Loader):
    """The package that holds a model's files."""

    def __init__(self, code: ModelCode) -> None:
        self.code = code
        self._contents = _verified(code)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != _PACKAGE:
            return None
        place = "/".join(fullname.split(".")[1:])
        for name, is_package in ((f"{place}.py", False), (f"{place}/__init__.py", True)):
            if name in self._contents:
                spec = ModuleSpec(fullname, self, origin=str(Path(self.code.folder) / name), is_package=is_package)
                spec.has_location = True
                spec.loader_state = name
                return spec
        is_folder = not place or any(name.startswith(f"{place}/") for name in self._contents)
        return ModuleSpec(fullname, self, is_package=True) if is_folder else None

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        name = module.__spec__.loader_state
        if name is not None:
            content = self._contents[name]
            exec(compile(content, module.__file__ or name, "exec"), module.__dict__)  # noqa: S102  # the file the job names


def _verified(code: ModelCode) -> Mapping[str, bytes]:
    """Contents of the files; InputError where one is not the planned one."""
    contents = {}
    for name, expected in code.files.items():
        path = Path(code.folder) / name
        try:
            contents[name] = path.read_bytes()
        except OSError as error:
            raise InputError(f"{_SETTING}: {path} cannot be read: {error.strerror}") from error
        if sha256(contents[name]).hexdigest() != expected:
            raise InputError(f"{_SETTING}: {path} changed since the plan was made; start again")
    return contents


def _class(reference: str) -> Any:  # noqa: ANN401  # a class of the model's
    module, _, name = reference.rpartition(".")
    return getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)


def _forget_modules(package: str) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]
