"""Every shape of rows has one row of facts and a reader, and the facts agree with each other."""

from shardwise.trainer.runtime.data.sources.rows import READERS
from shardwise.trainer.spec.data import shapes
from shardwise.trainer.spec.data.shapes import SHAPES
from shardwise.trainer.spec.job.sections import DataFormat, Objective


def test_every_shape_has_facts_of_its_own_and_a_reader():
    formats = {*DataFormat} - {DataFormat.AUTO}
    assert {*SHAPES} == formats == {*shapes.BY_PRECEDENCE} == {*READERS}
    precedences = [precedence for facts in SHAPES.values() for precedence, _ in facts.identified_by]
    assert len({*precedences}) == len(precedences)
    for facts in SHAPES.values():
        assert all({*needed} <= {*facts.fields} for _, needed in facts.identified_by)
        assert facts.rows_per_example == 1 or not facts.packs_by_default, "rows of a pair are never packed"


def test_an_objective_assumes_a_shape_that_it_learns_from():
    for objective in {*Objective} - {Objective.AUTO}:
        shape = shapes.assumed_shape(objective, DataFormat.AUTO)
        assert shape in shapes.shapes_for(objective)
        assert shapes.objective_of(Objective.AUTO, shape) is objective
