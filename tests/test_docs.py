"""The pages that docs/reference.py generates."""

import ast
import importlib.util
import pkgutil
from pathlib import Path

import pytest
from detectron2.config import get_cfg

from projects_vil.config import add_vil_config, config_items
from vil import cli

ROOT = Path(__file__).resolve().parents[1]
CONFIG = (ROOT / "projects_vil/config.py").read_text()


@pytest.fixture(scope="module")
def reference():
    """Return the module docs/reference.py."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_config_reference_lists_every_key_with_its_default(reference):
    listed = {key: ast.literal_eval(default) for key, default, _ in reference.config_keys(CONFIG) if key}
    cfg = get_cfg()
    theirs = {key for key, _ in config_items(cfg)}
    add_vil_config(cfg)
    assert listed == {k: v for k, v in config_items(cfg) if k not in theirs and not isinstance(v, dict)}
    page = reference.config_reference()
    assert all(f"| `{key}` |" in page for key in listed)


def test_a_key_without_a_comment_fails(reference):
    source = CONFIG.replace("\n\n\n# Reading", "\n\n    cfg.SOLVER.NEW = 1\n\n\n# Reading")
    with pytest.raises(ValueError, match=r"SOLVER\.NEW has no comment"):
        list(reference.config_keys(source))


def test_cli_reference_lists_every_command_and_argument(reference):
    page = reference.cli_reference()
    for name in cli.COMMANDS:
        assert f"\n## vil {name}\n" in page
    assert "| `--epochs N` |" in page and "| `--ray-workers MIN MAX` |" in page
    # train, tune and predict do not use the device of a config
    assert page.count("default: the GPU if there is one)") == 3


def test_api_reference_names_what_can_be_imported(reference):
    names = [line.removeprefix("::: ") for line in reference.api_reference().splitlines() if line.startswith(":::")]
    assert {"backbones.create_backbone", "projects_vil.Detector"} <= set(names)
    for name in names:
        assert pkgutil.resolve_name(name)
