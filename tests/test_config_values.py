"""Every training setting that a config takes from a source, see config_values.yaml."""

import functools
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml
from detectron2.config import CfgNode

from projects_vil import load_config

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(
    str(path.relative_to(ROOT / "configs").with_suffix(""))
    for path in ROOT.glob("configs/**/*.yaml")
    if path.parent.name not in ("base", "demo")
)
VALUES = yaml.safe_load(Path(__file__).with_name("config_values.yaml").read_text())


@functools.cache
def loaded(config: str) -> CfgNode:
    return load_config(ROOT / f"configs/{config}.yaml")


@pytest.mark.parametrize("key", VALUES)
def test_values_match_their_sources(key):
    used = set()
    for config in CONFIGS:
        pattern, value, source = next((row for row in VALUES[key] if fnmatchcase(config, row[0])), ("", None, ""))
        if not pattern:
            continue
        used.add(pattern)
        found = functools.reduce(getattr, key.split("."), loaded(config))
        found = list(found) if isinstance(found, tuple) else found
        assert found == value, f"configs/{config}.yaml: {key}; {source}"
    assert used == {pattern for pattern, *_ in VALUES[key]}
