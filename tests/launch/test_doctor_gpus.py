"""`doctor` on machines whose driver, torch or compiled libraries do not go together."""

import signal
import time
from pathlib import Path

import pytest
from doctor_factory import CUDA_13, V100, BrokenMachine, add_package, told
from msgspec.structs import replace

from launch.doctor_finding import Level
from trainer.spec.errors import ExitCode


@pytest.fixture
def broken(tmp_path):
    return BrokenMachine(tmp_path)


def test_a_gpu_that_torch_drives_is_no_fault(broken):
    broken.install_gpu(driver="580.95.05")
    broken.add_torch()
    found = broken.diagnose("driver", "torch", "gpu-memory")
    assert found.exit_code is ExitCode.DONE
    assert told(found, Level.FINE) == [
        ("1 x NVIDIA H100 80GB HBM3, driver 580.95.05", None),
        ("torch 2.13.0+cu130, built for CUDA 13.0, sees 1 GPU, driver for CUDA up to 13.0", None),
        ("nobody holds the cards' memory: 79.1 GiB free on each", None),
    ]


def test_a_machine_without_a_gpu_trains_on_its_cpu(broken):
    broken.add_torch(cuda=None, available=False)
    found = broken.diagnose("driver", "torch")
    assert found.num_faults == found.num_warnings == 0
    assert told(found, Level.FINE)[0] == ("no GPU: training runs on the CPU", None)


def test_a_torch_without_cuda_beside_a_gpu(broken):
    broken.install_gpu()
    broken.add_torch(cuda=None, available=False)
    found = broken.diagnose("torch")
    assert found.exit_code is ExitCode.ENVIRONMENT
    assert told(found, Level.FAULT) == [
        (
            "NVIDIA H100 80GB HBM3 (driver 580.95.05) is here, but torch 2.13.0+cpu was built without CUDA",
            "pip install --force-reinstall torch==2.13.0 from an index that has the CUDA build",
        )
    ]


def test_a_driver_that_is_too_old_for_the_cuda_of_torch(broken):
    broken.install_gpu(driver="550.54.15")
    broken.add_torch(available=False)
    ((sentence, fix),) = told(broken.diagnose("torch"), Level.FAULT)
    assert sentence.endswith("torch 2.13.0+cu130 is built for CUDA 13.0, which needs driver 580.65.06 or newer")
    assert "update the NVIDIA driver to 580.65.06 or newer" in fix


def test_a_driver_too_old_for_a_cuda_that_the_table_does_not_know(broken):
    broken.install_gpu(driver="999.0")
    future = replace(CUDA_13, version="3.0.0+cu140", cuda="14.0", is_available=False)
    assert told(broken.diagnose("torch", torch=future), Level.FAULT) == [
        (
            "torch 3.0.0+cu140, built for CUDA 14.0; the driver knows CUDA 13.0 at most",
            "update the NVIDIA driver, or install a torch that was built for CUDA 13",
        )
    ]


def test_a_card_that_the_build_of_torch_has_no_kernels_for(broken):
    broken.install_gpu(V100)
    broken.add_torch()
    ((sentence, fix),) = told(broken.diagnose("torch"), Level.FAULT)
    assert sentence == (
        "Tesla V100-SXM2-32GB has compute capability 7.0; torch 2.13.0+cu130 (CUDA 13.0) has code for sm_80, sm_90 only"
    )
    assert fix == "install the torch 2.13.0 built for the newest CUDA 12, which keeps older architectures"


def test_a_torch_that_cannot_be_loaded_says_why(broken):
    broken.add_module("torch", "raise ImportError('libtorch_cpu.so: undefined symbol: iJIT_NotifyEvent')")
    found = broken.diagnose("torch")
    ((sentence, fix),) = told(found, Level.FAULT)
    assert sentence.endswith("cannot be loaded: ImportError: libtorch_cpu.so: undefined symbol: iJIT_NotifyEvent")
    assert "pip install --force-reinstall torch" in fix
    assert found.exit_code is ExitCode.ENVIRONMENT


