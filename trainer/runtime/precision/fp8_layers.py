"""Which linear layers of a model compute in FP8, and why the others do not.

Inside the decoder blocks, every plain `nn.Linear` does. Left in 16 bit are: what lies outside the blocks (the head and
the embeddings, whose errors reach the loss undamped), adapters (too small to gain), routers (a rounded score sends a
token elsewhere), experts (their number of tokens is not known beforehand), layers of another class (4-bit bases), and
layers with a dimension that FP8 units cannot cut into their tiles. NVFP4 moreover leaves the first two and the last
blocks alone, about 15 % of them (arXiv:2509.25149, section 4.1).
"""

import re
from typing import NamedTuple

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from shardwise.trainer.spec.strategy import Fp8Recipe

_TILES = {Fp8Recipe.BLOCK: 128, Fp8Recipe.MXFP8: 32, Fp8Recipe.NVFP4: 32}
_PLAIN_TILE = 16
_FIRST_BLOCKS, _LAST_SHARE = 2, 8 / 62  # of NVFP4: 2 and 8 of 62 blocks
_SHOWN = 3

OUTSIDE, ADAPTER, ROUTER, EXPERT, EDGE = "outside the blocks", "adapters", "routers", "experts", "first or last blocks"
_PARTS = ((ADAPTER, re.compile(r"^lora_")), (ROUTER, re.compile(r"^(router|gate|shared_expert_gate)$")),
          (EXPERT, re.compile(r"^experts?$")))  # fmt: skip


class Fp8Layers(NamedTuple):
    """The layers to convert by name, and the names of the others by the reason."""

    chosen: dict[str, nn.Linear]
    skipped: dict[str, tuple[str, ...]]

    @property
    def skipped_words(self) -> str:
        """`2 outside the blocks (lm_head, ...)`, one such phrase a reason; `none` where there is none."""
        return "; ".join(f"{len(names)} {reason} ({_first(names)})" for reason, names in self.skipped.items()) or "none"


def fp8_layers(model: nn.Module, recipe: Fp8Recipe) -> Fp8Layers:
    """Sorts the linear layers of a model that no engine has wrapped yet."""
    blocks = _blocks(model)
    edges = _edges(list(blocks)) if recipe is Fp8Recipe.NVFP4 else ()
    chosen: dict[str, nn.Linear] = {}
    skipped: dict[str, list[str]] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        reason = _obstacle(name, layer, blocks, edges, recipe)
        if reason is None:
            chosen[name] = layer
        else:
            skipped.setdefault(reason, []).append(name)
    return Fp8Layers(chosen, {reason: tuple(names) for reason, names in skipped.items()})


def tile(recipe: Fp8Recipe) -> int:
    """Size of which both dimensions of a weight must be a multiple."""
    return _TILES.get(recipe, _PLAIN_TILE)


def token_multiple(recipe: Fp8Recipe) -> int:
    """Size of which the tokens of a micro batch must be a multiple: they are the third dimension of the products."""
    return 32 if recipe in (Fp8Recipe.MXFP8, Fp8Recipe.NVFP4) else 16


def _obstacle(
    name: str, layer: nn.Linear, blocks: dict[str, nn.Module], edges: tuple[str, ...], recipe: Fp8Recipe
) -> str | None:
    parts = name.split(".")
    if not any(name.startswith(f"{block}.") for block in blocks):
        return OUTSIDE
    for reason, pattern in _PARTS:
        if any(pattern.match(part) for part in parts):
            return reason
    if type(layer) is not nn.Linear:
        return f"of class {type(layer).__name__}"
    if any(size % tile(recipe) for size in (layer.in_features, layer.out_features)):
        return f"with a dimension that is no multiple of {tile(recipe)}"
    return EDGE if any(name.startswith(f"{block}.") for block in edges) else None


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}


def _edges(blocks: list[str]) -> tuple[str, ...]:
    last = round(len(blocks) * _LAST_SHARE)
    first = min(_FIRST_BLOCKS, last)  # a model of few blocks has no edges to spare
    return (*blocks[:first], *blocks[len(blocks) - last :])


def _first(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def replace_layer(model: nn.Module, name: str, made: nn.Module) -> None:
    """Puts a module in the place of another, by its dotted name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, made)
