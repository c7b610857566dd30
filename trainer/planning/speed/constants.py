"""Every constant of the speed model that is neither a datasheet figure nor counted from a kernel: one table.

`fitted` constants were found once, on 176 published throughputs of A100, H100 and H200 machines (robust error, each
source weighted by the root of its rows); no row has a constant of its own. The others are from the source in their
comment and were not fitted. docs/speed-model.md repeats this table with the effect of each constant.
"""

# Fitted.
MATMUL_SHARE = 0.781  # of the dense peak, where power does not limit
WATT_FLOPS = 1.058e12  # 16-bit FLOP/s that a Hopper board sustains per watt
FP8_GAIN = 1.92  # fp8 against 16-bit products
ATTENTION_SHARE = 0.618  # of the dense peak: FlashAttention-2, forward and backward
ATTENTION_SHARE_HOPPER = 0.346  # the same kernels on Hopper, whose tensor cores they do not fill
MEMORY_SHARE = 0.749  # of the datasheet bandwidth, in elementwise kernels
LINK_SHARE = 0.479  # of the nominal link, by collectives that run during products
OVERLAP = 0.492  # share of the shorter of two concurrent activities that hides behind the longer
OPERATOR_S = 35.8e-6  # host time of one operator: Python, autograd and the launch

# From a source.
# Host time of one of the three products of a Transformer Engine layer: forward and backward of the smallest layer took
# 1.17 ms on an H100, where its products need 0.36 in bf16 (benchmarks/results).
TE_LAYER_S = 0.39e-3
HALVED_MATMUL_SHARE = 0.95  # of a peak that is halved for fp32 sums: cuBLAS on L20, 105 to 115 of 119.5 TFLOP/s
GDDR_GAIN = 1.09  # of the share of memory bandwidth: copies reach 0.93 of it on GDDR6X (RTX 3090), 0.85 on HBM
WATT_EXPONENT = 2 / 3  # of products by board power where it limits: P ~ f V^2 and V rises with f, less what idles
FLASH_1_SHARE = 0.5  # FlashAttention-1 against 2: "about 2x", FlashAttention-2 paper, abstract
# FlashAttention-3 against 2 on Hopper, both directions: 1.5 to 2.0 forward, 1.5 to 1.75 backward (paper, abstract and
# section 4.1), which is 2.5 forwards.
FLASH_3_GAIN = 1.66
STEP_S = 0.020  # host time of a step outside micro batches in published trainers; freed, a fit returns 0.017
OWN_STEP_S = 0.004  # in ours: 3.8 ms of the quickstart on an H100, 4.2 ms of adapters of a 1B model on an H200
HOP_S = 5e-6  # latency of a collective per rank: nccl-tests at 8 bytes, 30 to 40 us on 8 GPUs
PCIE_SHARE = 0.8  # of PCIe, by copies of pinned memory: 55 of 64 GB/s on H200, 25 of 32 on A100
HOST_ADAM_BYTES_PER_S = 100e9  # of a server: ZeRO-Offload paper, table 4: 0.22 s for 1e9 parameters of 28 bytes
DDR5_ADAM_BYTES_PER_S = 65e9  # of two channels of DDR5-5600, of whose 90 GB/s 0.75 are reached
DDR4_ADAM_BYTES_PER_S = 38e9  # of two channels of DDR4-3200, of 51 GB/s
CORE_ADAM_BYTES_PER_S = 10e9  # of a core: half of what each of two cores of a Xeon reached, which may be one core
# The same table: 1.39 s with PyTorch's Adam, operation by operation. Its fused kernel is as fast as DeepSpeed's
# (0.95 of its seconds, torch 2.13 and DeepSpeed 0.19.8 on two cores of a Xeon).
TORCH_CPU_ADAM_SHARE = 0.16
NVME_BYTES_PER_S = 6e9  # read or write of a server's NVMe disk, until `probe --measure`
# Of a desktop's, read and write together: 5 GB/s read, 1.5 written once the cache of its TLC flash is full.
DESKTOP_NVME_BYTES_PER_S = 2.3e9
NO_PEER_SHARE = 0.5  # without peer access a copy crosses PCIe twice, through host memory
SVD_SHARE = 0.05  # of the fp32 peak: a 7B model takes about 10 minutes on an A100 (Q-GaLore paper, section 1)
COMPILE_S = 30.0  # of a kind of block, both directions: assumed (2 CPU cores: 14 s; vLLM, whole 8B on an L4: 66 s)
CPU_OPERATOR_S = 8e-6  # without a kernel launch
CPU_STEP_S = 0.005
CPU_ATTENTION_SHARE = 0.3  # of the rate of its matrix products
