"""A copy of the tracked files collects all tests, and skips the tests that need reference data."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_tests_of_a_copy(tmp_path):
    """The copy is made like ``git archive``, with uncommitted changes. A test that cannot be collected is an error."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is not a git repository but a copy")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    golden, copied = ({path.name for path in (root / "tests/golden").iterdir()} for root in (ROOT, tmp_path))
    assert golden == copied
    inherited = ("DETECTRON2_DATASETS", "PYTHONPATH", "PYTEST_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(inherited)}
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "-m", "real_data"]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1500, check=False)
    skipped = re.findall(r"^SKIPPED \[\d+\] \S+: \S+", result.stdout, re.MULTILINE)
    assert result.returncode == 0 and skipped, result.stdout[-5000:]
    assert not re.search(r"\d (passed|failed|error)", result.stdout)
