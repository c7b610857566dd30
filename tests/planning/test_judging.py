"""Rows that the predictions are judged by, and the ledger of all measured runs."""

import json

import judging
import ledger
import pytest
from msgspec.structs import replace
from planning_factory import plan_of
from reported_run import report_for, write_run

from shardwise.launch.show.recorded_run import recorded_runs
from shardwise.launch.show.shared_row import shared_row


def test_each_row_has_its_source_its_date_and_a_measurement():
    rows = [*judging.raw_rows(even=True), *judging.raw_rows(even=False)]
    assert len(rows) == 90 and len({row["id"] for row in rows}) == len({row["source"] for row in rows}) == 90
    for row in rows:
        assert row["commit"] and row["date"] >= "2023" and row["truth"], row["id"]
        assert row["id"] == row["case"]["id"]
        assert set(row["truth"]) <= {*judging.COUNTERS, "oom"}, row["id"]


def test_the_rows_are_halved_by_their_source_and_the_odd_half_is_scored_once(tmp_path, monkeypatch):
    halves = [{row["id"] for row in judging.raw_rows(even=even)} for even in (True, False)]
    assert not halves[0] & halves[1] and min(map(len, halves)) >= 30
    monkeypatch.setattr(judging, "RESULTS", tmp_path)
    assert judging.stored_odd() is None
    scores = json.loads(judging.score_odd().read_text())
    assert scores["rows"] == len(halves[1]) and scores == judging.stored_odd()
    with pytest.raises(FileExistsError):
        judging.score_odd()


def test_a_run_below_parity_is_slower_or_larger_than_predicted():
    speed, memory = "tokens_per_s_per_gpu", "peak_reserved_gib"
    assert judging.is_below(speed, 1.02) and not judging.is_below(speed, 1.005) and not judging.is_below(speed, 0.5)
    assert judging.is_below(memory, 0.98) and not judging.is_below(memory, 0.995) and not judging.is_below(memory, 2)
    (row, *_) = judging.read_rows()
    judged = judging.Judged(row, speed, 1.15, 0.15)
    assert judged.is_in_range and judged._replace(ratio=1 / 1.15).is_in_range
    assert judged._replace(ratio=0.86).is_in_range is False and judged._replace(stated=None).is_in_range is None


def test_the_ledger_has_every_run_once_and_the_worst_first():
    found = ledger.read_ledger()
    names = [entry.id for entry in found.entries] + [name for name, *_ in found.others]
    assert len(names) == len(set(names)) >= 250
    assert {"GT0019", "UF001", "JD001"} <= set(names) and sum(name.startswith("own ") for name in names) >= 60
    distances = [entry.distance for entry in found.entries]
    assert distances == sorted(distances, reverse=True)
    assert all(entry.year for entry in found.entries) and {entry.card for entry in found.entries} >= {"B200", "L40S"}


def test_odd_rows_have_no_ratio_in_the_ledger_until_they_were_scored(tmp_path, monkeypatch):
    odd = {row["id"] for row in judging.raw_rows(even=False)}
    monkeypatch.setattr(judging, "RESULTS", tmp_path)
    assert not odd & {entry.id for entry in ledger.read_ledger().entries}
    (tmp_path / "judging-odd-2026-01-01.json").write_text("{}")
    assert odd & {entry.id for entry in ledger.read_ledger().entries}


def test_a_shared_row_is_an_entry_of_the_ledger(tmp_path):
    plan = plan_of("1b", "8xH100-SXM5-80GB")
    measured = replace(report_for(plan).measured, memory=report_for(plan).predicted.memory)
    run_dir = write_run(tmp_path / "run", plan=plan, report=report_for(plan, measured=measured))
    row = json.loads(json.dumps(shared_row(recorded_runs((run_dir,))[0])))
    entry = ledger.shared_entry("shared 1", row)
    assert (entry.card, entry.num_gpus, entry.engine) == ("H100-SXM5-80GB", 8, plan.chosen.strategy.sharding)
    assert entry.ratios["peak_allocated_gib"] == pytest.approx(1.0)
