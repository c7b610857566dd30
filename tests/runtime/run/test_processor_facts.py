"""What DeepSpeed asks py-cpuinfo for is answered without it, and comes to the same."""

import json
import os
import platform
import subprocess
import sys

import pytest
from captured_machine import captured

from shardwise.trainer.runtime.run.operators import PROCESSORS, read_processor

TIMEOUT_S = 120

# What DeepSpeed finds for its operators, and how often the machine was asked for it: by itself, and with our answers.
ASK = """
import json
import cpuinfo
asked, ask = [], cpuinfo.get_cpu_info
def counted():
    asked.append(None)
    return ask()
cpuinfo.get_cpu_info = counted
from deepspeed.ops.op_builder import CPUAdamBuilder
from shardwise.trainer.runtime.run.operators import answer_for_processor

def answer():
    asked.clear()
    builder = CPUAdamBuilder()
    return [builder.cpu_arch(), builder.simd_width(), cpuinfo.get_cpu_info().get("vendor_id_raw"), len(asked)]

plain = answer()
answer_for_processor()
print("answers:" + json.dumps([plain, answer()]))
"""


@pytest.fixture(scope="module")
def answers():
    done = subprocess.run(
        [sys.executable, "-c", ASK], env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("answers:"))[len("answers:") :])


def test_w53_deepspeed_asks_for_the_same_processor_each_time(answers):
    assert answers[0][-1] == 3  # once for the architecture, once for the flags; the third is this test's


def test_deepspeed_finds_the_same_without_asking_the_machine(answers):
    (*plain, _), (*answered, asked) = answers
    assert answered == plain
    assert asked == (1 if read_processor(PROCESSORS.read_text(), platform.machine()) is None else 0)


def test_the_first_processor_of_an_x86_machine_says_it_all():
    facts = read_processor(captured("rtx4090_desktop", "cpuinfo"), "x86_64")
    assert facts["arch"] == "X86_64"
    assert facts["vendor_id_raw"] in ("GenuineIntel", "AuthenticAMD")
    assert "avx2" in facts["flags"]


@pytest.mark.parametrize(
    ("text", "machine"),
    [
        pytest.param("", "x86_64", id="nothing"),
        pytest.param("processor\t: 0\nflags\t\t: fpu avx2\n", "x86_64", id="no_vendor"),
        pytest.param("vendor_id\t: GenuineIntel\n", "x86_64", id="no_flags"),
        pytest.param("processor\t: 0\nFeatures\t: fp asimd sve\n", "aarch64", id="arm"),
    ],
)
def test_a_machine_that_does_not_say_so_is_asked(text, machine):
    assert read_processor(text, machine) is None
