"""In a copy of the tracked files alone, all tests are collected, and those of reference data pass or are skipped."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
READS_DATA = re.compile(r"golden|real_data|VIL_SHARED")


def run_pytest(copy: Path, *args: str) -> list[str]:
    inherited = ("VIL_SHARED", "DETECTRON2_DATASETS", "PYTHONPATH", "PYTEST_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(inherited)}
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *args]
    result = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=1500, check=False)
    assert result.returncode == 0, result.stdout[-5000:]
    return result.stdout.splitlines()


@pytest.mark.slow
def test_tests_of_a_copy(tmp_path):
    """As ``git archive`` makes it, with what is not committed yet."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is not a git repository but a copy")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    assert " error" not in run_pytest(tmp_path, "--collect-only", "-m", "slow or not slow")[-1]
    files = [path for path in (tmp_path / "tests").rglob("test_*.py") if READS_DATA.search(path.read_text())]
    names = sorted(str(path.relative_to(tmp_path)) for path in files if path.name != Path(__file__).name)
    assert "tests/backbones/test_golden.py" in names
    skipped = [line for line in run_pytest(tmp_path, *names) if line.startswith("SKIPPED ")]
    assert all(re.match(r"SKIPPED \[\d+\] \S+: \S+", line) for line in skipped), skipped
