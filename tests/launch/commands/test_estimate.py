"""`shardwise estimate` as a program: streams, broken lines, exit codes."""

import json
import subprocess
import sys
from itertools import cycle, islice
from pathlib import Path
from threading import Thread

from shardwise.launch.commands.estimate import MAX_LINE_BYTES
from shardwise.trainer.spec.errors import ExitCode

REPOSITORY = Path(__file__).parents[3]
PROGRAM = [sys.executable, "-m", "shardwise.launch.cli", "estimate"]
CASES = [
    json.loads(line)["case"] for line in (REPOSITORY / "benchmarks" / "measured_public.jsonl").read_text().splitlines()
]
CASE = CASES[0]
UNNAMED = {key: value for key, value in CASES[-1].items() if key != "model"}


def numbered(num_cases):
    """Cases of many models, machines and settings, each with an id of its own."""
    for number, case in enumerate(islice(cycle(CASES), num_cases)):
        yield {**case, "id": f"case {number}", "train": {**case["train"], "seq_len": 128 + number}}


def estimate(lines, *, path="-", cwd=REPOSITORY):
    """Exit code and answers to `lines`, each bytes or a value."""
    content = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    done = subprocess.run(
        [*PROGRAM, str(path)], input=content, cwd=cwd, capture_output=True, check=False, env=_environment()
    )
    assert done.stderr == b"", done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def _environment():
    """Without PYTHONUNBUFFERED, which would flush for us."""
    return {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}


BROKEN = [
    (b"{\n", None, "not JSON"),
    (b"[" * 100_000 + b"\n", None, "not JSON"),
    (b"3\n", None, "JSON object"),
    (b"{}\n", None, "id "),
    (b"x" * (2 * MAX_LINE_BYTES + 7) + b"\n", None, "4 MiB"),
    ({"id": "no model"}, "no model", "model "),
    ({**CASE, "id": "foreign", "colour": 1}, "foreign", "colour"),
    ({**UNNAMED, "id": "who", "name": "no-such-preset"}, "who", "no-such-preset"),
    ({**CASE, "id": "two", "name": "llama-3.1-8b"}, "two", "model and name"),
]


def test_a_line_that_cannot_be_answered_is_answered_all_the_same():
    """One run over all of them, each between two good cases."""
    code, answers = estimate([CASE, *(line for broken, _, _ in BROKEN for line in (broken, CASE))])
    assert code == ExitCode.INPUT and len(answers) == 2 * len(BROKEN) + 1
    for (_, identity, fact), answer in zip(BROKEN, answers[1::2], strict=True):
        assert answer["id"] == identity and fact in answer["error"] and "\n" not in answer["error"]
    assert all(answer == answers[0] for answer in answers[::2]) and answers[0]["id"] == CASE["id"]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    done = subprocess.run(
        [*PROGRAM, str(tmp_path / "none.jsonl")], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == ExitCode.INPUT and f"{tmp_path}/none.jsonl" in done.stderr


def test_a_program_that_waits_for_each_answer_gets_it():
    with subprocess.Popen(
        [*PROGRAM, "-"], cwd=REPOSITORY, env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        for case in numbered(5):
            process.stdin.write(json.dumps(case).encode() + b"\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == case["id"]
        process.stdin.close()
        assert process.wait() == ExitCode.DONE


def test_a_reader_that_leaves_early_ends_the_run_quietly():
    with subprocess.Popen(
        [*PROGRAM, "-"],
        bufsize=0,
        cwd=REPOSITORY,
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        writer = Thread(target=_write_all, args=(process.stdin, numbered(2000)))
        writer.start()
        assert json.loads(process.stdout.readline())["id"] == "case 0"
        process.stdout.close()
        writer.join()
        assert process.stderr.read() == b""
        assert process.wait() == ExitCode.DONE


def _write_all(stream, cases):
    try:
        for case in cases:
            stream.write(json.dumps(case).encode() + b"\n")
        stream.close()
    except BrokenPipeError:
        pass


# Not ru_maxrss, which a process has from the one that started it.
MEASURED = """
import re, sys
from pathlib import Path
from shardwise.launch.commands.estimate import run_estimate
from shardwise.launch.options import EstimateOptions
from shardwise.launch.terminal import Console
run_estimate(EstimateOptions(Path("-")), Console())
print(re.search("VmHWM:(.*)kB", Path("/proc/self/status").read_text())[1], file=sys.stderr)
"""


def _peak_kib(num_cases):
    with subprocess.Popen(
        [sys.executable, "-c", MEASURED],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        _write_all(process.stdin, numbered(num_cases))
        return int(process.stderr.read())


def test_ten_times_the_cases_take_the_same_memory():
    few, many = _peak_kib(300), _peak_kib(3000)
    assert many < few + 2048
