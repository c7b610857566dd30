"""Datasheet facts of the GPUs that can be planned for without being here.

Memory is what `nvidia-smi` reports as total (ECC already taken out), usable memory what a process can allocate of it
(CUDA context included), rates are per second and per direction. Peaks are dense (no sparsity) and accumulate in fp32,
which GeForce cards do at half the headline figure; None means that the chip has no such unit (no bf16 before
compute capability 8.0, no fp8 before 8.9). `network_bytes_per_s` is not of the card: it is what a node that carries
this card usually has, all adapters together, used until a measurement replaces it: for cards on a baseboard NVIDIA's
own machines (DGX-1 with four adapters of 100 Gb/s, DGX A100 eight of 200, DGX H100 and B200 eight of 400). Clouds may
have a quarter of it; a case can say so.

Sources: each row names NVIDIA's datasheet or architecture whitepaper; usable memory is `total_memory` of
`torch.cuda.get_device_properties` as people report it for the card, within about 1 %.
Not covered: laptop GPUs, AMD, Intel, and PCIe bridges of NVLink (a machine that has them is probed instead).
"""

import re
from collections.abc import Callable
from enum import StrEnum

from trainer.spec.errors import InputError
from trainer.spec.hardware import Gpu, Hardware, Host
from trainer.spec.nearest import close_matches
from trainer.spec.strategy import Precision
from trainer.spec.units import MIB
from trainer.spec.value import Value

GB_PER_S = 10**9
TFLOPS = 10**12
SPEC_FORM = "[NODESx]GPUSxNAME, such as 8xH100-SXM5-80GB, 4x8xA100-SXM4-80GB, 1xRTX-4090 or 2xCPU"
_MEMORY_TOLERANCE = 0.06  # the same card reports a few per cent less with ECC on or another driver


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


class GpuSpec(Value, frozen=True, kw_only=True):
    """One row of the catalogue of GPUs."""

    name: str
    smi_names: tuple[str, ...]  # as nvidia-smi writes them, without "NVIDIA" or "Tesla"
    generation: Generation
    compute_capability: tuple[int, int]
    memory_bytes: int
    usable_bytes: int
    memory_bytes_per_s: int
    fp32_flops_per_s: int
    tf32_flops_per_s: int | None
    fp16_flops_per_s: int
    bf16_flops_per_s: int | None
    fp8_flops_per_s: int | None
    nvlink_bytes_per_s: int | None  # to the other GPUs of the node, all links together, each direction
    pcie_bytes_per_s: int  # to the host, each direction
    network_bytes_per_s: int  # of a typical node
    has_peer_access_over_pcie: bool
    halves_fp32_sums: bool  # products that sum in fp32 run at half the rate of those that sum in fp16
    board_watts: int
    context_bytes: int  # CUDA context and kernels of one process
    source: str

    def peak_flops_per_s(self, precision: Precision) -> int | None:
        """Dense peak of the matrix products of `precision`; None where the chip has no unit for it."""
        if precision is Precision.FP32:
            return self.fp32_flops_per_s
        if precision is Precision.FP16_MIXED:
            return self.fp16_flops_per_s
        if precision is Precision.FP8:
            return self.fp8_flops_per_s
        return self.bf16_flops_per_s


def find_gpu_spec(name: str) -> GpuSpec:
    """The row of a catalogue name, whatever its case and separators; InputError names the nearest ones."""
    wanted = _normalised(name)
    row = _BY_NORMALISED_NAME.get(wanted)
    if row is not None:
        return row
    near = [spec.name for key, spec in _BY_NORMALISED_NAME.items() if wanted and wanted in key]
    near += [_BY_NORMALISED_NAME[key].name for key in close_matches(wanted, _BY_NORMALISED_NAME, count=3)]
    unique = list(dict.fromkeys(near))[:4]
    hint = f"did you mean {', '.join(unique)}?" if unique else f"known: {', '.join(GPU_SPECS)}"
    raise InputError(f"unknown GPU {name!r}; {hint}")


