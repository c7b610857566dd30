"""`doctor` on machines whose driver, torch or compiled libraries do not go together."""

import signal

import pytest
from doctor_factory import CUDA_13, BrokenMachine, add_package, assert_reported, reported
from fake_torch import NO_CODE
from gpu_machines import AMD, V100
from hanging_programs import pids_in, under_a_limit, wait_until_gone
from msgspec.structs import replace

from shardwise.launch.doctor.checks import check_compiled, check_torch
from shardwise.launch.doctor.finding import Level, diagnosis_of


@pytest.fixture
def broken(tmp_path):
    return BrokenMachine(tmp_path)


def test_a_gpu_that_torch_drives_is_no_fault(broken):
    broken.install_gpu(driver="580.95.05")
    broken.add_torch()
    found = broken.diagnose("driver", "torch")
    torch, card = ("2.13.0+cu130", "CUDA 13.0", "1 GPU", "up to 13.0"), ("NVIDIA H100 80GB HBM3", "580.95.05")
    assert_reported(found, Level.FINE, card, torch)
    assert len(found.findings) == 2


def test_a_torch_that_cannot_use_the_card_or_be_loaded_is_a_fault_with_the_reason(broken, tmp_path, monkeypatch):
    """A build for the CPU, before it is loaded; a card without code; a library that is broken."""
    add_package(tmp_path / "installed", "torch", "2.13.0+cpu")
    with monkeypatch.context() as installed:
        installed.syspath_prepend(tmp_path / "installed")
        broken.install_gpu()
        facts: tuple[str, ...] = ("2.13.0+cpu", "without CUDA", "H100", "install torch==")
        assert_reported(diagnosis_of(check_torch(broken.read())), Level.FAULT, facts)
    broken.install_gpu(V100)
    broken.add_torch(problem=NO_CODE)
    facts = ("Tesla V100-SXM2-32GB", "sm_80, sm_90", "build for CUDA 12")
    assert_reported(broken.diagnose("torch"), Level.FAULT, facts)
    broken.add_module("torch", "raise ImportError('libtorch_cpu.so: undefined symbol: iJIT_NotifyEvent')")
    facts = ("ImportError: libtorch_cpu.so: undefined symbol: iJIT_NotifyEvent", "pip install --force-reinstall torch")
    assert_reported(broken.diagnose("torch"), Level.FAULT, facts)


def test_a_torch_that_does_not_load_in_time_is_ended_and_a_warning(broken, tmp_path):
    written = tmp_path / "pid"
    broken.add_module("torch", f"import os, time; open({str(written)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    found, limit_s = under_a_limit(
        lambda limit_s: broken.diagnose("torch", timeout_s=limit_s), lambda _: bool(pids_in(written))
    )
    assert_reported(found, Level.WARNING, (f"{limit_s:g} s", "run it again"))
    wait_until_gone(pids_in(written)[0])


def test_cards_that_are_left_out_are_warnings_and_a_driver_that_fails_is_a_fault(broken):
    broken.laid_out.install_nvidia_smi("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert_reported(broken.diagnose("driver"), Level.FAULT, ("nvidia-smi", "kernel module", "restart the machine"))
    broken.laid_out.put_gpu_on_bus("0000:03:00.0", "0x120000", vendor=AMD)  # as an Instinct is classed
    broken.install_gpu(mode="Prohibited")
    amd, prohibited = ("1 AMD GPU", "0000:03:00.0", "not supported"), ("GPU 0", "Prohibited", "sudo nvidia-smi -c 0")
    assert_reported(broken.diagnose("driver"), Level.WARNING, amd, prohibited)
    broken.environment["CUDA_VISIBLE_DEVICES"] = ""
    broken.install_gpu()
    hidden = broken.diagnose("driver")
    assert_reported(hidden, Level.WARNING, ("CUDA_VISIBLE_DEVICES= hides GPU 0",))


def test_compiled_libraries_that_do_not_load_with_this_torch(broken, tmp_path, monkeypatch):
    """An undefined symbol, and an import that ends the process; a fault where there is a GPU."""
    problem = "flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationESs"
    for package in ("flash-attn", "transformer-engine"):
        add_package(tmp_path / "installed", package, "9.9.9")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    broken.add_module("flash_attn", f"raise ImportError({problem!r})")
    broken.add_module("transformer_engine.pytorch", "import os; os.abort()")
    facts = (
        ("flash-attn 9.9.9", "2.13.0+cu130", f"ImportError: {problem}", "--no-build-isolation --no-cache-dir "),
        ("transformer-engine 9.9.9", "2.13.0+cu130", f"signal {signal.SIGABRT:d}"),
    )
    assert_reported(broken.diagnose("compiled-libraries", torch=CUDA_13), Level.WARNING, *facts)
    for module in ("flash_attn", "bitsandbytes"):
        broken.add_module(module, "")
    broken.install_gpu()
    found = broken.diagnose("compiled-libraries", torch=CUDA_13)
    assert_reported(found, Level.FAULT, facts[1])
    assert reported(found, Level.FINE)[0][0].startswith("flash-attn 9.9.9")
    found = diagnosis_of(check_compiled(broken.read(), timeout_s=0.001))  # as from a cold network disk
    late = {sentence.split()[0] for sentence, _ in reported(found, Level.WARNING) if "0.001 s" in sentence}
    assert found.num_faults == 0 and {"flash-attn", "transformer-engine"} <= late, "slow is no fault"


def test_processes_that_cannot_meet(broken, monkeypatch):
    """A real all-gather of two processes, over an interface that is not there."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch0")
    torch = replace(CUDA_13, version="2.13.0+cpu", cuda=None, devices=())
    found = broken.diagnose("collective", torch=torch)
    assert_reported(found, Level.FAULT, ("all-gather", "2 devices", "nonesuch0", "GLOO_SOCKET_IFNAME=lo"))
