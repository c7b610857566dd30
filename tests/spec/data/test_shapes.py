"""Every shape of rows has one row of facts and a reader, and the facts agree with each other."""

from shardwise.trainer.runtime.data.sources.rows import READERS
from shardwise.trainer.spec.data.shapes import (
    BY_PRECEDENCE,
    SHAPES,
    assumed_shape,
    objective_of,
    rows_per_example,
    shapes_for,
)
from shardwise.trainer.spec.job.sections import DataFormat, Objective


def test_every_shape_has_facts_and_a_reader():
    shapes = {*DataFormat} - {DataFormat.AUTO}
    assert {*SHAPES} == shapes == {*BY_PRECEDENCE} == {*READERS}


def test_no_two_shapes_have_the_same_precedence():
    found = [precedence for facts in SHAPES.values() for precedence, _ in facts.identified_by]
    assert len({*found}) == len(found)


def test_a_shape_is_identified_by_its_own_fields():
    for facts in SHAPES.values():
        assert all({*needed} <= {*facts.fields} for _, needed in facts.identified_by)


def test_an_objective_assumes_a_shape_that_it_learns_from():
    for objective in {*Objective} - {Objective.AUTO}:
        shape = assumed_shape(objective, DataFormat.AUTO)
        assert shape in shapes_for(objective)
        assert objective_of(Objective.AUTO, shape) is objective
        assert rows_per_example(objective) == SHAPES[shape].rows_per_example


def test_rows_of_a_pair_are_never_packed():
    assert not any(facts.packs_by_default for facts in SHAPES.values() if facts.rows_per_example > 1)
