"""Operations of NVIDIA architectures per clock, from which the peak of any of their cards follows.

    peak FLOP/s = SMs x clock x FLOP of one SM in one clock

is the formula of NVIDIA's architecture whitepapers (V100 table 1, T4 and Turing table 5, A100 table 1, GA102 table 2,
Ada table 2, H100 table 2, RTX Blackwell table 2). A fused multiply-add is two FLOP. Tensor cores multiply fp16 and
bf16 at one rate, tf32 at half of it, and fp8 (compute capability 8.9 and later) at twice it, all dense. GeForce cards,
and the few others that are marked so, sum in fp32 at half the rate of their chip: `halves_fp32_sums`.
"""

from enum import StrEnum

from shardwise.trainer.spec.value import Value

MHZ = 10**6
HOPPER_TENSOR_FLOP = 4096  # of an SM in a clock


class Generation(StrEnum):
    """Chip family, where power and kernels differ; GA10x and GB20x are the consumer dies of their architecture."""

    VOLTA = "volta"
    TURING = "turing"
    AMPERE = "ampere"
    GA10X = "ga10x"
    ADA = "ada"
    HOPPER = "hopper"
    BLACKWELL = "blackwell"
    GB20X = "gb20x"


class Chip(Value, frozen=True, kw_only=True):
    """One architecture. FLOP are those of one SM in one clock."""

    generation: Generation
    compute_capability: tuple[int, int]
    fp32_flop: int  # of the fp32 cores
    tensor_flop: int | None  # dense fp16 products of the tensor cores; None: the chip has none
    context_mib: int  # CUDA context and kernels of one process

    @property
    def cuda_cores(self) -> int:
        """Of one SM; each multiplies and adds once in a clock."""
        return self.fp32_flop // 2

    @property
    def has_bf16(self) -> bool:
        return self.compute_capability >= (8, 0)

    @property
    def has_fp8(self) -> bool:
        return self.compute_capability >= (8, 9)


class Peaks(Value, frozen=True, kw_only=True):
    """Dense peaks of matrix products that sum in fp32, FLOP/s; None: the chip has no such unit."""

    fp32: int
    tf32: int | None
    fp16: int
    bf16: int | None
    fp8: int | None


def peaks_of(chip: Chip, num_sms: int, *, clock_mhz: float, tensor_mhz: float | None, halves_fp32_sums: bool) -> Peaks:
    """Peak of `num_sms` SMs; `tensor_mhz` if a datasheet gives tensor cores a clock of their own."""
    fp32 = round(num_sms * clock_mhz * MHZ * chip.fp32_flop)
    if chip.tensor_flop is None:  # fp16 products that sum in fp32 run on the fp32 cores
        return Peaks(fp32=fp32, tf32=None, fp16=fp32, bf16=None, fp8=None)
    fp16 = round(num_sms * (tensor_mhz or clock_mhz) * MHZ * chip.tensor_flop / (2 if halves_fp32_sums else 1))
    return Peaks(
        fp32=fp32,
        tf32=fp16 // 2 if chip.has_bf16 else None,
        fp16=fp16,
        bf16=fp16 if chip.has_bf16 else None,
        fp8=2 * fp16 if chip.has_fp8 else None,
    )


# Measured context sizes are scarce: 0.3 to 0.55 GiB with lazy loading of CUDA modules (CUDA 11.7 and later). GH100's is
# ours: 751 MiB in each of eight runs that had an H100 to themselves (driver 580, CUDA 13.0, torch 2.11).
def _chip(generation: Generation, major: int, minor: int, fp32: int, tensor: int | None, context_mib: int) -> Chip:
    return Chip(
        generation=generation,
        compute_capability=(major, minor),
        fp32_flop=fp32,
        tensor_flop=tensor,
        context_mib=context_mib,
    )


GV100 = _chip(Generation.VOLTA, 7, 0, 128, 1024, 400)
TU10X = _chip(Generation.TURING, 7, 5, 128, 1024, 320)
TU11X = _chip(Generation.TURING, 7, 5, 128, None, 320)  # GTX 16: no tensor cores
GA100 = _chip(Generation.AMPERE, 8, 0, 128, 2048, 460)
GA10X = _chip(Generation.GA10X, 8, 6, 256, 1024, 320)
GA10B = _chip(Generation.GA10X, 8, 7, 256, 2048, 320)  # Jetson Orin
AD10X = _chip(Generation.ADA, 8, 9, 256, 1024, 360)
GH100 = _chip(Generation.HOPPER, 9, 0, 256, HOPPER_TENSOR_FLOP, 751)
GB100 = _chip(Generation.BLACKWELL, 10, 0, 256, 8192, 640)
GB110 = _chip(Generation.BLACKWELL, 10, 3, 256, 8192, 640)  # B300
GB10B = _chip(Generation.BLACKWELL, 11, 0, 256, 8192, 640)  # Jetson Thor
GB20X = _chip(Generation.GB20X, 12, 0, 256, 1024, 420)
GB20B = _chip(Generation.GB20X, 12, 1, 256, 1024, 420)  # GB10
# By compute capability; TU11X has that of TU10X.
CHIPS = {
    chip.compute_capability: chip
    for chip in (GV100, TU10X, GA100, GA10X, GA10B, AD10X, GH100, GB100, GB110, GB10B, GB20X, GB20B)
}
GDDR_GENERATIONS = (Generation.TURING, Generation.GA10X, Generation.ADA, Generation.GB20X)
