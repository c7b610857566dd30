"""What follows a fault: a table of histories and decisions."""

import pytest
from msgspec.structs import replace
from report_factory import make_candidate

from launch.attempt.retries import MAX_RESTARTS, Tried, decide
from trainer.spec.plan import Candidate
from trainer.spec.report import Fault

CANDIDATES = tuple(make_candidate(micro_batch=size) for size in (4, 2, 1))
KILLED, HUNG, ERROR, MEMORY = Fault.KILLED, Fault.HUNG, Fault.ERROR, Fault.OUT_OF_MEMORY


def nothing_in_the_way(_candidate: Candidate) -> str | None:
    return None


def after(*tried: Tried) -> int | None:
    return decide(tried, CANDIDATES, nothing_in_the_way).candidate


@pytest.mark.parametrize("fault", [KILLED, HUNG, ERROR])
def test_a_death_a_hang_and_an_error_are_followed_by_the_same_again(fault: Fault):
    decision = decide([Tried(1, fault, 7, 6)], CANDIDATES, nothing_in_the_way)
    assert decision.candidate == 1 and "step 6" in decision.reason


def test_without_a_checkpoint_it_starts_from_the_beginning():
    assert "beginning" in decide([Tried(0, KILLED, 7, 0)], CANDIDATES, nothing_in_the_way).reason


def test_an_error_that_would_repeat_is_not_retried():
    assert after(Tried(0, ERROR, 7, 6, is_final=True)) is None, "a person has to mend it"
    assert after(Tried(0, ERROR, 0, 0, had_no_chance=True)) is None, "before any step"


def test_an_error_before_the_first_step_of_a_restart_is_tried_again_unless_it_is_the_same():
    first = Tried(0, ERROR, 7, 6, cause="a bug")
    assert after(first, Tried(0, ERROR, 6, 6, cause="another", had_no_chance=True)) == 0
    assert after(first, Tried(0, ERROR, 6, 6, cause="a bug", had_no_chance=True)) is None


def test_a_death_before_the_first_step_is_followed_by_the_same_again():
    assert after(Tried(0, KILLED, 0, 0, had_no_chance=True)) == 0


def test_the_third_failure_of_one_step_is_the_last():
    same = Tried(0, ERROR, 7, 6)
    assert after(same, same) == 0
    decision = decide([same, same, same], CANDIDATES, nothing_in_the_way)
    assert decision.candidate is None and "step 7" in decision.reason


def test_other_steps_between_do_not_hide_a_step_that_always_fails():
    assert after(Tried(0, ERROR, 7, 6), Tried(0, ERROR, 8, 6), Tried(0, ERROR, 7, 6), Tried(0, HUNG, 7, 6)) is None


def test_restarts_are_bounded_while_no_newer_checkpoint_comes():
    tried = [Tried(0, KILLED, step, 6) for step in range(7, 8 + MAX_RESTARTS)]
    assert after(*tried[:-1]) == 0
    assert after(*tried) is None


def test_a_newer_checkpoint_starts_the_count_again():
    tried = [Tried(0, KILLED, 7 + 3 * number, 6 + 3 * number) for number in range(4 * MAX_RESTARTS)]
    assert after(*tried) == 0
    same_step = [Tried(0, KILLED, 7, 6), Tried(0, KILLED, 7, 6), Tried(0, KILLED, 9, 8), Tried(0, KILLED, 9, 8)]
    assert after(*same_step) == 0


@pytest.mark.parametrize("fault", [Fault.OUT_OF_MEMORY, Fault.HOST_OUT_OF_MEMORY])
def test_out_of_memory_takes_the_next_fallback_until_none_is_left(fault: Fault):
    assert after(Tried(0, fault, 0, 0)) == 1
    assert after(Tried(0, fault, 0, 0), Tried(1, fault, 3, 0)) == 2
    decision = decide([Tried(2, fault, 3, 0)], CANDIDATES, nothing_in_the_way)
    assert decision.candidate is None and decision.is_out_of_fallbacks


def test_a_restart_stays_with_the_fallback_that_memory_led_to():
    assert after(Tried(0, MEMORY, 0, 0), Tried(1, KILLED, 7, 6)) == 1


def test_out_of_memory_does_not_count_as_a_restart():
    tried = [Tried(0, MEMORY, 7, 6), Tried(1, KILLED, 7, 6), Tried(1, KILLED, 7, 6)]
    assert after(*tried) == 1


def test_fallbacks_that_are_no_help_are_passed_over_and_named():
    def refuses_halves(candidate: Candidate) -> str | None:
        return "cannot go on" if candidate.micro_batch == 2 else None

    assert decide([Tried(0, MEMORY, 7, 6)], CANDIDATES, refuses_halves).candidate == 2
    none = decide([Tried(0, MEMORY, 7, 6)], CANDIDATES, lambda candidate: "cannot go on")
    assert none.candidate is None and none.is_out_of_fallbacks and "none/fp32/adamw cannot go on" in none.reason


def test_a_fallback_that_is_refused_at_its_start_is_followed_by_the_next():
    refused = Tried(1, ERROR, 6, 6, is_final=True, had_no_chance=True)
    assert after(Tried(0, MEMORY, 7, 6), refused) == 2
    assert after(Tried(0, MEMORY, 7, 6), refused._replace(had_no_chance=False)) is None, "it did train"
    assert after(refused) is None, "memory was not the reason that it ran"


def test_the_order_of_candidates_is_the_plans():
    shuffled = (CANDIDATES[0], replace(CANDIDATES[2], micro_batch=8), CANDIDATES[1])
    assert decide([Tried(0, MEMORY, 0, 0)], shuffled, nothing_in_the_way).candidate == 1
