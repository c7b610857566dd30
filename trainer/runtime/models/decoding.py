"""Weights that are stored in FP8 or MXFP4, decoded while they are read, by transformers' own operations.

    FP8     a scale for each block of a matrix (DeepSeek-V3, arXiv:2412.19437, section 3.3), or one for a tensor
    MXFP8   a power of two for 32 elements of a row
    MXFP4   a power of two for 32 elements of two to a byte (OCP Microscaling 1.0); the experts of gpt-oss

A value is decoded in fp32 and rounded once, to the type that the run holds it in. A matrix is decoded some rows at a
time, so that what is needed in addition to it does not grow with it.

transformers divides a matrix evenly among its scales. Where the size of a block does not divide that of the matrix, the
last block is smaller than the others (docs/workarounds.md, W66): such a matrix is padded to whole blocks first.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import Mxfp4Dequantize
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig
from transformers.quantizers.base import HfQuantizer

_ELEMENTS = 1 << 24  # of a matrix that are decoded at once


def decoder_of(settings: Mapping[str, Any]) -> HfQuantizer:
    """transformers' decoder for the `quantization_config` of a config.json."""
    seam: Any = AutoQuantizationConfig
    decoder: Any = AutoHfQuantizer.from_config(seam.from_dict({**settings, "dequantize": True}), pre_quantized=True)
    operation = Mxfp4 if decoder.get_load_operations()["dequantize"] is Mxfp4Dequantize else Fp8
    decoder.get_load_operations = lambda: {"dequantize": operation}
    assert isinstance(decoder, HfQuantizer)
    return decoder


class Mxfp4(Mxfp4Dequantize):
    """Experts [E, out, groups, 16] and their scales [E, out, groups] to [E, in, out]."""

    keeps_rows = True  # an expert is decoded without the others


class Fp8(Fp8Dequantize):
    """A matrix [out, in] and its scales, one for each block or one."""

    def _dequantize_one(self, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None) -> Tensor:
        size = self.hf_quantizer.quantization_config.weight_block_size
        grid = tuple(scales.shape)
        is_of_blocks = size is not None and quantized.dim() == 2 and quantized.is_floating_point()
        if not is_of_blocks or grid != tuple(
            -(-sides // side) for sides, side in zip(quantized.shape, size, strict=True)
        ):
            whole: Tensor = super()._dequantize_one(quantized, scales, output_dtype)
            return whole
        rows, columns = quantized.shape
        out = torch.empty(rows, columns, dtype=output_dtype or torch.float32, device=quantized.device)
        step = size[0] * max(1, _ELEMENTS // (size[0] * columns))
        for start in range(0, rows, step):
            part, part_scales = quantized[start : start + step], scales[start // size[0] :][: step // size[0]]
            padding = (0, grid[1] * size[1] - columns, 0, len(part_scales) * size[0] - len(part))
            blocks = functional.pad(part.view(torch.uint8), padding).view(part.dtype)
            decoded = super()._dequantize_one(blocks, part_scales, out.dtype)
            out[start : start + step] = decoded[: len(part), :columns]
        return out
