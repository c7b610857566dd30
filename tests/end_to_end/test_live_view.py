"""A real run on a pseudo terminal, watched from another process while it goes on."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios

from small_terminal import SmallTerminal
from workplace_factory import LIMIT_S, Workplace, wait_for

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.report import Ending, Report


def read_all(master: int) -> str:
    content = b""
    while True:
        try:
            more = os.read(master, 65536)
        except OSError:
            more = b""
        if not more:
            os.close(master)
            return content.decode().replace("\r\n", "\n")
        content += more


def test_a_run_and_its_watcher_show_the_same_on_terminals(workplace: Workplace) -> None:
    workplace.write_job(train={"steps": 40}, eval={"every": "20 steps"})
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    others = ("CI", "NO_COLOR", "LC_ALL")
    environment = {name: value for name, value in workplace.environment.items() if name not in others}
    with subprocess.Popen(
        workplace.command("train", "job.yaml"), cwd=workplace.folder, stdin=slave, stdout=slave, stderr=slave,
        env={**environment, "TERM": "xterm-256color", "LANG": "C.UTF-8"}, start_new_session=True,
    ) as process:  # fmt: skip
        os.close(slave)
        wait_for(lambda: list(workplace.folder.glob("runs/*/plan.json")), "the run directory")
        run_dir = workplace.only_run()
        with subprocess.Popen(
            workplace.command("watch", run_dir, "--json"),
            cwd=workplace.folder, env=workplace.environment, stdout=subprocess.PIPE, text=True,
        ) as watcher:  # fmt: skip
            text = read_all(master)
            assert process.wait(timeout=LIMIT_S) == 0, text
            told = [json.loads(line) for line in watcher.communicate(timeout=LIMIT_S)[0].splitlines()]
    assert codec.read(run_dir / "report.json", Report).ending is Ending.FINISHED

    terminal = SmallTerminal(columns=10_000)  # the plan above has longer lines, which a terminal wraps
    terminal.write(text.partition("verified:")[0])  # what follows quotes the model, which may say anything
    lines = terminal.lines
    (begin,) = [place for place, line in enumerate(lines) if line.startswith(f"{run_dir.name}: ")]  # redrawn in place
    block = lines[begin : begin + 6]
    assert block[0] == f"{run_dir.name}: finished, step 40 of 40"
    assert block[1] == f"progress   {'█' * 32}  100%"
    assert re.match(r"loss       [▁-█]{32}  \d\.\d{4}, held out \d\.\d{4}, learning rate", block[2])
    assert block[3].startswith("speed      ") and "% of the predicted" in block[3]
    assert block[4].startswith("memory     ") and "RAM, tensors " in block[4] and ", predicted " in block[4]
    assert block[5] == "incidents  none"
    above, below = lines[:begin], lines[begin + 6 :]
    assert any("(none/" in line for line in above) and any("finished at step 40" in line for line in below)
    assert [line for line in above if "held-out loss" in line][-1].startswith("step 40: held-out loss")
    assert "\x1b[36m" in text

    assert watcher.returncode == 0
    assert told[0]["kind"] == "state" and told[-1]["state"] == "finished" and told[-1]["has_ended"]
    steps = [line["step"] for line in told if line["kind"] == "step"]
    assert steps == list(range(41 - len(steps), 41)), "each step once"
    assert {"starting", "running", "finished"} >= {line["state"] for line in told if line["kind"] == "state"}