def match_gpu_name(nvidia_smi_name: str, memory_bytes: int) -> str | None:
    """The catalogue name of a card that nvidia-smi reports; None unless both name and memory agree with a row."""
    bare = re.sub(r"^(NVIDIA|Tesla|\s)+", "", nvidia_smi_name.strip())
    for spec in GPU_SPECS.values():
        is_near = abs(memory_bytes - spec.memory_bytes) <= _MEMORY_TOLERANCE * spec.memory_bytes
        if is_near and bare in spec.smi_names:
            return spec.name
    return None


def hardware_from_spec(text: str, *, local_host: Callable[[], Host]) -> Hardware:
    """The machine that a SPEC on the command line describes; InputError says what a SPEC looks like.

    `2xCPU` is two ranks that share this machine's CPU and RAM, `4x2xCPU` four machines like it; nothing else asks
    `local_host`. Of other machines that are not here the host is unknown.
    """
    match = re.fullmatch(r"\s*(?:(\d+)\s*x)?(?:(\d+)\s*x)?\s*([A-Za-z].*?)\s*", text, re.IGNORECASE)
    if match is None:
        raise InputError(f"{text!r} is not a hardware SPEC; it has the form {SPEC_FORM}")
    first, second, name = match.groups()
    num_nodes, num_devices = (int(first), int(second)) if second else (1, int(first or 1))
    if not num_nodes or not num_devices:
        raise InputError(f"{text!r}: a machine needs at least one device; a SPEC has the form {SPEC_FORM}")
    source = f"catalogue {text.strip()}"
    if name.upper() == "CPU":
        return Hardware(gpus=(), host=local_host(), num_nodes=num_nodes, num_cpu_devices=num_devices, source=source)
    try:
        spec = find_gpu_spec(name)
    except InputError as error:
        raise InputError(f"{text!r}: {error}\na SPEC has the form {SPEC_FORM}") from None
    gpus = tuple(_gpu_of(spec, index) for index in range(num_devices))
    unknown_host = Host(cpu_name=None, num_cores=None, ram_bytes=None, ram_available_bytes=None)
    return Hardware(gpus=gpus, host=unknown_host, num_nodes=num_nodes, source=source)


def _gpu_of(spec: GpuSpec, index: int) -> Gpu:
    return Gpu(
        index=index,
        name=spec.name,
        spec_name=spec.name,
        memory_bytes=spec.memory_bytes,
        usable_bytes=spec.usable_bytes,
        compute_capability=spec.compute_capability,
        power_limit_w=float(spec.board_watts),
    )


def _normalised(name: str) -> str:
    return re.sub(r"[\s_\-]+", "", name).lower()


def _row(
    names: str,
    generation: Generation,
    memory: tuple[int, float, int],
    peaks: tuple[float, float | None, float, float | None, float | None],
    links: tuple[int | None, int, int],
    watts: int,
    source: str,
    *,
    capability: tuple[int, int] | None = None,
) -> GpuSpec:
    """One row; `capability` only where it is not that of the generation."""
    name, *smi_names = names.split(" = ")
    fp32, tf32, fp16, bf16, fp8 = (None if peak is None else round(peak * TFLOPS) for peak in peaks)
    assert fp32 is not None and fp16 is not None
    nvlink, pcie, network = links
    is_geforce = bool(re.match(r"RTX-\d{4}", name)) and not name.endswith("Ada")
    return GpuSpec(
        name=name,
        smi_names=tuple(smi_names),
        generation=generation,
        compute_capability=capability or _CAPABILITY[generation],
        memory_bytes=memory[0] * MIB,
        usable_bytes=round(memory[1] * 1024) * MIB,
        memory_bytes_per_s=memory[2] * GB_PER_S,
        fp32_flops_per_s=fp32,
        tf32_flops_per_s=tf32,
        fp16_flops_per_s=fp16,
        bf16_flops_per_s=bf16,
        fp8_flops_per_s=fp8,
        nvlink_bytes_per_s=None if nvlink is None else nvlink * GB_PER_S,
        pcie_bytes_per_s=pcie * GB_PER_S,
        network_bytes_per_s=network * GB_PER_S,
        has_peer_access_over_pcie=not is_geforce,  # GeForce drivers bounce copies between cards through host memory
        halves_fp32_sums=is_geforce or name == "A10G",
        board_watts=watts,
        context_bytes=_CONTEXT_MIB[generation] * MIB,
        source=source,
    )


