"""References of the product's code to names of its training libraries, with the arguments of each call."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = (
    "torch", "accelerate", "transformers", "peft", "deepspeed", "bitsandbytes", "galore_torch", "lion_pytorch",
    "liger_kernel", "torchao", "transformer_engine", "flash_attn",
)  # fmt: skip
_SOURCES = ("trainer/runtime", "trainer/simulation", "trainer/__main__.py")


class Call(NamedTuple):
    """Arguments of one call; `is_open` where it also unpacks `*args` or `**kwargs`, whose length nobody knows here."""

    num_positional: int
    keywords: tuple[str, ...]
    is_open: bool


class Reference(NamedTuple):
    """A name of a library in a line of the product; `call` is None where the name is not called there."""

    name: str
    call: Call | None
    place: str


_CUDA = "a method, or a name that is found by its text, which a run on CUDA calls"
_FP8_KINDS = ("fp8", "fp8_block_scaling", "mxfp8", "nvfp4")
_FP8_RECIPES = ("Delayed", "Float8Current", "Float8Block", "MXFP8Block", "NVFP4Block")
_METHODS: dict[str, dict[str, tuple[Any, ...]]] = {  # numbers of positional arguments, and the names of keywords
    "torch.cuda.Event": {"record": (1,), "synchronize": (1,), "elapsed_time": (2,)},
    "torch.cuda.Stream": {"wait_stream": (2,), "wait_event": (2,)},
    "torch.amp.GradScaler": dict.fromkeys(("scale", "unscale_", "step", "load_state_dict"), (2,))
    | dict.fromkeys(("update", "get_scale", "state_dict"), (1,)),
    "accelerate.Accelerator": dict.fromkeys(("prepare", "backward", "unwrap_model"), (2,)),
    "deepspeed.DeepSpeedEngine": {"backward": (2,), "step": (1,)},
    "torchao.float8": {"Float8LinearConfig.from_recipe_name": (1,), "convert_to_float8_training": (1, "config")},
    "transformer_engine.pytorch": {
        "autocast": (0, "enabled", "recipe"),
        "Linear": (2, "bias", "params_dtype", "device"),
        **dict.fromkeys((f"is_{kind}_available" for kind in _FP8_KINDS), (0, "return_reason")),
    },
    "transformer_engine.common.recipe": dict.fromkeys((f"{name}Scaling" for name in _FP8_RECIPES), (0,)),
}
METHOD_CALLS = tuple(
    Reference(f"{owner}.{name}", Call(num_positional, tuple(keywords), is_open=False), _CUDA)
    for owner, calls in _METHODS.items()
    for name, (num_positional, *keywords) in calls.items()
)


@cache
def references() -> tuple[Reference, ...]:
    """Every reference of the product's runtime and dry run, in order of file and line, then METHOD_CALLS."""
    found: list[Reference] = []
    for source in _SOURCES:
        path = ROOT / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else (path,):
            found += references_in(file.read_text(), str(file.relative_to(ROOT)))
    return (*found, *METHOD_CALLS)


def references_in(source: str, place: str) -> Iterator[Reference]:
    tree = ast.parse(source)
    names = dict(_imported_names(tree))
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name | ast.Attribute) or isinstance(parents.get(node), ast.Attribute):
            continue  # a part of a longer dotted name
        name = _dotted(node, names)
        if name is None or name.endswith("__") or name.startswith("torch.ops."):
            continue  # operators have schemas in C++, no signatures in Python
        parent = parents.get(node)
        call = _arguments(parent) if isinstance(parent, ast.Call) and parent.func is node else None
        yield Reference(name, call, f"{place}:{node.lineno}")


def _imported_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                if first in LIBRARIES:
                    yield (alias.asname, alias.name) if alias.asname else (first, first)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in LIBRARIES:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    return ".".join([names[node.id], *reversed(attributes)])


def _arguments(call: ast.Call) -> Call:
    starred = [arg for arg in call.args if isinstance(arg, ast.Starred)]
    keywords = tuple(keyword.arg for keyword in call.keywords if keyword.arg is not None)
    is_open = bool(starred) or len(keywords) < len(call.keywords)
    return Call(len(call.args) - len(starred), keywords, is_open)
