"""docs/job-file.md says what the table of settings says."""

import re
from pathlib import Path

import pytest

from trainer.spec.job.fields import BY_PATH, REFERENCE_MARK, job_reference, write_job_reference

DOCUMENT = Path(__file__).parents[3] / "docs" / "job-file.md"


def test_the_document_is_the_rendered_reference():
    """Write it anew with trainer.spec.job.fields.write_job_reference(Path("docs/job-file.md"))."""
    above, mark, below = DOCUMENT.read_text(encoding="utf-8").partition(REFERENCE_MARK)
    assert above
    assert mark + below == job_reference()


def test_writing_anew_keeps_what_stands_above_the_mark(tmp_path):
    copy = tmp_path / "job-file.md"
    copy.write_text(f"# Ours\n\n{REFERENCE_MARK}\n\nold tables\n")
    write_job_reference(copy)
    assert copy.read_text() == "# Ours\n\n" + job_reference()


@pytest.mark.parametrize("path", BY_PATH)
def test_every_setting_has_one_row(path):
    rows = re.findall(rf"^\| `{re.escape(path)}` \| .+ \| `.+` \| .+\. \|$", job_reference(), re.MULTILINE)
    assert len(rows) == 1


def test_the_names_of_presets_in_the_document_are_those_in_the_package():
    from launch.inputs.model_files import preset_names

    paragraph = DOCUMENT.read_text(encoding="utf-8").partition("Presets: ")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([a-z0-9.-]+)`", paragraph.replace("`model.name`", ""))) == set(preset_names())
