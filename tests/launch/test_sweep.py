"""Every combination of the swept values, and nothing that a task of an array cannot differ in."""

import pytest

from launch.sweep import sweep_points
from trainer.spec.errors import InputError


def test_nothing_swept_is_one_point_without_overrides():
    assert sweep_points([]) == ((),)


def test_several_sweeps_multiply_and_the_last_varies_fastest():
    assert sweep_points(["train.lr=1e-4,3e-4", "train.seed=0, 1"]) == (
        ("train.lr=1e-4", "train.seed=0"),
        ("train.lr=1e-4", "train.seed=1"),
        ("train.lr=3e-4", "train.seed=0"),
        ("train.lr=3e-4", "train.seed=1"),
    )


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        ("allow=[offload_cpu],[offload_cpu,fp8]", ("allow=[offload_cpu]", "allow=[offload_cpu,fp8]")),
        ('data.train="a,b.txt",c', ('data.train="a,b.txt"', "data.train=c")),
        ("data.fields={prompt: a,completion: b}", ("data.fields={prompt: a,completion: b}",)),
    ],
)
def test_commas_in_brackets_and_quotes_do_not_part(sweep, expected):
    assert sweep_points([sweep]) == tuple((each,) for each in expected)


@pytest.mark.parametrize(
    ("sweeps", "says"),
    [
        (["train.lr"], "expected key=a,b"),
        (["=1"], "expected key=a,b"),
        (["train.lr=1e-4,"], "expected key=a,b"),
        (["train.lr=1,2", "train.lr=3"], "train.lr: is swept twice"),
        (["train.lr=1,1"], "a value stands there twice"),
        (["slurm.nodes=1,2"], "slurm is the same for all"),
        (["output=a,b"], "output is the same for all"),
        ([f"train.seed={','.join(map(str, range(40)))}", f"train.steps={','.join(map(str, range(1, 40)))}"], "1560"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(sweeps, says):
    with pytest.raises(InputError, match=says):
        sweep_points(sweeps)
