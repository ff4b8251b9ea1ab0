"""The example notebook: its cells run in order in a kernel of Jupyter, and show what they say."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "first_run.ipynb"


def shown(cell: dict[str, Any]) -> str:
    """The last value of a cell in its plainest form, else its printed text."""
    values = [output["data"]["text/plain"] for output in cell["outputs"] if output["output_type"] == "execute_result"]
    return values[-1] if values else "".join(output.get("text", "") for output in cell["outputs"])


def test_the_notebook_has_no_outputs_in_the_repository():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    pytest.importorskip("ipykernel", reason="a notebook's kernel: make test installs it")
    nbclient = pytest.importorskip("nbclient", reason="runs notebooks: make test installs it")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell for cell in notebook.cells if cell.cell_type == "code"]
    planned, loss, page, step, text, evaluation = (shown(cell) for cell in outputs[1:])
    assert "llama-3.2-1b" in planned
    assert "best" in planned
    assert 0 < float(loss) < 6
    assert any("text/html" in output.get("data", {}) for output in outputs[3]["outputs"]), page
    assert step == "40"
    assert text
    assert evaluation.startswith("Evaluation(loss=")
    assert (tmp_path / "runs/notebook/checkpoints/step-00000040").is_dir()
