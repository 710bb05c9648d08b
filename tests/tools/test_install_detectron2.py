"""tools/install_detectron2.py: run as a command, with real pip and git, and with small wheels made here.

Nothing is installed into the environment that runs the tests, and no network is needed.
"""

import hashlib
import importlib.util
import os
import socket
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "install_detectron2.py"
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


@pytest.fixture(scope="module")
def tool():
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location("install_detectron2", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def without_detectron2(tmp_path):
    """A folder for PYTHONPATH that makes any detectron2 of this environment fail to import."""
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "detectron2.py").write_text('raise ImportError("hidden by the test")\n')
    return folder


def write_bundle(folder: Path, files: dict) -> Path:
    """Write a wheel that passes for the bundle, with the given files."""
    info = "labgym-3.1.2.dist-info/"
    metadata = {
        info + "METADATA": "Metadata-Version: 2.1\nName: LabGym\nVersion: 3.1.2\nRequires-Python: <3.11\n",
        info + "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        info + "RECORD": "",
    }
    folder.mkdir(exist_ok=True)
    wheel = folder / WHEEL_NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in {**files, **metadata}.items():
            archive.writestr(name, content)
    return wheel


def run_tool(*arguments, tmp_path, wheels=None, **environment):
    """Run the tool as a command, with a folder of wheels as its index; no temporary file may be left."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels or tmp_path)}
    result = subprocess.run(
        [sys.executable, TOOL, *arguments],
        env={**os.environ, **offline, "TMPDIR": str(scratch), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    # torch makes its cache there whenever it is imported
    assert [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor")] == []
    return result


def assert_one_error_line(result, *parts):
    """Check that standard error is one line, an error that has all the parts."""
    assert result.returncode == 1
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


# The command ------------------------------------------------------------------------------------------------


def test_help_has_an_example(tmp_path):
    result = run_tool("--help", tmp_path=tmp_path)
    assert result.returncode == 0
    assert "example: python tools/install_detectron2.py" in result.stdout
    assert "--source {auto,git,index}" in result.stdout


def test_unknown_source_is_refused(tmp_path):
    result = run_tool("--source", "conda", tmp_path=tmp_path)
    assert result.returncode == 2
    assert "invalid choice: 'conda'" in result.stderr


@pytest.mark.slow
def test_keeps_the_detectron2_that_imports(tmp_path):
    package = tmp_path / "path" / "detectron2"
    for module in ("engine", "model_zoo"):
        (package / module).mkdir(parents=True)
        (package / module / "__init__.py").touch()
    (package / "__init__.py").write_text('__version__ = "0.7.test"\n')
    result = run_tool(tmp_path=tmp_path, PYTHONPATH=str(package.parent))
    assert (result.returncode, result.stderr) == (0, "")
    assert f"keeping detectron2 0.7.test at {package}\n" in result.stdout
    assert "compiled operators (detectron2._C): not there; torchvision's operators are used" in result.stdout


@pytest.mark.slow
def test_keeps_the_one_of_this_environment(tmp_path):
    if importlib.util.find_spec("detectron2") is None:
        pytest.skip("no detectron2 is installed")
    result = run_tool(tmp_path=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("keeping detectron2 ")
    assert "compiled operators" in result.stdout


@pytest.mark.slow
def test_wrong_hash_names_both(tmp_path, without_detectron2, tool):
    wheel = write_bundle(tmp_path / "wheels", BUNDLED)
    result = run_tool("--source", "index", tmp_path=tmp_path, wheels=wheel.parent, PYTHONPATH=str(without_detectron2))
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert_one_error_line(result, WHEEL_NAME, found, tool.BUNDLE_SHA256)


def git_redirect(tool, target):
    """Environment that makes git look for the official repository elsewhere."""
    return {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{target}.insteadOf",
        "GIT_CONFIG_VALUE_0": tool.GIT_URL,
    }


@pytest.mark.slow
def test_unreachable_repository_is_one_line(tmp_path, without_detectron2, tool):
    nowhere = git_redirect(tool, f"file://{tmp_path}/nowhere")
    result = run_tool("--source", "git", tmp_path=tmp_path, PYTHONPATH=str(without_detectron2), **nowhere)
    assert_one_error_line(result, "cannot be reached", "--source index")


@pytest.mark.slow
def test_without_any_network(tmp_path, without_detectron2, tool):
    nowhere = git_redirect(tool, f"file://{tmp_path}/nowhere")
    result = run_tool(tmp_path=tmp_path, PYTHONPATH=str(without_detectron2), **nowhere)
    assert "not keeping detectron2" in result.stdout and "hidden by the test" in result.stdout
    assert "not from git: the official repository cannot be reached" in result.stdout
    assert_one_error_line(result, "LabGym==3.1.2", "could not be downloaded", "network")


# Its parts --------------------------------------------------------------------------------------------------


def test_missing_git_is_named(tool, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tool.git_problem() == "git is not installed"


@pytest.mark.slow
def test_silent_host_is_given_up(tool, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        redirect = git_redirect(tool, f"http://127.0.0.1:{silent.getsockname()[1]}/")
        for name, value in redirect.items():
            monkeypatch.setenv(name, value)
        for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(proxy, raising=False)
        assert "did not answer within 2 s" in tool.git_problem(timeout=2)
        connection, _ = silent.accept()
        with connection:  # its other end is closed, hence git's helper processes have ended too
            connection.settimeout(5)
            while connection.recv(4096):
                pass


def test_last_error_is_quoted_without_its_prefix(tool):
    output = "Looking for it\nERROR: first\nERROR: No matching distribution found\n[notice] a new pip\n"
    assert tool.last_error(output) == "No matching distribution found"
    assert tool.last_error("") == "no output"


def test_other_traces_of_the_bundle_are_refused(tool):
    assert tool.without_prefix(b"import LabGym.detectron2.data\n", "a.py") == b"import detectron2.data\n"
    for content in (b"from LabGym import detectron2\n", b"import LabGym.tools\n", b"labgym\n"):
        with pytest.raises(tool.InstallError, match="a.py"):
            tool.without_prefix(content, "a.py")


def test_bundle_without_detectron2_is_refused(tool, tmp_path):
    wheel = write_bundle(tmp_path / "wheels", {"LabGym/__init__.py": ""})
    with pytest.raises(tool.InstallError, match="holds no LabGym/detectron2/"):
        tool.unpack(wheel, tmp_path / "project")


@pytest.mark.slow
def test_bundle_becomes_a_package_of_its_own(tool, tmp_path, monkeypatch):
    pytest.importorskip("setuptools")
    pytest.importorskip("wheel")
    wheel = write_bundle(tmp_path / "wheels", BUNDLED)
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(wheel.parent)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    downloaded = tool.download_bundle(tmp_path / "download")
    tool.check_hash(downloaded, hashlib.sha256(wheel.read_bytes()).hexdigest())
    project, target = tmp_path / "project", tmp_path / "target"
    tool.unpack(downloaded, project)
    tool.write_project(project)
    tool.run_pip(["install", "--no-deps", "--no-build-isolation", "--target", str(target), str(project)], tmp_path)

    wanted = {name.removeprefix("LabGym/") for name in BUNDLED if name.startswith("LabGym/detectron2/")}
    files = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert {name for name in files if name.startswith("detectron2/") and not name.endswith(".pyc")} == wanted
    assert not any(b"LabGym" in (target / name).read_bytes() for name in wanted)

    (info,) = target.glob("detectron2-*.dist-info")
    metadata = message_from_string((info / "METADATA").read_text())
    assert (metadata["Name"], metadata["Version"]) == ("detectron2", "0.6+labgym3.1.2")
    assert metadata["License"] == "Apache-2.0" and "LabGym 3.1.2" in metadata["Summary"]
    assert "setuptools<81" in metadata.get_all("Requires-Dist")
    assert list(info.rglob("LICENSE"))

    code = "import detectron2; print(detectron2.label, detectron2.utils.engine.logger)"
    environment = {**os.environ, "PYTHONPATH": str(target)}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert printed == "detectron2.utils detectron2\n"
