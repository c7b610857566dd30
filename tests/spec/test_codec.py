"""Values survive a file; any other content is refused under the file's name."""

import re
import tracemalloc

import pytest
from engine_plan_factory import engine_plan

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import Gpu, Hardware, Host
from shardwise.trainer.spec.job.reading import read_job
from shardwise.trainer.spec.plan import Plan

PROFILE = DataProfile(
    source="prepared", num_rows=3, num_tokens=700, longest_row=256, is_packed=True, fingerprint="ab", vocab_size=4096
)
MACHINE = Hardware(
    gpus=(Gpu(index=0, name="NVIDIA H100", spec_name=None, memory_bytes=2**36, compute_capability=(9, 0)),),
    host=Host(cpu_name="ünïcode ✓", num_cores=8, ram_bytes=None, ram_available_bytes=None),
)
JOB = read_job({"model": {"name": "a/b"}, "data": {"train": "x.txt"}, "train": {"tokens": "2G"}}, origin="job")


@pytest.mark.parametrize("value", [PROFILE, MACHINE, JOB], ids=lambda value: type(value).__name__)
def test_a_value_read_back_equals_the_one_written(tmp_path, value):
    codec.write(tmp_path / "value.json", value)
    assert codec.read(tmp_path / "value.json", type(value)) == value


def test_a_file_is_lines_that_end_and_nothing_is_left_beside_it_also_by_a_failed_write(tmp_path):
    path = tmp_path / "value.json"
    codec.write(path, PROFILE)
    codec.write(path, PROFILE)
    assert path.read_text().startswith('{\n "source": "prepared"') and path.read_text().endswith("}\n")
    assert list(tmp_path.iterdir()) == [path]
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        codec.write(path, PROFILE)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", codec.encode(PROFILE)[:-20],
        codec.encode(PROFILE).replace(b'"num_rows": 3', b'"num_rows": "3"'),
        codec.encode(PROFILE).replace(b'"num_rows": 3', b'"num_rows": 3, "colour": "red"'),
    ],
    ids=["empty", "truncated", "list", "null", "not text", "cut off", "wrong type", "unknown field"],
)  # fmt: skip
def test_another_content_is_refused_under_the_name_of_the_file(tmp_path, content):
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"profile\.json: .*dataprofile"):
        codec.read(path, DataProfile)
    with pytest.raises(InputError, match=r"gone\.json: "):
        codec.read(tmp_path / "gone.json", DataProfile)


@pytest.mark.parametrize("waited_for", [b"null", b'"0.6"'])
def test_a_plan_of_version_0_5_can_be_read(waited_for):
    """Its runs are resumed with it."""
    written = codec.encode(engine_plan(Sharding.HSDP, num_ranks=4))
    older = re.sub(rb'"needs_version": null', b'"needs_version": ' + waited_for, written)
    assert older.count(b"needs_version") == 1
    assert codec.decode(older, Plan, origin="plan.json").hybrid_mesh == (2, 2)


def test_reading_needs_the_memory_of_the_content_and_not_of_the_bound(tmp_path):
    codec.write(tmp_path / "value.json", PROFILE)
    tracemalloc.start()
    codec.read(tmp_path / "value.json", DataProfile)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20 < codec.MAX_FILE_BYTES
