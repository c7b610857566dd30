"""The blocks of a document, run as printed: in order, each in a clean shell, in a folder with a home of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from chat_tokenizers import qwen_folder
from export_factory import write_base
from hub_server import Hub, serving
from workplace_factory import LIMIT_S, TINY_CONFIG, Workplace, make_workplace

from shardwise.trainer.runtime.data.chat import template

MODELS = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B")  # of which the small hub has a small one each
CONFIG = {**TINY_CONFIG, "model_type": "qwen2", "vocab_size": 1024, "max_position_embeddings": 2048}


class Block(NamedTuple):
    """A fenced block; `file` is the name in its first line, `# NAME`, if that is all the line has."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        named = re.match(r"# ([\w.-]+\.\w+)\n", self.text)
        return named.group(1) if named else None


def blocks_of(page: Path) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)]


@contextmanager
def place_with_hub(folder: Path) -> Iterator[Workplace]:
    """A folder with text and a model, the commands of this environment on the path, and a hub that has `MODELS`."""
    made = make_workplace(folder / "place")
    made.job.unlink()
    model = write_base(qwen_folder(folder / "hub", eos="<|im_end|>"), CONFIG)
    chatml = Path(template.__file__).parent / "templates" / "chatml.jinja"
    (model / "chat_template.jinja").write_text(chatml.read_text())
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    with serving(Hub(files=dict.fromkeys(MODELS, files))) as hub:
        given = {name: value for name, value in made.environment.items() if "PROXY" not in name.upper()}
        path = f"{Path(sys.executable).parent}:{given['PATH']}"
        yield made._replace(environment=given | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "PATH": path})


def run_block(place: Workplace, block: Block) -> str:
    """What a block prints; one that names a file is written, not run. Fails with the first command that does."""
    if block.file is not None:
        (place.folder / block.file).write_text(block.text)
        return ""
    program = {"bash": ["sh", "-ec"], "python": [sys.executable, "-P", "-c"]}.get(block.language)
    if program is None:
        return ""
    answer = subprocess.run(
        [*program, block.text],
        cwd=place.folder, env=place.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    assert answer.returncode == 0, block.text + answer.stdout + answer.stderr
    return answer.stdout


def run_page(place: Workplace, page: Path) -> list[str]:
    """What each block printed, in order; nothing for a block that is a file or an example."""
    return [run_block(place, block) for block in blocks_of(page)]