def test_a_torch_that_hangs_is_ended_and_told(broken, tmp_path):
    broken.add_module(
        "torch", f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    ((sentence, _),) = told(broken.diagnose("torch", timeout_s=2.0), Level.FAULT)
    assert sentence.endswith("cannot be loaded: it did not load within 2 s")
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "the process outlived its time"
        time.sleep(0.05)


def test_a_kernel_module_that_is_not_the_librarys(broken):
    broken.laid_out.install_nvidia_smi("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    found = broken.diagnose("driver")
    ((sentence, fix),) = told(found, Level.FAULT)
    assert sentence.startswith("nvidia-smi fails: the NVIDIA kernel module and the driver's libraries have different")
    assert fix.startswith("restart the machine, or unload and load the kernel module")
    assert found.exit_code is ExitCode.ENVIRONMENT


def test_a_driver_that_hangs_beside_a_card_on_the_bus(broken):
    broken.laid_out.put_gpu_on_bus()
    broken.laid_out.install_nvidia_smi("exec sleep 600")
    ((sentence, fix),) = told(broken.diagnose("driver"), Level.FAULT)
    assert sentence == "nvidia-smi does not answer"
    assert "restarting the machine mends it" in fix


def test_a_card_that_forbids_computing(broken):
    broken.install_gpu(mode="Prohibited")
    assert told(broken.diagnose("driver"), Level.WARNING) == [
        ("left out: GPU 0 (NVIDIA H100 80GB HBM3): its compute mode is Prohibited", "`sudo nvidia-smi -c 0` lifts it")
    ]


def test_memory_of_a_card_that_others_hold(broken):
    broken.install_gpu(free=61059, apps="GPU-aaaa, 4242, /usr/bin/ollama, 20000\\n")
    assert told(broken.diagnose("gpu-memory"), Level.WARNING) == [
        (
            "GPU 0 (NVIDIA H100 80GB HBM3): 19.5 GiB of 79.6 GiB are held by ollama (pid 4242)",
            "end them (kill 4242), or name other cards with --gpus",
        )
    ]


@pytest.fixture
def with_package(broken, monkeypatch):
    """Puts a package's metadata where its version is read, and its module where it is imported."""

    def add(package: str, module: str, source: str) -> None:
        folder = broken.folder / "installed"
        add_package(folder, package, "9.9.9")
        monkeypatch.syspath_prepend(folder)
        broken.add_module(module, source)

    return add


def test_flash_attention_that_was_compiled_for_another_torch(broken, with_package):
    problem = "flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationESs"
    with_package("flash-attn", "flash_attn", f"raise ImportError({problem!r})")
    broken.add_module("bitsandbytes", "")
    broken.install_gpu()
    found = broken.diagnose("compiled-libraries", torch=CUDA_13)
    (told_of,) = [row for row in told(found, Level.FAULT) if "flash-attn" in row[0]]
    assert told_of == (
        f"flash-attn 9.9.9 does not load beside torch 2.13.0+cu130: ImportError: {problem}",
        "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps flash-attn "
        "(or pip uninstall flash-attn)",
    )
    assert found.exit_code is ExitCode.ENVIRONMENT


def test_a_transformer_engine_that_takes_the_process_with_it(broken, with_package):
    with_package("transformer-engine", "transformer_engine.pytorch", "import os; os.abort()")
    sentences = told(broken.diagnose("compiled-libraries", torch=CUDA_13), Level.WARNING)
    assert [sentence for sentence, _ in sentences] == [
        f"transformer-engine 9.9.9 does not load beside torch 2.13.0+cu130: loading it ends the process "
        f"(signal {signal.SIGABRT:d})"
    ]


def test_a_library_that_loads_is_fine(broken, with_package):
    with_package("flash-attn", "flash_attn", "")
    found = broken.diagnose("compiled-libraries", torch=CUDA_13)
    assert told(found, Level.FINE) == [("flash-attn 9.9.9 loads", None)]


@pytest.mark.parametrize(
    ("release", "cuda", "fits"),
    [("12.4", "12.8", True), ("13.0", "13.0", True), ("13.1", "13.0", False), ("11.8", "12.8", False)],
)
def test_the_toolkit_has_to_be_one_that_deepspeed_takes(broken, release, cuda, fits):
    nvcc = broken.install("nvcc", f"echo 'Cuda compilation tools, release {release}, V{release}.1'")
    broken.install_gpu()
    found = broken.diagnose("cuda-toolkit", torch=replace(CUDA_13, cuda=cuda))
    if fits:
        assert told(found, Level.FINE) == [(f"{nvcc} is of CUDA {release}, as torch needs it", None)]
        return
    assert told(found, Level.WARNING) == [
        (
            f"{nvcc} is of CUDA {release}, torch is built for CUDA {cuda}: DeepSpeed refuses to build its operators, "
            "which offload needs",
            f"install the CUDA {cuda} toolkit (developer.nvidia.com/cuda-toolkit-archive) and set CUDA_HOME",
        )
    ]


def test_a_machine_with_gpus_and_without_a_toolkit(broken):
    broken.install_gpu()
    broken.environment["CUDA_HOME"] = str(broken.folder / "nowhere")
    ((sentence, fix),) = told(broken.diagnose("cuda-toolkit", torch=CUDA_13), Level.WARNING)
    assert sentence == "there is no nvcc: DeepSpeed's operators, which offload needs, cannot be built"
    assert fix.startswith("install the CUDA 13.0 toolkit")


def test_processes_that_cannot_meet(broken, monkeypatch):
    """A real all-gather of two processes, over an interface that is not there."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch0")
    facts = replace(CUDA_13, version="2.13.0+cpu", cuda=None, is_available=False, num_devices=0)
    found = broken.diagnose("collective", torch=facts)
    ((sentence, fix),) = told(found, Level.FAULT)
    assert sentence.startswith("an all-gather over 2 devices failed (") and "nonesuch0" in sentence
    assert "GLOO_SOCKET_IFNAME=lo takes the loopback" in fix
    assert found.exit_code is ExitCode.ENVIRONMENT
