"""Refuses before a plan what a rank would refuse: values of a config, wrong tensors, wrong targets of adapters.

A model that was traced was built. So was every value of a config that is known (`known_configs`); with any other one
the model is built without memory, in a process of its own.

The names and shapes of safetensors headers are compared with those of the model. A folder whose tensors are those of
its architecture by number, sizes and types passes at once. Any other is compared exactly, tensor by tensor, by the
reader of the ranks itself, in a process that builds the model without memory; so is a target that is no usual linear
layer. A folder that has passed is remembered by all that the comparison depends on.
"""

import re
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import msgspec

from shardwise.launch.inputs.known_configs import is_known_to_build
from shardwise.launch.inputs.model_files import ModelFiles
from shardwise.launch.inputs.weight_files import StoredTensors
from shardwise.launch.probe.installed import installed_version
from shardwise.trainer.spec.job.sections import Job
from shardwise.trainer.spec.messages.worker_requests import CheckModelRequest, Lines
from shardwise.trainer.spec.model.shape import ModelCode, ModelShape

_ROOTS = ("model.", "transformer.", "gpt_neox.", "lm_head.", "embed_out.")
_WIDE = frozenset({"F64", "F32", "F16", "BF16"})
_BLOCK = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


def check_model(job: Job, model: ModelFiles, shape: ModelShape, code: ModelCode | None, *, cache: Path) -> None:
    """InputError for a config that transformers does not build, a folder of other tensors, and wrong targets."""
    targets = job.train.lora.targets if job.train.method is None or job.train.method.freezes_base else ()
    linears = (*shape.linears, *shape.dense_linears)
    layers = {each.name for each in linears} - {each.name for each in linears if not each.adapter_rank_factor}
    is_of_layers = targets == ("all-linear",) or {*targets} <= layers
    config = {**model.config, "vocab_size": shape.vocab_size - model.new_rows} if model.new_rows else model.config
    held = msgspec.structs.replace(shape, vocab_size=shape.vocab_size - model.new_rows)
    has_usual = not model.tensors or (model.weights is None and code is None and is_usual(model.tensors, held))
    is_built = shape.is_described or shape.traced is not None or is_known_to_build(config, held)
    if (has_usual and is_of_layers and is_built) or installed_version("torch") is None:
        return
    request = CheckModelRequest(
        model_config=config,
        origin=model.config_origin,
        model_path=None if has_usual else model.model_path,
        model_code=code,
        method=job.train.method,
        targets=() if is_of_layers else targets,
    )
    stored = cache / "models" / "checked" / _key(request, model.tensors)
    if stored.is_file():
        return
    from shardwise.launch.worker import ask  # most folders need none

    ask(
        "shardwise.trainer.runtime.tools.check_model", request, Lines, subject="model.name: comparing it with its files"
    )
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.touch()


def is_usual(tensors: StoredTensors, shape: ModelShape) -> bool:
    """True if the tensors are those of a model of this shape, as far as numbers and sizes show."""
    if shape.is_described or not all(name.startswith(_ROOTS) for name in tensors):
        return False
    if not all(tensor.dtype in _WIDE for tensor in tensors.values()):
        return False
    blocks = {int(block[1]) for name in tensors if (block := _BLOCK.search(name))}
    if blocks != {*range(shape.num_layers)}:
        return False
    num_usual = shape.num_layers - shape.num_dense_layers
    modules = [each for each in shape.linears if each.is_linear_module] * num_usual
    modules += [each for each in shape.dense_linears if each.is_linear_module] * shape.num_dense_layers
    expected = Counter((each.name, *sorted((each.num_inputs, each.num_outputs))) for each in modules)
    found = Counter(
        (name.split(".")[-2], *sorted(tensor.shape)) for name, tensor in tensors.items() if name.endswith(".weight")
    )
    num_elements = sum(tensor.num_elements for tensor in tensors.values())
    return all(found[each] == count for each, count in expected.items()) and num_elements == shape.num_parameters


def _key(request: CheckModelRequest, tensors: StoredTensors) -> str:
    versions = {name: installed_version(name) for name in ("shardwise", "transformers")}
    content = msgspec.json.encode((request, sorted(tensors.items()), versions), order="deterministic")
    return blake2b(content, digest_size=16).hexdigest()
