"""What libraries get: built operators, the processor that /proc names; and the counters of a card's driver."""

import ctypes
import json
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_machine import captured
from operator_cache import folder_with_operators
from programs import printed_by

from shardwise.trainer.runtime.run import clock
from shardwise.trainer.runtime.run.operators import PROCESSORS, joined_sources, marker, read_processor

# Loads DeepSpeed's CPU Adam, with ours or without, and prints how often a compiler's driver was run.
LOAD = """
import json
from pathlib import Path
import torch.utils.cpp_extension as cpp_extension
from shardwise.trainer.runtime.run.operators import mark_loaded
asked, load = [], cpp_extension.load
def counted(*args, **kwargs):
    asked.append(None)
    return load(*args, **kwargs)
cpp_extension.load = counted
{before}
from deepspeed.ops.op_builder import CPUAdamBuilder
module = CPUAdamBuilder().load(verbose=False)
again = CPUAdamBuilder().load(verbose=False)
mark_loaded(Path({folder!r}))
print("answer:" + json.dumps([len(asked), again is module, hasattr(module, "create_adam")]))
"""
OURS = "from shardwise.trainer.runtime.run.operators import use_built_operators as use; use(); use()"
PLAIN = "from shardwise.trainer.runtime.run.operators import omit_debug_symbols; omit_debug_symbols()"


def result_of(program: str, **environment: str) -> Any:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    printed = printed_by("-c", program, **{"DS_ACCELERATOR": "cpu", "PATH": path, **environment})
    line = next(line for line in printed.splitlines() if line.startswith("answer:"))
    return json.loads(line.removeprefix("answer:"))


@pytest.mark.parametrize(("before", "num_runs"), [(PLAIN, 1), (OURS, 0)], ids=["deepspeed", "ours"])
def test_w56_deepspeed_runs_the_compiler_for_an_operator_that_is_built_and_we_do_not(before, num_runs, tmp_path):
    """Each way an operator that was loaded is marked where its library is."""
    library, program = tmp_path / "cpu_adam" / "cpu_adam.so", LOAD.format(before=before, folder=str(tmp_path))
    library.parent.mkdir()
    library.touch()
    found = result_of(program, TORCH_EXTENSIONS_DIR=str(folder_with_operators("cpu_adam")))
    assert found == [num_runs, True, True]
    assert marker(tmp_path, "cpu_adam").is_file()


