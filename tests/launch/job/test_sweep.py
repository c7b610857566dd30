"""Every combination of the swept values, and nothing that a task of an array cannot differ in."""

import pytest

from launch.job.layers import sweep_points
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
    ("sweeps", "fact"),
    [
        (["train.lr"], "key=a,b"),
        (["=1"], "key=a,b"),
        (["train.lr=1e-4,"], "key=a,b"),
        (["train.lr=1,2", "train.lr=3"], "train.lr: .*twice"),
        (["train.lr=1,1"], "value .*twice"),
        (["slurm.nodes=1,2"], "slurm .*same"),
        (["output=a,b"], "output .*same"),
        ([f"train.seed={','.join(map(str, range(40)))}", f"train.steps={','.join(map(str, range(1, 40)))}"], "1560"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(sweeps, fact):
    with pytest.raises(InputError, match=fact):
        sweep_points(sweeps)
