"""The pictures of the documents are there, are shown somewhere, and are small."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
MOST_BYTES = 150_000


def test_every_picture_is_shown_and_every_one_that_is_shown_is_there() -> None:
    text = "".join(path.read_text() for path in (*DOCS.glob("*.md"), DOCS.parent / "README.md"))
    shown = set(re.findall(r"images/([\w-]+\.png)", text))
    assert shown == {path.name for path in (DOCS / "images").iterdir()} and len(shown) >= 5


def test_pictures_are_small_and_are_what_the_command_takes() -> None:
    script = (DOCS.parent / "benchmarks" / "screenshots.py").read_text()
    for path in (DOCS / "images").glob("*.png"):
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) <= MOST_BYTES, path.name
        assert f'"{path.stem}"' in script
