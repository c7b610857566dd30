"""DoRA (arXiv:2402.09353): bytes beyond low-rank adapters, for row norms of the weights that every forward computes.

PEFT's `DoraLinearLayer` multiplies the adapter's two matrices with an identity matrix of the layer's inputs, so that
engines see their forward, adds the product to the whole weight (under QLoRA made from 4 bit) and takes the length of
each row: `eye` i x i in the adapter's type, under autocast a cast copy of it that the graph of the product keeps until
the layer is done, then weight, product, scaled product and sum, i x o each. The output is scaled in the type of the
magnitudes, three arrays at once, and the products of layer and adapter are both saved for the gradient of those.

    saved      2 c o a token for each adapted layer, 12 B a row
    moments    eye and its cast | cast and four weights | cast, two weights and three outputs
    backward   three outputs in the type of the magnitudes, in an MLP's input layer

Each is a moment in the forward of a block, the last one's in the forward pass, any one's where it is recomputed.
Counted in torch 2.13 and PEFT 0.21 with dry runs; `lora.dropout` multiplies with the whole weight once more.
"""

from collections.abc import Iterable

from trainer.planning.memory.dims import Dims, adapted_linears
from trainer.planning.memory.recipe import Recipe
from trainer.planning.memory.stacks import AdapterInputs
from trainer.planning.setting import Setting
from trainer.spec.model.shape import Norm
from trainer.spec.strategy import Method
from trainer.spec.value import Value

_ROW_BYTES = 3 * 4  # length, magnitude by length, and that less one
_OUTPUTS = 3  # arrays of a layer's output, scaled
# Arrays of hidden states alive in a block that runs, beside what it saves: the stream before and after attention; where
# it runs again under autocast, as dry runs have it, what the RMSNorm after it left behind.
_HIDDEN, _HIDDEN_AGAIN, _HIDDEN_AFTER_NORM = 2, 3, 7


class NormMoment(Value, frozen=True, kw_only=True):
    """The worst moment of a block's forward, in bytes of a micro batch."""

    forward: int  # more than all that the block saves
    again: int  # the same where the forward is run again, which ends with the last tensor that is saved
    alone: int  # where it saves nothing, because it is recomputed


_NOTHING = NormMoment(forward=0, again=0, alone=0)


def uses_dora(setting: Setting) -> bool:
    """True if magnitudes are trained (DoRA)."""
    return setting.lora.dora and setting.method.freezes_base


def row_bytes(setting: Setting, dims: Dims) -> int:
    """Of the rows of one block's adapted weights, what the graph keeps besides tokens."""
    return _ROW_BYTES * sum(o for _, _, o in adapted_linears(setting, dims)) if uses_dora(setting) else 0


def saved_product_bytes(setting: Setting, recipe: Recipe, dims: Dims, adapted: Iterable[tuple[str, int, int]]) -> int:
    """Bytes of a token that the products of these layers and their adapters keep."""
    if not uses_dora(setting):
        return 0
    # A 4-bit layer answers in fp32 where its input is fp32, which attention's output is not.
    output = dims.linears[1 if dims.is_qkv_fused else 3]
    wide = 4 if recipe.has_fp32_products else recipe.compute_bytes
    return sum(
        (recipe.compute_bytes + (recipe.compute_bytes if each == output else wide)) * each[2] for each in adapted
    )


def norm_moment(setting: Setting, recipe: Recipe, dims: Dims, mlp_bytes: int) -> NormMoment:
    """The worst moment of one block; `mlp_bytes` is what a token saves in the feed-forward half."""
    if not uses_dora(setting):
        return _NOTHING
    layers = _Layers(setting, recipe, dims)
    last_of_size = {tuple(sizes): index for index, (_, *sizes) in enumerate(layers.adapted)}  # by when most is saved
    moments = [_NOTHING, *(layers.moment(index, mlp_bytes) for index in last_of_size.values())]
    return NormMoment(
        forward=max(moment.forward for moment in moments),
        again=max(moment.again for moment in moments),
        alone=max(moment.alone for moment in moments),
    )


def backward_bytes(setting: Setting, recipe: Recipe, dims: Dims) -> int:
    """Bytes of a token in the backward of one block: the widest output, scaled, by when a shared product is gone."""
    if not uses_dora(setting):
        return 0
    c = recipe.compute_bytes
    gone = c * (dims.ffn + dims.hidden) if recipe.adapter_inputs is AdapterInputs.SHARED else 0
    if not dims.is_gated:  # nothing else of the half is left: the last layer's products are gone
        gone += 2 * c * dims.hidden
    widest = max((o for _, _, o in adapted_linears(setting, dims)), default=0)
    return _OUTPUTS * _magnitude_bytes(recipe) * widest - gone


