"""Facts of the torch that requirements.lock names: which cards its build for CUDA has code for.

PyPI's wheels of torch are built for CUDA 13 from version 2.11 on, without a local tag in their version. That of 2.13.0
has code for sm_75, sm_80, sm_86, sm_90, sm_100 and sm_120, as its libtorch_cuda.so lists them. Builds for CUDA 12 keep
older cards (V100 is 7.0, P100 6.0, GTX 10 6.1); PyTorch's own index has them, PyPI has none.
"""

VERSION = "2.13.0"
OLDEST_CAPABILITY = (7, 5)
CUDA_12_INDEX = "https://download.pytorch.org/whl/cu126"


def lacks_code(torch_version: str, capability: tuple[int, int]) -> bool:
    """True if this torch version is a build without code for a card of this capability; False if unknown."""
    tag = torch_version.partition("+")[2]
    return (not tag or tag.startswith("cu13")) and capability < OLDEST_CAPABILITY
