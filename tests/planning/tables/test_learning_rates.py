"""Rates by optimizer, method and size: every row is published or says what it was derived from."""

import math
import re
from itertools import product

import pytest
from planning_factory import data_of, job_of, shape_of

from shardwise.trainer.planning import schedule
from shardwise.trainer.planning.schedule import default_rate, make_schedule, shares_rate
from shardwise.trainer.spec.job.sections import Objective
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Method

SIZES = (1e5, 15e6, 1.2e8, 1e9, 7e9, 7e10)
ADAMW_ALIKE = (
    Optimizer.ADAMW, Optimizer.ADAMW_FUSED, Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW, Optimizer.PAGED_ADAMW_8BIT,
    Optimizer.DEEPSPEED_CPU_ADAM, Optimizer.MUON,
)  # fmt: skip


def rate(optimizer: Optimizer, size: float = 7e9, *, method: Method = Method.FULL, from_scratch: bool = True) -> float:
    return default_rate(optimizer=optimizer, method=method, is_from_scratch=from_scratch, num_parameters=int(size)).lr


def test_every_optimizer_has_rates_from_small_to_large_that_never_rise_each_with_its_source():
    for rates in (*(optimizer.facts.rates for optimizer in Optimizer), schedule._GALORE):
        for rows in rates:
            sizes = [row.max_parameters for row in rows]
            assert sizes == sorted(set(sizes)) and sizes[-1] == math.inf
            assert [row.lr for row in rows] == sorted((row.lr for row in rows), reverse=True)
    for optimizer, size, method, from_scratch in product(Optimizer, SIZES, Method, (True, False)):
        found = default_rate(optimizer=optimizer, method=method, is_from_scratch=from_scratch, num_parameters=int(size))
        assert 1e-6 < found.lr <= 0.1
        named = r" parameters: .*(arXiv:\d{4}\.\d{5}|none is published|Alpaca|TrainingArguments|as Adafactor)"
        assert re.search(named, found.source), (optimizer, size, method, from_scratch)


@pytest.mark.parametrize(
    ("optimizer", "size", "from_scratch", "lr"),
    [
        (Optimizer.LION, 7e9, True, 1e-4), (Optimizer.LION, 7e9, False, 6.7e-6),
        (Optimizer.LION_8BIT, 1e9, True, 1.3e-4), (Optimizer.LION, 1e5, True, 2e-3),
        (Optimizer.ADAFACTOR, 1e9, True, 1e-2), (Optimizer.ADAFACTOR, 1e9, False, 1e-3),
        (Optimizer.ADALOMO, 7e9, False, 5e-4), (Optimizer.LOMO, 7e9, False, 3e-2), (Optimizer.LOMO, 7e9, True, 1e-1),
        (Optimizer.SGD, 7e9, True, 1e-1), (Optimizer.LAMB_8BIT, 3.4e8, True, 5e-3),
    ],
)  # fmt: skip
def test_rates_are_those_of_published_runs(optimizer, size, lr, *, from_scratch):
    assert rate(optimizer, size, from_scratch=from_scratch) == lr


@pytest.mark.parametrize("optimizer", ADAMW_ALIKE)
@pytest.mark.parametrize("size", SIZES)
def test_forms_of_adamw_and_muon_take_adamws_rate(optimizer, size):
    for method, from_scratch in product((Method.FULL, Method.LORA), (True, False)):
        wanted = rate(Optimizer.ADAMW, size, method=method, from_scratch=from_scratch)
        assert rate(optimizer, size, method=method, from_scratch=from_scratch) == wanted


@pytest.mark.parametrize("inner", [Optimizer.ADAMW, Optimizer.ADAMW_8BIT, Optimizer.ADAFACTOR])
def test_galore_has_one_rate_whatever_runs_inside(inner):
    assert [rate(inner, size, method=Method.GALORE) for size in (1e9, 7e9)] == [1e-2, 5e-3]
    assert rate(inner, 7e9, method=Method.GALORE, from_scratch=False) == 2e-5


def test_a_run_may_go_over_to_an_optimizer_to_which_its_rate_means_the_same():
    assert shares_rate(Optimizer.ADAMW, Optimizer.DEEPSPEED_CPU_ADAM)
    assert shares_rate(Optimizer.ADAMW_FUSED, Optimizer.PAGED_ADAMW_8BIT)
    assert shares_rate(Optimizer.LION, Optimizer.LION_8BIT)
    assert not shares_rate(Optimizer.ADAMW, Optimizer.LION)
    assert not shares_rate(Optimizer.ADAFACTOR, Optimizer.ADAMW_8BIT)
    assert not shares_rate(Optimizer.LOMO, Optimizer.ADALOMO)


def test_the_chosen_optimizer_sets_the_schedules_rate_before_the_pinned_one_and_the_job_file_before_both():
    data, shape = data_of(), shape_of("8b")
    open_job, pinned = job_of(seq_len=512), job_of(seq_len=512, pin={"optimizer": Optimizer.LION})
    assert make_schedule(open_job, data, shape).lr == 2e-5
    assert make_schedule(pinned, data, shape).lr == 6.7e-6
    assert make_schedule(pinned, data, shape, optimizer=Optimizer.ADAFACTOR).lr == 1e-3
    assert make_schedule(open_job, data, shape, optimizer=Optimizer.ADAFACTOR).lr == 1e-3
    made = make_schedule(job_of(lr=7e-5), data, shape, optimizer=Optimizer.LION)
    assert (made.lr, made.lr_source) == (7e-5, "train.lr of the job file")


@pytest.mark.parametrize(
    ("size", "method", "lr"),
    [
        (1e9, Method.FULL, 1e-6), (7e9, Method.FULL, 5e-7), (7e10, Method.FULL, 2e-7), (7e9, Method.LORA, 5e-6),
        (7e9, Method.QLORA, 5e-6), (7e9, Method.GALORE, 5e-7),
    ],
)  # fmt: skip
def test_dpo_takes_the_small_rates_that_were_published_for_it(size, method, lr):
    facts = {"optimizer": Optimizer.ADAMW, "method": method, "is_from_scratch": False, "num_parameters": int(size)}
    found = default_rate(**facts, objective=Objective.DPO)
    assert found.lr == lr
    assert found.source.startswith("DPO of ")


@pytest.mark.parametrize("optimizer", Optimizer)
@pytest.mark.parametrize("method", [Method.FULL, Method.LORA])
def test_dpo_is_the_same_share_of_every_optimizers_own_rate(optimizer, method):
    def share(of):
        facts = {"optimizer": of, "method": method, "is_from_scratch": False, "num_parameters": int(7e9)}
        return default_rate(**facts, objective=Objective.DPO).lr / default_rate(**facts).lr

    assert share(optimizer) == pytest.approx(share(Optimizer.ADAMW), rel=0.05)
