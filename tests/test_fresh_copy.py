"""In a copy of the tracked files alone, tests that read reference data pass, or skip with a reason."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
READS_DATA = re.compile(r"golden|real_data|VIL_SHARED|DETECTRON2_DATASETS")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """As ``git archive`` makes it, with what is not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("this is not a git repository: it is a copy itself")
    root = tmp_path_factory.mktemp("elsewhere") / "copy"
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    return root


def run_pytest(copy: Path, *args: str) -> subprocess.CompletedProcess:
    inherited = ("VIL_SHARED", "DETECTRON2_DATASETS", "PYTHONPATH", "PYTEST_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(inherited)}
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *args]
    return subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=1500, check=False)


@pytest.mark.slow
def test_tests_that_read_data_pass_or_say_why_not(copy):
    files = [path for path in (copy / "tests").rglob("test_*.py") if READS_DATA.search(path.read_text())]
    names = sorted(str(path.relative_to(copy)) for path in files if path.name != Path(__file__).name)
    assert "tests/backbones/test_golden.py" in names
    result = run_pytest(copy, *names)
    assert result.returncode == 0, result.stdout[-5000:]
    skipped = [line for line in result.stdout.splitlines() if line.startswith("SKIPPED ")]
    assert all(re.match(r"SKIPPED \[\d+\] \S+: \S+", line) for line in skipped), skipped


@pytest.mark.slow
def test_everything_is_collected(copy):
    result = run_pytest(copy, "--collect-only", "-m", "slow or not slow")
    assert result.returncode == 0 and " error" not in result.stdout.splitlines()[-1], result.stdout[-5000:]
