"""The extras in pyproject.toml."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
SOURCES += [path for name in ("backbones", "projects_vil", "vil", "examples") for path in (ROOT / name).rglob("*.py")]


def test_extras_in_messages_and_docs_exist():
    # Python 3.10 has no tomllib.
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [path.read_text() for path in SOURCES] + sum(project["optional-dependencies"].values(), [])
    named = re.findall(r"(?:vil-detectron2|'\.)\[([a-z0-9,]+)\]", "\n".join(texts))
    extras = {name for names in named for name in names.split(",")}
    assert "scale" in extras <= project["optional-dependencies"].keys()
