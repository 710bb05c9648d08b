"""``vil install-detectron2`` as a command, with pip, git and a small wheel.

The tests change nothing in the environment and need no network.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import vil.install_detectron2 as tool
from backbones import ConfigError
from tests.projects_vil.helpers import ROOT

WHEEL_NAME = "labgym-3.1.2-py3-none-any.whl"
BUNDLED = {
    "LabGym/__init__.py": "",
    "LabGym/gui.py": "import LabGym.detectron2",
    "LabGym/detectron2/__init__.py": 'from .utils import label\n\n__version__ = "0.6"\n',
    "LabGym/detectron2/utils.py": (
        "import LabGym.detectron2.engine as engine\n"
        "from LabGym.detectron2 import model_zoo\n"
        'label = "LabGym.detectron2.utils"\n'
    ),
    "LabGym/detectron2/engine/__init__.py": 'logger = "LabGym.detectron2"\n',
    "LabGym/detectron2/model_zoo/__init__.py": "",
    "LabGym/detectron2/model_zoo/configs/COCO-Detection/retinanet.yaml": "_BASE_: ../Base.yaml\n",
    "LabGym/detectron2/model_zoo/configs/LVISv0.5/common/train.py": ("from LabGym.detectron2.engine import logger\n"),
}


@pytest.fixture
def wheel(tmp_path):
    """Return a wheel with the name of the LabGym wheel and other content."""
    info = "labgym-3.1.2.dist-info/"
    metadata = {
        info + "METADATA": "Metadata-Version: 2.1\nName: LabGym\nVersion: 3.1.2\nRequires-Python: <3.11\n",
        info + "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        info + "RECORD": "",
    }
    path = tmp_path / "wheels" / WHEEL_NAME
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**BUNDLED, **metadata}.items():
            archive.writestr(name, content)
    return path


def run(*arguments, tmp_path, **environment):
    """Run the command with a folder of wheels as the package index, and without a git host."""
    offline = {
        **{"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels")},
        **{"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.file://{tmp_path}/nowhere.insteadOf"},
        **{"GIT_CONFIG_VALUE_0": tool.GIT_URL, "TMPDIR": str(tmp_path / "scratch")},
    }
    (tmp_path / "scratch").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "vil", "install-detectron2", *arguments]
    env = {**os.environ, **offline, **environment}
    result = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    # Every import of torch creates a cache there.
    assert not [path for path in (tmp_path / "scratch").iterdir() if not path.name.startswith("torchinductor")]
    return result


@pytest.mark.slow
def test_a_detectron2_that_imports_is_kept(tmp_path):
    package = tmp_path / "path" / "detectron2"
    for module in ("engine", "model_zoo"):
        (package / module).mkdir(parents=True)
        (package / module / "__init__.py").touch()
    (package / "__init__.py").write_text('__version__ = "0.7.test"\n')
    result = run(tmp_path=tmp_path, PYTHONPATH=str(package.parent))
    assert (result.returncode, result.stderr) == (0, "")
    assert f"keeping detectron2 0.7.test at {package} with" in result.stdout


@pytest.mark.slow
def test_a_failed_installation_is_one_line(tmp_path, wheel):
    """There is no git host, no package index, or a wheel with other content."""
    (tmp_path / "detectron2.py").write_text('raise ImportError("hidden by the test")\n')
    options = {"tmp_path": tmp_path, "PYTHONPATH": str(tmp_path)}
    result = run("--source", "git", **options)
    assert result.returncode == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "hidden by the test" in result.stdout and "from git" in result.stderr
    result = run(**options)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and "cannot install from git" in result.stdout
    assert all(part in result.stderr for part in (WHEEL_NAME, found, tool.BUNDLE_SHA256))
    wheel.unlink()
    result = run("--source", "index", **options)
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and tool.BUNDLE in result.stderr


def test_missing_git_and_a_hanging_command(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="timed out"):
        tool.run(sys.executable, "-c", "import time; time.sleep(60)", timeout=0.1)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="git"):
        tool.install_from_git(tmp_path)


def test_other_references_to_the_bundle_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("LabGym/detectron2/a.py", "from LabGym import detectron2\n")
    with pytest.raises(ConfigError, match="a.py"):
        tool.unpack(tmp_path / "a.whl", tmp_path / "project")


@pytest.mark.slow
def test_the_bundle_is_installed_as_a_separate_package(tmp_path, wheel):
    project, target = tmp_path / "project", tmp_path / "target"
    tool.unpack(wheel, project)
    tool.pip("install", "--no-deps", "--no-build-isolation", "--target", str(target), str(project))
    wanted = {name.removeprefix("LabGym/") for name in BUNDLED if name.startswith("LabGym/detectron2/")}
    found = {path.relative_to(target).as_posix() for path in Path(target, "detectron2").rglob("*") if path.is_file()}
    assert {name for name in found if not name.endswith(".pyc")} == wanted
    assert not any(b"LabGym" in (target / name).read_bytes() for name in wanted)
    (info,) = target.glob("detectron2-*.dist-info")
    metadata = (info / "METADATA").read_text()
    assert "Version: 0.6+labgym3.1.2" in metadata and "Requires-Dist: setuptools<81" in metadata
    assert list(info.rglob("LICENSE"))
    code = "import detectron2; print(detectron2.label, detectron2.utils.engine.logger)"
    environment = {**os.environ, "PYTHONPATH": str(target)}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert printed == "detectron2.utils detectron2\n"
