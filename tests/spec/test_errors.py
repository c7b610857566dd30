"""Each error ends the command with its documented exit code."""

import inspect

import pytest

from shardwise.trainer.spec import errors
from shardwise.trainer.spec.errors import ExitCode, InputError, InputProblemsError, ShardwiseError

CODES = {
    "ShardwiseError": 1, "InputError": 2, "InputProblemsError": 2, "NothingFitsError": 3, "EnvironmentFaultError": 4,
}  # fmt: skip


def test_every_error_has_its_exit_code_and_so_have_endings_that_are_none():
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ShardwiseError)]
    assert {kind.__name__: int(kind.exit_code) for kind in kinds} == CODES
    endings = (ExitCode.DONE, ExitCode.OUT_OF_MEMORY, ExitCode.REQUEUE, ExitCode.INTERRUPTED)
    assert endings == (0, 5, 75, 130)


def test_several_problems_are_lines_of_one_message_and_no_problem_is_no_error():
    error = InputProblemsError(["a is wrong", "b is wrong"])
    assert str(error) == "a is wrong\nb is wrong"
    assert error.problems == ("a is wrong", "b is wrong") and isinstance(error, InputError)
    with pytest.raises(ValueError, match="at least one"):
        InputProblemsError([])
