"""The notebook of examples/: it was executed, and it executes."""

import shutil
import warnings
from pathlib import Path

import nbformat
from workplace_factory import LIMIT_S, make_workplace

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "quickstart.ipynb"


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_notebook_is_committed_with_its_output():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code_cells(notebook)] == [*range(1, len(code_cells(notebook)) + 1)]
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "execute_result"}
    pages = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert all(page.startswith("<pre>") for page in pages)
    assert "fits" in pages[0] and "finished at step" in pages[-1]
    printed = next(output.text for output in outputs if output.output_type == "stream")
    assert "\x1b" not in printed and "\r" not in printed  # plain lines
    assert not any(word in NOTEBOOK.read_text() for word in ("/root", "/home/", "/tmp/"))


def test_the_notebook_executes(tmp_path, monkeypatch):
    workplace = make_workplace(tmp_path / "work place")
    for name, value in workplace.environment.items():
        monkeypatch.setenv(name, value)
    shutil.copy(EXAMPLES / "quickstart.yaml", workplace.folder)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its libraries
        from nbclient import NotebookClient

        NotebookClient(
            notebook,
            timeout=LIMIT_S,
            kernel_name="python3",
            resources={"metadata": {"path": str(workplace.folder)}},
        ).execute()
    shown = "".join(str(cell.outputs) for cell in code_cells(notebook))
    assert "step 10 of 10" in shown and "Traceback" not in shown
