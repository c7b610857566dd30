"""kill -9 at any moment of a run, from its first line to its last: it goes on, and loses nothing that was saved."""

import os
import random

import pytest
from kill_factory import VICTIMS, Count, Life, check, kill_and_resume, prepare, reaping_nothing, undisturbed
from workplace_factory import Workplace, make_workplace

NUM_KILLS = int(os.environ.get("SHARDWISE_KILLS", "500"))  # of the long tests, in parts of
KILLS_A_PART, KILLS_A_RUN = 25, 4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    made = make_workplace(tmp_path_factory.mktemp("kills") / "work place")
    prepare(made)
    return made


@pytest.fixture(scope="module")
def life(place: Workplace) -> Life:
    return undisturbed(place)


def kill(place: Workplace, life: Life, num_kills: int, seed: int) -> dict[str, Count]:
    """At least so many kills, of each kind of victim equally many."""
    chance, sums = random.Random(seed), {victim: Count() for victim in VICTIMS}
    number = 0
    with reaping_nothing():
        while sum(each.tried for each in sums.values()) < num_kills:
            victims = sorted(VICTIMS, key=lambda each: (sums[each].tried, chance.random()))[:KILLS_A_RUN]
            chance.shuffle(victims)
            for victim, count in kill_and_resume(place, f"run-{seed}-{number}", victims, life, chance):
                sums[victim].add(count)
            number += 1
    return {f"SIGKILL of {victim.replace('-', ' ')}": count for victim, count in sums.items()}


def test_a_kill_of_each_process_of_a_run_loses_nothing(place, life, record_property):
    check(kill(place, life, len(VICTIMS), seed=1), record_property)


@pytest.mark.long
@pytest.mark.kills
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(2, 2 + -(-NUM_KILLS // KILLS_A_PART)))
def test_five_hundred_kills_of_runs_lose_nothing(place, life, record_property, seed):
    check(kill(place, life, KILLS_A_PART, seed), record_property)


@pytest.mark.cold
@pytest.mark.long
@pytest.mark.kills
def test_no_process_outlives_a_killed_supervisor_where_process_1_does_not_reap(tmp_path, record_property):
    """With new interpreters, whose imports take long: a rank begins when its launcher is dead, and stays in /proc."""
    place = make_workplace(tmp_path / "work place")
    prepare(place)
    life = undisturbed(place)
    with reaping_nothing():
        counts = kill_and_resume(place, "run", ["supervisor"] * 5, life, random.Random(3))
    total = Count()
    for _, count in counts:
        total.add(count)
    check({"SIGKILL of supervisor, new interpreters": total}, record_property)