# Measured context sizes are scarce: 0.3 to 0.55 GiB with lazy loading of CUDA modules (CUDA 11.7 and later).
_CONTEXT_MIB = {
    Generation.VOLTA: 400,
    Generation.TURING: 320,
    Generation.AMPERE: 460,
    Generation.GA10X: 320,
    Generation.ADA: 360,
    Generation.HOPPER: 560,
    Generation.BLACKWELL: 640,
    Generation.GB20X: 420,
}

_CAPABILITY = {
    Generation.VOLTA: (7, 0),
    Generation.TURING: (7, 5),
    Generation.AMPERE: (8, 0),
    Generation.GA10X: (8, 6),
    Generation.ADA: (8, 9),
    Generation.HOPPER: (9, 0),
    Generation.BLACKWELL: (10, 0),
    Generation.GB20X: (12, 0),
}

_V, _T, _A, _GA = Generation.VOLTA, Generation.TURING, Generation.AMPERE, Generation.GA10X
_L, _H, _B, _GB = Generation.ADA, Generation.HOPPER, Generation.BLACKWELL, Generation.GB20X
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper, v2.1"
_AD102 = "NVIDIA Ada GPU Architecture whitepaper, v2.1"
_GB202 = "NVIDIA RTX Blackwell GPU Architecture whitepaper, v1.1"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet, nvidia.com/en-us/data-center/a100"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet, nvidia.com/en-us/data-center/h100"
_V100 = "NVIDIA V100 Tensor Core GPU datasheet, nvidia.com/en-us/data-center/v100"

