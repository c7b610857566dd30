"""`shardwise estimate` as a program: streams, broken lines, exit codes."""

import json
import subprocess
import sys
from itertools import cycle, islice
from pathlib import Path
from threading import Thread
from typing import Any

from shardwise.launch.commands.estimate import MAX_LINE_BYTES
from shardwise.trainer.spec.errors import ExitCode

REPOSITORY = Path(__file__).parents[3]
ESTIMATE = ("-m", "shardwise.launch.cli", "estimate", "-")
CASES = [
    json.loads(line)["case"] for line in (REPOSITORY / "benchmarks" / "measured_public.jsonl").read_text().splitlines()
]
CASE = CASES[0]
UNNAMED = {key: value for key, value in CASES[-1].items() if key != "model"}


def numbered(num_cases):
    """Cases of many models, machines and settings, each with an id of its own."""
    for number, case in enumerate(islice(cycle(CASES), num_cases)):
        yield {**case, "id": f"case {number}", "train": {**case["train"], "seq_len": 128 + number}}


def started(*words):
    """Python with these words, without PYTHONUNBUFFERED, which would flush for us."""
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}
    streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, *words], bufsize=0, cwd=REPOSITORY, env=environment, **streams)


def line_of(case):
    return json.dumps(case).encode() + b"\n"


def write_all(stream, cases):
    try:
        for case in cases:
            stream.write(line_of(case))
        stream.close()
    except BrokenPipeError:
        pass


BROKEN = [
    (b"{\n", None, "not JSON"),
    (b"[" * 100_000 + b"\n", None, "not JSON"),
    (b"3\n", None, "JSON object"),
    (b"{}\n", None, "id "),
    (b"x" * (2 * MAX_LINE_BYTES + 7) + b"\n", None, "4 MiB"),
    (line_of({"id": "no model"}), "no model", "model "),
    (line_of({**CASE, "id": "foreign", "colour": 1}), "foreign", "colour"),
    (line_of({**UNNAMED, "id": "who", "name": "no-such-preset"}), "who", "no-such-preset"),
    (line_of({**CASE, "id": "two", "name": "llama-3.1-8b"}), "two", "model and name"),
]


def test_a_line_that_cannot_be_answered_is_answered_all_the_same():
    """One run over all of them, each between two good cases."""
    good = line_of(CASE)
    with started(*ESTIMATE) as process:
        out, err = process.communicate(good + b"".join(broken + good for broken, _, _ in BROKEN))
    answers = [json.loads(line) for line in out.splitlines()]
    assert (process.returncode, err, len(answers)) == (ExitCode.INPUT, b"", 2 * len(BROKEN) + 1)
    for (_, identity, fact), answer in zip(BROKEN, answers[1::2], strict=True):
        assert answer["id"] == identity and fact in answer["error"] and "\n" not in answer["error"]
    assert all(answer == answers[0] for answer in answers[::2]) and answers[0]["id"] == CASE["id"]


def test_a_program_that_waits_for_each_answer_gets_it():
    with started(*ESTIMATE) as process:
        for case in numbered(5):
            process.stdin.write(line_of(case))
            assert json.loads(process.stdout.readline())["id"] == case["id"]
        process.stdin.close()
        assert process.wait() == ExitCode.DONE


def test_a_reader_that_leaves_early_ends_the_run_quietly():
    with started(*ESTIMATE) as process:
        writer = Thread(target=write_all, args=(process.stdin, numbered(2000)))
        writer.start()
        assert json.loads(process.stdout.readline())["id"] == "case 0"
        process.stdout.close()
        writer.join()
        assert process.stderr.read() == b""
        assert process.wait() == ExitCode.DONE


# Not ru_maxrss, which a process has from the one that started it.
MEASURED = """
import re, sys
from pathlib import Path
from shardwise.launch.commands.estimate import run_estimate
from shardwise.launch.options import EstimateOptions
from shardwise.launch.terminal import Console
sys.stdout = open("/dev/null", "w")
run_estimate(EstimateOptions(Path("-")), Console())
print(re.search("VmHWM:(.*)kB", Path("/proc/self/status").read_text())[1], file=sys.stderr)
"""


def peak_kib(num_cases):
    with started("-c", MEASURED) as process:
        write_all(process.stdin, numbered(num_cases))
        return int(process.stderr.read())


def test_ten_times_the_cases_take_the_same_memory():
    few, many = peak_kib(300), peak_kib(3000)
    assert many < few + 2048
