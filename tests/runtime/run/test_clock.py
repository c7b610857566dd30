"""Counters of the machine: of a driver's library that a test compiles, of disks, and of machines without either."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from shardwise.trainer.runtime.run import clock

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
ASK = """
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
    """Queries the driver in a process of its own."""
    (folder / "nvml.c").write_text(library)
    compiler, name = os.environ.get("CC", "cc"), "libnvidia-ml.so.1"
    driver = folder / name
    subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", driver, folder / "nvml.c"], check=True)
    return subprocess.run(
        [sys.executable, "-c", ASK.format(uuid=uuid, driver=str(driver))], capture_output=True, text=True, timeout=120,
        check=False,
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


@pytest.mark.parametrize(
    ("bits", "names"),
    [(None, None), (0, None), (0x1, None), (0x4, "power cap"), (0x48, "hardware slowdown, hardware temperature")],
)
def test_only_what_holds_clocks_down_is_a_throttle(bits, names):
    assert clock.throttle_reasons(bits) == names


def test_traffic_is_what_the_disk_was_given_since_the_last_look():
    traffic = clock.Traffic()
    assert traffic.since_last() is not None
    with tempfile.TemporaryFile(dir=Path(__file__).parent) as stream:  # temporary folders may lie in memory
        stream.write(os.urandom(2**20))
        os.fsync(stream.fileno())
    deadline = time.monotonic() + 10
    written = 0
    while written < 2**20 and time.monotonic() < deadline:
        found = traffic.since_last()
        assert found is not None
        written += found[1]
    assert 2**20 <= written < 2**22
    found = traffic.since_last()
    assert found is not None and found[1] < 2**20, "reported once"


def test_without_cuda_nothing_is_pinned_and_no_card_is_queried():
    before = threading.active_count()
    with clock.CardWatch(torch.device("cpu")).watching() as watch:
        assert threading.active_count() == before and watch.newest == clock.CardSample()
    assert clock.pinned_bytes() is None


def test_the_time_in_which_threads_wait_for_a_core_is_counted():
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not count it (CONFIG_SCHED_INFO)")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # of this thread, and of the programs that it starts
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(3)]
    try:
        queue, begin_s = clock.CoreQueue(), time.thread_time()
        while time.thread_time() < begin_s + 0.3:
            pass
        share = queue.share
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.wait()
    assert share is not None and share > 0.4
    idle = clock.CoreQueue()
    time.sleep(0.2)
    assert idle.share is not None and idle.share < 0.4, "a process that sleeps waits for no core"
