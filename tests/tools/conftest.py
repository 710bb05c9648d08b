"""Fixtures that run the tools in the process of the tests."""

import runpy
import sys

import pytest

from tests.projects_vil.helpers import ROOT


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Return a function that runs a tool in this process and returns exit status, stdout and stderr."""

    def run(name: str, *args) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        status = 0
        try:
            runpy.run_path(str(ROOT / "tools" / name), run_name="__main__")
        except SystemExit as end:
            status = end.code
        return status or 0, *capsys.readouterr()

    return run


@pytest.fixture
def error_of(run_here):
    """Return a function that runs a tool, checks that it fails, and returns the error line."""

    def run(name: str, *args) -> str:
        status, _, err = run_here(name, *args)
        assert status in (1, 2)
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert lines == err.splitlines()[-1:], err
        return lines[0]

    return run