def test_sources_of_one_folder_are_one_in_which_a_header_counts_once(tmp_path):
    """As DeepSpeed's: the headers are without guards, and what is next to a source is found from it."""
    package, folder = tmp_path / "package", tmp_path / "joined"
    for name, text in {
        "csrc/many/shape.h": "struct Shape { int size; };\n",
        "csrc/few/other.cpp": '#include "../many/shape.h"\nint other() { return Shape{1}.size; }\n',
        **{
            f"csrc/many/{each}.cpp": f'#include "shape.h"\nint {each}() {{ return Shape{{2}}.size; }}\n'
            for each in "abcd"
        },
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    sources = ["csrc/few/other.cpp", *(f"csrc/many/{each}.cpp" for each in "abcd")]
    joined = joined_sources(sources, package, folder)
    assert joined == ["csrc/few/other.cpp", str(folder / "csrc" / "many" / "joined.cpp")]
    subprocess.run(["c++", "-shared", "-fPIC", joined[1], "-o", str(tmp_path / "joined.so")], check=True)
    assert [getattr(ctypes.CDLL(str(tmp_path / "joined.so")), f"_Z1{each}v")() for each in "abcd"] == [2] * 4
    assert joined_sources(sources[:4], package, tmp_path / "none") == sources[:4]


# What DeepSpeed finds for its operators, and how often the machine was queried: by itself, and with our facts.
ASK = """
import json
import cpuinfo
asked, ask = [], cpuinfo.get_cpu_info
def counted():
    asked.append(None)
    return ask()
cpuinfo.get_cpu_info = counted
from deepspeed.ops.op_builder import CPUAdamBuilder
from shardwise.trainer.runtime.run.operators import read_processor_from_proc

def answer():
    asked.clear()
    builder = CPUAdamBuilder()
    return [builder.cpu_arch(), builder.simd_width(), cpuinfo.get_cpu_info().get("vendor_id_raw"), len(asked)]

plain = answer()
read_processor_from_proc()
print("answer:" + json.dumps([plain, answer()]))
"""


@pytest.mark.long
@pytest.mark.products
def test_w53_deepspeed_reads_the_processor_each_time():
    (*plain, num_queries_before), (*cached, num_queries) = result_of(ASK)
    assert num_queries_before == 3  # once for the architecture, once for the flags; the third is this test's
    assert cached == plain
    assert num_queries == (1 if read_processor(PROCESSORS.read_text(), platform.machine()) is None else 0)


def test_the_first_processor_of_an_x86_machine_has_all_facts_and_others_are_queried():
    facts = read_processor(captured("rtx4090_desktop", "cpuinfo"), "x86_64")
    assert facts["arch"] == "X86_64" and "avx2" in facts["flags"]
    assert facts["vendor_id_raw"] in ("GenuineIntel", "AuthenticAMD")
    for text, machine in (
        ("", "x86_64"),
        ("processor\t: 0\nflags\t\t: fpu avx2\n", "x86_64"),
        ("vendor_id\t: GenuineIntel\n", "x86_64"),
        ("processor\t: 0\nFeatures\t: fp asimd sve\n", "aarch64"),
    ):
        assert read_processor(text, machine) is None


FP16 = """
import json
import deepspeed.accelerator
from engine_plan_factory import engine_plan
from shardwise.trainer.runtime.precision.mixed_precision import install_precision
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.strategy import Precision
plan = engine_plan(Sharding.ZERO2, precision=Precision.FP16_MIXED, num_ranks=2)
try:
    install_precision(None, None, plan.chosen, plan.device_kind)
except InputError as error:
    print("answer:" + json.dumps(str(error)))
"""


def test_deepspeed_needs_fp16_units_on_a_cpu():
    """The limit of oneDNN hides the units that this CPU may have."""
    factories = str(Path(__file__).parents[2] / "factories")
    refused = result_of(FP16, ONEDNN_MAX_CPU_ISA="AVX2", PYTHONPATH=factories)
    assert refused.startswith("pin.precision") and "avx512_fp16" in refused


LIBRARY = """
#include <string.h>
typedef struct { unsigned gpu, memory; } Rates;
typedef struct { unsigned long long total, free, used; } Memory;
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "no"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = (void *)1;
    return strcmp(uuid, "GPU-5d1a4b2e-0000-1111-2222-333344445555") ? 6 : 0; /* NVML_ERROR_NOT_FOUND */
}
int nvmlDeviceGetUtilizationRates(void *device, Rates *rates) { rates->gpu = 87; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) { memory->used = 12345678; return 0; }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *value) { *value = 66; return 0; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *value) { *value = 312500; return 0; }
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *bits) { *bits = 0x24; return 0; }
"""
ASK_CARD = """
import ctypes, json, threading
ctypes.CDLL({driver!r})  # found from here on by its name, as one that is installed is
from msgspec import to_builtins
from shardwise.trainer.runtime.run.clock import card_samples
stop = threading.Event()
samples = card_samples("{uuid}", stop, every_s=0.0)
first = next(samples)
stop.set()
assert list(samples) == []
print(json.dumps(to_builtins(first)))
"""


def query(folder: Path, uuid: str, *, library: str = LIBRARY) -> "subprocess.CompletedProcess[str]":
    (folder / "nvml.c").write_text(library)
    compiler, name = os.environ.get("CC", "cc"), "libnvidia-ml.so.1"
    driver = folder / name
    subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", driver, folder / "nvml.c"], check=True)
    return subprocess.run(
        [sys.executable, "-c", ASK_CARD.format(uuid=uuid, driver=str(driver))], capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def test_a_card_reports_its_counters(tmp_path: Path):
    found = query(tmp_path, "5d1a4b2e-0000-1111-2222-333344445555")  # as torch has it
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == {
        "utilization": 0.87, "power_w": 312.5, "temperature_c": 66, "throttle": "power cap, temperature",
        "used_bytes": 12345678,
    }  # fmt: skip


def test_an_older_driver_and_a_card_that_lacks_a_counter_report_the_others(tmp_path: Path):
    no_power = LIBRARY.replace("*value = 312500; return 0;", "return 3; /* not supported */")
    for name, throttle in (("ThrottleReasons", "power cap, temperature"), ("NoReasons", None)):
        older = no_power.replace("EventReasons", name)
        found = json.loads(query(tmp_path, "5d1a4b2e-0000-1111-2222-333344445555", library=older).stdout)
        assert found["power_w"] is None and found["throttle"] == throttle and found["temperature_c"] == 66


def test_a_card_that_is_not_there_ends_the_thread_and_nothing_else(tmp_path: Path):
    assert "NVMLError_NotFound" in query(tmp_path, "GPU-other").stderr

    watch = clock.CardWatch(torch.device("cpu"))
    thread = threading.Thread(target=watch._sample, args=("GPU-none",))  # without a driver, or without this card
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and watch.newest == clock.CardSample()


def test_a_queue_is_waited_for_once_and_its_time_is_that_of_one_repetition(monkeypatch):
    """The device's time is what its events are apart; the host is waited for where it is the longer."""
    order: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def synchronize(self) -> None:
            order.append("wait")

        def elapsed_time(self, _end: "Event") -> float:
            return 50.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: order.append("ready"))
    seconds = clock.queued_seconds(lambda: order.append("work"), torch.device("cuda"), 0.0)
    assert seconds == pytest.approx(0.005)
    queue = ["event", *["work"] * clock.QUEUED, "event", "wait"]
    assert order == ["work", "ready", *queue * clock.MIN_REPETITIONS]
