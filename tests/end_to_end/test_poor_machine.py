"""Machines that lack something: a run there ends as the documentation states, and can be continued on a sound one."""

import os
from pathlib import Path
from typing import NamedTuple

import pytest
from kill_factory import Count, losses
from outcome_file import FAULTS
from workplace_factory import Workplace, make_workplace

from shardwise.trainer.spec.errors import ExitCode

JOB = {"train": {"steps": 6}, "checkpoint": {"every": "2 steps"}, "eval": {"every": "1000 steps"}}


# Every two seconds the clock that Python reads is another day: today, tomorrow, yesterday.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
static int (*real)(clockid_t, struct timespec *);
int clock_gettime(clockid_t id, struct timespec *now) {
    static const long offsets[] = {0, 86400, -86400};
    struct timespec up;
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, now);
    real(CLOCK_MONOTONIC, &up);
    if (id == CLOCK_REALTIME && code == 0) now->tv_sec += offsets[up.tv_sec / 2 % 3];
    return code;
}
"""


class Poor(NamedTuple):
    """A condition, made by a shell before the command is executed in it."""

    shell: str = ""
    needs_root: bool = False  # mounts in a namespace of its own
    ends: frozenset[int] = frozenset({0})  # possible exit codes


REFUSED = frozenset({int(ExitCode.ENVIRONMENT)})
ENDS = REFUSED | {0, int(ExitCode.OUT_OF_MEMORY)}
CONDITIONS = {
    "no HOME": Poor("unset HOME"),
    "HOME is a file": Poor('touch "$HOME"'),
    "HOME cannot be written": Poor('mkdir -p "$HOME"; mount -t tmpfs -o ro none "$HOME"', needs_root=True),
    "no cache can be written": Poor(
        'mkdir -p "$SHARDWISE_CACHE"; mount -t tmpfs -o ro none "$SHARDWISE_CACHE"', needs_root=True, ends=REFUSED
    ),
    "runs cannot be written": Poor("mkdir runs; mount -t tmpfs -o ro none runs", needs_root=True, ends=REFUSED),
    "/dev/shm of 16 KiB": Poor("mount -t tmpfs -o size=16k none /dev/shm", needs_root=True),
    "/dev/shm cannot be written": Poor("mount -t tmpfs -o ro none /dev/shm", needs_root=True),
    "ulimit -n 64": Poor("ulimit -n 64", ends=ENDS),
    "ulimit -n 24": Poor("ulimit -n 24", ends=ENDS),
    "ulimit -f 8 KiB": Poor("ulimit -f 16", ends=ENDS),
    "ulimit -f 512 KiB": Poor("ulimit -f 1024", ends=ENDS),
    "ulimit -v 1 GiB": Poor("ulimit -v 1048576", ends=ENDS),
    "ulimit -v 512 MiB": Poor("ulimit -v 524288", ends=ENDS),
}
CONDITIONS["the clock is set back and forth"] = Poor(
    'printf "%s" "$CLOCK" | cc -shared -fPIC -x c -o clock.so - -ldl; export LD_PRELOAD="$PWD/clock.so"'
)
THINNED = ("HOME is a file", "ulimit -f 8 KiB", "ulimit -n 64")
COLD = [name for name in CONDITIONS if "-v" in name]  # a fork of a large process has more already


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    place = make_workplace(tmp_path_factory.mktemp("sound") / "work place")
    place.write_job(**JOB)
    place.run("train", "job.yaml")
    return losses(place.only_run())


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [
        *([] if name in THINNED else [pytest.mark.long, pytest.mark.kills]),
        *([pytest.mark.cold] if name in COLD else []),
    ]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CONDITIONS])
def test_a_machine_that_lacks_something_costs_nothing_that_was_saved(workplace, straight, name, record_property):
    place: Workplace = workplace
    condition, count = CONDITIONS[name], Count(tried=1)
    if condition.needs_root and os.geteuid() != 0:
        pytest.skip("mounting needs root (run the tests in a container)")
    place.write_job(**JOB)
    unshared = ["unshare", "--mount", "--propagation", "private"] if condition.needs_root else []
    command = [*unshared, "sh", "-c", f'{condition.shell}; exec "$@"', "sh", *place.command("train", "job.yaml")]
    answer = place._replace(environment={**place.environment, "CLOCK": CLOCK}).execute(*command)
    text = answer.stdout + answer.stderr
    count.tracebacks = int("Traceback" in text)
    assert not count.tracebacks and answer.returncode in condition.ends, f"exit code {answer.returncode}\n{text}"
    if answer.returncode:
        assert text.strip()
        has_run = any((place.folder / "runs").glob("*/plan.json"))
        home = Path(place.environment["HOME"])
        if home.is_file():
            home.unlink()
        place.run("train", "job.yaml", *(["--resume"] if has_run else []))
    runs = [path for path in (place.folder / "runs").iterdir() if (path / "metrics.jsonl").is_file()]
    assert len(runs) == 1
    assert losses(runs[0]) == pytest.approx(straight, abs=1e-5), "as exact as a fallback is"
    count.survived = 1
    record_property(FAULTS, {name: count.row()})
