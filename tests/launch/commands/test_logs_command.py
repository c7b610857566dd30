"""`shardwise logs`: the right file, its end, and its growth over attempts until the run ends."""

import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from run_factory import write_attempt, write_report, write_start, write_submission

from shardwise.launch.commands.follow import run_logs
from shardwise.launch.options import LogsOptions
from shardwise.launch.rundir.files import last_lines
from shardwise.launch.rundir.lock import locked
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.errors import ExitCode, InputError
from shardwise.trainer.spec.report import Ending

NO_SLURM = {"PATH": "/nonexistent"}


def logs(**options: object) -> list[str]:
    out = io.StringIO()
    assert run_logs(LogsOptions(**options), Console(out), environment=NO_SLURM) is ExitCode.DONE  # type: ignore[arg-type] # by name
    return out.getvalue().splitlines()


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_attempt(tmp_path / "runs" / "one", steps=range(1, 101))
    return Path("runs/one")


def test_without_slurm_rank_0_of_the_newest_attempt_is_shown(run_dir: Path):
    write_attempt(run_dir, 2, steps=[100, 101])
    assert logs(run=str(run_dir)) == [
        "==> runs/one/attempts/2/logs/rank-0.log <==",
        "rank 0 did step 100",
        "rank 0 did step 101",
    ]
    assert logs(attempt=1, num_lines=1)[1:] == ["rank 0 did step 100"], "of the newest run"


def test_the_output_of_slurm_comes_first_and_the_last_words_of_launchers_and_agents_after(run_dir: Path):
    write_submission(run_dir, "12")
    write_start(run_dir, "12")
    (run_dir / "slurm-12.out").write_text("planning\ntraining\n")
    folder = run_dir / "attempts" / "1" / "logs"
    (folder / "launcher.log").write_text("\n")
    (folder / "launcher-1.log").write_text("".join(f"word {number}\n" for number in range(20)))
    (folder / "agents.log").write_text("srun: error: Node failure on n2\n")
    assert logs(run=str(run_dir)) == [
        "==> runs/one/slurm-12.out <==",
        "planning",
        "training",
        "==> runs/one/attempts/1/logs/launcher-1.log <==",
        *(f"word {number}" for number in range(15, 20)),
        "==> runs/one/attempts/1/logs/agents.log <==",
        "srun: error: Node failure on n2",
    ]
    assert logs(run=str(run_dir), rank=0, num_lines=2)[0] == "==> runs/one/attempts/1/logs/rank-0.log <=="


class Followed:
    """A console that tells when a line has come."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str = "") -> None:
        self.lines.append(text)

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while not any(text in line for line in self.lines):
            assert time.monotonic() < deadline, f"{text} did not come: {self.lines}"
            time.sleep(0.01)


@contextmanager
def following(run_dir: Path, **options: object) -> Iterator[tuple[Followed, Callable[[], ExitCode]]]:
    """`logs --follow` in a thread; joins it at the end."""
    console, codes = Followed(), []

    def run() -> None:
        wanted = LogsOptions(run=str(run_dir), follow=True, **options)  # type: ignore[arg-type] # by name
        codes.append(run_logs(wanted, console, environment=NO_SLURM, look_s=0.01, query_s=0.05))  # type: ignore[arg-type] # has `line`

    def end() -> ExitCode:
        thread.join(60)
        assert not thread.is_alive()
        return codes[0]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield console, end


def test_new_lines_are_followed_over_attempts_to_the_end_of_the_run(run_dir: Path):
    with locked(run_dir), following(run_dir, num_lines=1) as (console, end):
        console.wait_for("did step 100")
        with (run_dir / "attempts" / "1" / "logs" / "rank-0.log").open("a") as log:
            log.write("one more\n")
        console.wait_for("one more")
        write_report(run_dir, Ending.FAILED)
        write_attempt(run_dir, 2, steps=[101])
        console.wait_for("did step 101")
        write_report(run_dir, Ending.FINISHED, attempt=2, step=101)
        time.sleep(0.1)
        assert not any("finished" in line for line in console.lines), "it is still supervised"
    assert end() is ExitCode.DONE
    assert console.lines[-1] == "runs/one: finished at step 101"
    assert "rank 0 did step 99" not in console.lines, "only the last line of what was there"
    assert console.lines.count("rank 0 did step 101") == 1


def test_last_lines_are_found_however_long_they_are(tmp_path: Path):
    path = tmp_path / "log"
    path.write_text("".join(f"{number} {'x' * 2000}\n" for number in range(100)))
    assert [line.split()[0] for line in last_lines(path, 60)] == [str(number) for number in range(40, 100)]
    assert len(last_lines(path, 500)) == 100 and last_lines(path, 0) == []


@pytest.mark.parametrize(
    ("options", "facts"),
    [({"attempt": 3}, r"--attempt 3: runs/one .* 1$"), ({"rank": 8}, r"--rank 8: attempt 1 .*0 to 0")],
)
def test_what_there_is_not_is_said(run_dir: Path, options, facts):
    with pytest.raises(InputError, match=facts):
        logs(run=str(run_dir), **options)