# fmt: off
_ROWS = (
    # name = names in nvidia-smi, generation, (MiB in nvidia-smi, usable GiB, GB/s),
    #      dense TFLOP/s (fp32, tf32, fp16, bf16, fp8), GB/s (NVLink, PCIe, network of a node), W, source
    _row("V100-16GB = V100-SXM2-16GB", _V, (16384, 15.77, 900),
         (15.7, None, 125, None, None), (150, 16, 50), 300, _V100),
    _row("V100-32GB = V100-SXM2-32GB = V100-SXM3-32GB", _V, (32768, 31.74, 900),
         (15.7, None, 125, None, None), (150, 16, 50), 300, _V100),
    _row("V100-PCIe-16GB = V100-PCIE-16GB", _V, (16384, 15.77, 900),
         (14, None, 112, None, None), (None, 16, 12), 250, _V100),
    _row("V100-PCIe-32GB = V100-PCIE-32GB", _V, (32768, 31.74, 900),
         (14, None, 112, None, None), (None, 16, 12), 250, _V100),
    _row("T4 = T4", _T, (15360, 14.56, 320),
         (8.1, None, 65, None, None), (None, 16, 6), 70, "NVIDIA T4 datasheet, nvidia.com/en-us/data-center/tesla-t4"),
    _row("RTX-2080Ti = GeForce RTX 2080 Ti", _T, (11264, 10.75, 616),
         (13.4, None, 53.8, None, None), (None, 16, 3), 250, "NVIDIA Turing GPU Architecture whitepaper"),
    _row("RTX-3060-12GB = GeForce RTX 3060", _GA, (12288, 11.75, 360),
         (12.7, 12.7, 25.5, 25.5, None), (None, 32, 3), 170, _GA102),
    _row("RTX-3070-8GB = GeForce RTX 3070", _GA, (8192, 7.78, 448),
         (20.3, 20.3, 40.6, 40.6, None), (None, 32, 3), 220, _GA102),
    _row("RTX-3080-10GB = GeForce RTX 3080", _GA, (10240, 9.77, 760),
         (29.8, 29.8, 59.5, 59.5, None), (None, 32, 3), 320, _GA102),
    _row("RTX-3090 = GeForce RTX 3090", _GA, (24576, 23.68, 936),
         (35.6, 35.6, 71, 71, None), (None, 32, 3), 350, _GA102),
    _row("RTX-4060-8GB = GeForce RTX 4060", _L, (8188, 7.75, 272),
         (15.1, 15.1, 30, 30, 60), (None, 16, 3), 115, _AD102),
    _row("RTX-4060Ti-16GB = GeForce RTX 4060 Ti", _L, (16380, 15.6, 288),
         (22.1, 22.1, 44, 44, 88), (None, 16, 3), 165, _AD102),
    _row("RTX-4070-12GB = GeForce RTX 4070", _L, (12282, 11.6, 504),
         (29.1, 29.1, 58.3, 58.3, 116.6), (None, 32, 3), 200, _AD102),
    _row("RTX-4080 = GeForce RTX 4080", _L, (16376, 15.69, 717),
         (48.7, 48.7, 97.5, 97.5, 194.9), (None, 32, 3), 320, _AD102),
    _row("RTX-4090 = GeForce RTX 4090", _L, (24564, 23.64, 1008),
         (82.6, 82.6, 165.2, 165.2, 330.3), (None, 32, 3), 450, _AD102),
    _row("RTX-5070Ti = GeForce RTX 5070 Ti", _GB, (16303, 15.46, 896),
         (43.9, 43.9, 87.9, 87.9, 175.8), (None, 64, 3), 300, _GB202),
    _row("RTX-5080 = GeForce RTX 5080", _GB, (16303, 15.46, 960),
         (56.3, 56.3, 112.6, 112.6, 225.1), (None, 64, 3), 360, _GB202),
    _row("RTX-5090 = GeForce RTX 5090", _GB, (32607, 31.36, 1792),
         (104.8, 104.8, 209.5, 209.5, 419), (None, 64, 3), 575, _GB202),
    _row("A10G = A10G", _GA, (23028, 22.05, 600),
         (31.5, 35, 70, 70, None), (None, 32, 12), 150,
         "NVIDIA A10G datasheet of the AWS G5 instances (d1.awsstatic.com, 17 February 2022)"),
    _row("A10 = A10", _GA, (23028, 22.05, 600),
         (31.2, 62.5, 125, 125, None), (None, 32, 12), 150,
         "NVIDIA A10 Tensor Core GPU datasheet, nvidia.com/en-us/data-center/products/a10-gpu"),
    _row("A30 = A30", _A, (24576, 23.5, 933),
         (10.3, 82, 165, 165, None), (None, 32, 12), 165,
         "NVIDIA A30 Tensor Core GPU datasheet, nvidia.com/en-us/data-center/products/a30-gpu"),
    _row("A40 = A40", _GA, (46068, 44.35, 696),
         (37.4, 74.8, 149.7, 149.7, None), (None, 32, 12), 300,
         "NVIDIA A40 datasheet, nvidia.com/en-us/data-center/a40"),
    _row("L4 = L4", _L, (23034, 22.03, 300),
         (30.3, 60, 121, 121, 242), (None, 32, 12), 72,
         "NVIDIA L4 Tensor Core GPU datasheet, nvidia.com/en-us/data-center/l4 (its figures with sparsity, halved)"),
    _row("L40 = L40", _L, (46068, 44.39, 864),
         (90.5, 90.5, 181, 181, 362), (None, 32, 25), 300, "NVIDIA L40 datasheet, nvidia.com/en-us/data-center/l40"),
    _row("L40S = L40S", _L, (46068, 44.39, 864),
         (91.6, 183, 362, 362, 733), (None, 32, 50), 350, "NVIDIA L40S datasheet, nvidia.com/en-us/data-center/l40s"),
    _row("RTX-A5000 = RTX A5000", _GA, (24564, 23.68, 768),
         (27.8, 55.6, 111, 111, None), (None, 32, 12), 230, "NVIDIA RTX A5000 datasheet; " + _GA102),
    _row("RTX-A6000 = RTX A6000", _GA, (49140, 47.53, 768),
         (38.7, 77.4, 154.8, 154.8, None), (None, 32, 12), 300, "NVIDIA RTX A6000 datasheet; " + _GA102),
    _row("RTX-6000-Ada = RTX 6000 Ada Generation", _L, (49140, 47.4, 960),
         (91.1, 182.1, 364.2, 364.2, 728.5), (None, 32, 12), 300,
         "NVIDIA RTX 6000 Ada Generation datasheet; " + _AD102),
    _row("A100-SXM4-40GB = A100-SXM4-40GB", _A, (40960, 39.39, 1555),
         (19.5, 156, 312, 312, None), (300, 32, 200), 400, _A100),
    _row("A100-SXM4-80GB = A100-SXM4-80GB = A100-SXM-80GB", _A, (81920, 79.15, 2039),
         (19.5, 156, 312, 312, None), (300, 32, 200), 400, _A100),
    _row("A100-PCIe-40GB = A100-PCIE-40GB = A100-PCIe-40GB", _A, (40960, 39.39, 1555),
         (19.5, 156, 312, 312, None), (None, 32, 50), 250, _A100),
    _row("A100-PCIe-80GB = A100 80GB PCIe = A100-PCIE-80GB", _A, (81920, 79.15, 1935),
         (19.5, 156, 312, 312, None), (None, 32, 50), 300, _A100),
    _row("A800-SXM4-80GB = A800-SXM4-80GB", _A, (81920, 79.15, 2039),
         (19.5, 156, 312, 312, None), (200, 32, 200), 400, "NVIDIA A800 80GB datasheet (A100 with 400 GB/s NVLink)"),
    _row("H100-SXM5-80GB = H100 80GB HBM3", _H, (81559, 79.11, 3350),
         (67, 494.5, 989.5, 989.5, 1979), (450, 64, 400), 700, _H100),
    _row("H100-PCIe-80GB = H100 PCIe", _H, (81559, 79.11, 2000),
         (51, 378, 756, 756, 1513), (None, 64, 100), 350, _H100),
    _row("H100-NVL-94GB = H100 NVL", _H, (95830, 93.1, 3938),
         (60, 417.5, 835.5, 835.5, 1671), (300, 64, 100), 400, _H100),
    _row("H100-96GB-HBM2e = H100 96GB HBM2e", _H, (97871, 94.9, 2400),
         (67, 494.5, 989.5, 989.5, 1979), (450, 64, 400), 500,
         "torchtitan docs/performance.md (a 96 GB, 2.4 TB/s, 500 W variant); peaks as H100 SXM"),
    _row("H200 = H200", _H, (143771, 139.8, 4800),
         (67, 494.5, 989.5, 989.5, 1979), (450, 64, 400), 700,
         "NVIDIA H200 Tensor Core GPU datasheet, nvidia.com/en-us/data-center/h200"),
    _row("GH200 = GH200 480GB", _H, (97871, 94.5, 4000),
         (67, 494.5, 989.5, 989.5, 1979), (450, 450, 100), 700,
         "NVIDIA GH200 Grace Hopper Superchip datasheet (96 GB HBM3; NVLink-C2C to the host)"),
    _row("B200 = B200", _B, (183359, 178.3, 8000),
         (75, 1125, 2250, 2250, 4500), (900, 64, 400), 1000,
         "NVIDIA HGX B200 datasheet, nvidia.com/en-us/data-center/hgx (figures with sparsity, halved)"),
    _row("B300 = B300 SXM6 AC = B300", _B, (275040, 267.7, 8000),
         (75, 1125, 2250, 2250, 4500), (900, 64, 800), 1100,
         "NVIDIA HGX B300 datasheet, nvidia.com/en-us/data-center/hgx (figures with sparsity, halved)",
         capability=(10, 3)),
    _row("GB200 = GB200", _B, (189471, 184.3, 8000),
         (80, 1250, 2500, 2500, 5000), (900, 450, 400), 1200,
         "NVIDIA GB200 NVL72 datasheet, nvidia.com/en-us/data-center/gb200-nvl72 (with sparsity, halved)"),
)
# fmt: on

GPU_SPECS: dict[str, GpuSpec] = {row.name: row for row in _ROWS}
_BY_NORMALISED_NAME = {_normalised(name): spec for name, spec in GPU_SPECS.items()}