def _magnitude_bytes(recipe: Recipe) -> int:
    """Of an element of what a magnitude is multiplied with: engines cast it, autocast does not."""
    return recipe.trained_bytes if recipe.is_autocast else recipe.compute_bytes


class _Layers:
    """The adapted layers of one block in the order they run."""

    def __init__(self, setting: Setting, recipe: Recipe, dims: Dims) -> None:
        self._setting, self._recipe, self._dims = setting, recipe, dims
        self.adapted = adapted_linears(setting, dims)
        self._casts_inputs = recipe.adapter_inputs is AdapterInputs.AUTOCAST
        num_attention = 2 if dims.is_qkv_fused else 4
        self._num_in_attention = sum(each in self.adapted for each in dims.linears[:num_attention])

    def moment(self, index: int, mlp_bytes: int) -> NormMoment:
        """While layer `index` runs."""
        recipe, rank = self._recipe, self._setting.lora.rank
        _, num_inputs, num_outputs = self.adapted[index]
        c, eye = recipe.compute_bytes, _magnitude_bytes(recipe)
        wide = 4 if self._casts_inputs else c  # of the layer's input, which the weight is cast to
        is_made = wide != c or self._setting.method is Method.QLORA
        square, weight = num_inputs**2, num_inputs * num_outputs
        cast = c * square if recipe.is_autocast and eye != c else 0
        kept_eye = cast or eye * square
        at_eye = eye * square + cast + c * weight
        at_norm = kept_eye + (3 + is_made) * wide * weight
        at_output = kept_eye + (1 + is_made) * wide * weight
        own = c * (num_outputs + rank) + (c * num_inputs if self._casts_inputs else 0)  # saved after the norm
        # The input itself, and in fp32 as PEFT casts it for the adapter.
        both = wide if recipe.has_fp32_products else c + wide
        inputs = both * num_inputs if self._casts_inputs else 0
        hidden = recipe.residual_bytes * self._dims.hidden
        scaled, tokens = eye * num_outputs, recipe.tokens
        # A recomputation ends where the output is scaled, unless a dropout saves its mask behind it.
        has_dropout = self._dims.has_hidden_dropout and self._setting.has_dropout
        is_last = index + 1 == len(self.adapted) and not has_dropout
        other = inputs - self._saved_after(index, mlp_bytes)
        at_weight = max(at_eye, at_norm) - own * tokens
        beside = 2 * c * num_outputs + (c * self._dims.ffn if self._num_in_attention <= index and not is_last else 0)
        alone = max(
            eye * square + max(cast, c * weight),
            (3 + is_made) * wide * weight,
            (1 + is_made) * wide * weight + _OUTPUTS * scaled * tokens,
        )
        return NormMoment(
            forward=max(at_weight, at_output + _OUTPUTS * scaled * tokens) + (other + _HIDDEN * hidden) * tokens,
            again=max(at_weight, at_output + (1 if is_last else _OUTPUTS) * scaled * tokens)
            + (other + self._num_hidden_again() * hidden) * tokens,
            alone=alone + (inputs + beside + _HIDDEN * hidden) * tokens,
        )

    def _num_hidden_again(self) -> int:
        recipe = self._recipe
        if recipe.residual_bytes == recipe.compute_bytes and self._casts_inputs:
            return _HIDDEN_AFTER_NORM if self._dims.norm is Norm.RMS else _HIDDEN
        return _HIDDEN_AGAIN

    def _saved_after(self, index: int, mlp_bytes: int) -> int:
        """Bytes of a token that the block saves when this layer is done."""
        later = sum(self._adapter_bytes(each) for each in self.adapted[index + 1 :])
        if index < self._num_in_attention:
            return later + mlp_bytes
        if index + 1 == len(self.adapted):
            return later
        # The layer's own output, and where the last one shares its input with its adapter, their product.
        product = self._recipe.compute_bytes * self._dims.ffn
        is_split = self._dims.is_gated and not self._dims.is_gate_up_fused
        return later + (product if is_split else mlp_bytes) + (0 if self._casts_inputs else product)

    def _adapter_bytes(self, linear: tuple[str, int, int]) -> int:
        products = saved_product_bytes(self._setting, self._recipe, self._dims, (linear,))
        copied = linear[1] if self._casts_inputs else 0
        return products + self._recipe.compute_bytes * (self._setting.lora.rank + copied)
