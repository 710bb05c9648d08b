"""Error messages are sentences: "<what is wrong>. <what to do>."."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.projects_vil.helpers import ROOT

PACKAGES = ("backbones", "projects_vil", "vil", "tools", "research", "examples")
# A message may begin with an argument of the library.
_ARGUMENT = r"[a-z]+(_[a-z]+)+\b|[a-z]+[=.]|(annotations|column|epochs|opset|precision|tiles|timm|torch\w*)\b"


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each ``raise ConfigError(...)`` in a file. Values become ``X``."""
    for node in ast.walk(ast.parse(path.read_text())):
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "ConfigError":
            parts = getattr(call.args[0], "values", [call.args[0]])
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "X" for part in parts)


def test_an_error_message_is_made_of_sentences():
    for path in (path for package in PACKAGES for path in ROOT.glob(f"{package}/**/*.py")):
        for line, text in messages(path):
            begins = not text[0].islower() or re.match(_ARGUMENT, text)
            assert begins and text.endswith((".", "?", "X")), f"{path.relative_to(ROOT)}:{line}: {text}"
