"""What DeepSpeed asks of a CPU that is to train in fp16 (`CPU_Accelerator.is_fp16_supported`)."""

import torch

HAS_FP16_UNITS = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
NO_FP16_UNITS = "needs a CPU with avx512_fp16, without which DeepSpeed refuses fp16"
