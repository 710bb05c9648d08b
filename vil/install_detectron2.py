"""Install detectron2, or keep an installed detectron2 that can be imported.

detectron2 is not on the package index, so pip cannot install it as a requirement. There are two sources:

* git: the official repository at a pinned commit, with compiled operators. It needs a compiler and access to GitHub.
* index: a complete pure-Python copy from the LabGym wheel, installed as a separate package. It needs the package index
  only. It uses the operators of torchvision instead of compiled operators.

Example:
    vil install-detectron2
    python tools/install_detectron2.py --source index
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from backbones.errors import ConfigError

GIT_URL = "https://github.com/facebookresearch/detectron2"
GIT_COMMIT = "02b5c4e295e990042a714712c21dc79b731e8833"
# git and pip do not prompt. git aborts a stalled transfer after 30 s.
SETTINGS = {
    **{"GIT_TERMINAL_PROMPT": "0", "GIT_HTTP_LOW_SPEED_LIMIT": "1000", "GIT_HTTP_LOW_SPEED_TIME": "30"},
    **{"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "LC_ALL": "C"},
}
BUNDLE = "LabGym==3.1.2"
# The newest version that this release of LabGym accepts. Its copy of detectron2 also runs on later versions.
BUNDLE_PYTHON = "3.10"
BUNDLE_SHA256 = "a2900cff8a3fb508e1975f19b5f9abd9f261966db87b0c332697fb4138c1cb2b"
BUNDLE_FOLDER = "LabGym/detectron2/"
PYPROJECT = Path(__file__).with_name("detectron2_pyproject.toml")
# Runs in a new interpreter, which finds a package that was just installed. detectron2 needs torch.
PROBE = """
import torch, torchvision, detectron2, detectron2.engine, detectron2.model_zoo
try:
    from detectron2 import _C
    operators = "its compiled operators"
except ImportError:
    operators = "torchvision's operators, and no rotated boxes"
print("detectron2", detectron2.__version__, "at", detectron2.__path__[0], "with", operators)
"""


def run(*command: str, timeout: float | None = None) -> str:
    """Run a command and return its output.

    Raises:
        ConfigError: If the command fails, with the last error in its output.
    """
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        result = subprocess.run(command, env={**os.environ, **SETTINGS}, timeout=timeout, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(str(error)) from error
    if result.returncode:
        lines = result.stdout.strip().splitlines() or [""]
        errors = [line for line in lines if re.match(r"\s*(error|fatal)\b", line, re.IGNORECASE)]
        raise ConfigError((errors or lines)[-1])
    return result.stdout


def probe() -> str:
    """Return a description of the installed detectron2.

    Raises:
        ConfigError: If detectron2 cannot be imported.
    """
    return run(sys.executable, "-W", "ignore", "-c", PROBE).splitlines()[-1]


def pip(*arguments: str) -> None:
    run(sys.executable, "-m", "pip", *arguments)


def install_from_git(work: Path) -> None:
    run("git", "ls-remote", "--exit-code", GIT_URL, "HEAD", timeout=20)
    print(f"installing {GIT_URL} at {GIT_COMMIT[:8]}: compiling takes up to 10 minutes", flush=True)
    pip("install", "setuptools<81", "wheel")
    # pip would keep a broken installation of the same version.
    pip("uninstall", "--yes", "detectron2")
    pip("install", "--no-build-isolation", f"git+{GIT_URL}@{GIT_COMMIT}")


def install_from_index(work: Path) -> None:
    print(f"installing the copy of detectron2 in {BUNDLE} from the package index, and its requirements", flush=True)
    choice = ["--no-deps", "--only-binary=:all:", "--python-version", BUNDLE_PYTHON, "--retries", "1", "--timeout", "8"]
    pip("download", *choice, "--dest", str(work), BUNDLE)
    (wheel,) = work.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != BUNDLE_SHA256:
        differs = f"has the SHA-256 {digest} instead of {BUNDLE_SHA256}"
        raise ConfigError(f"{wheel.name} {differs}. Check the index in 'pip config list'.")
    unpack(wheel, work / "detectron2")
    pip("install", str(work / "detectron2"))


def unpack(wheel: Path, project: Path) -> None:
    """Extract detectron2 from the LabGym wheel as a setuptools project. Module names lose the prefix ``LabGym.``"""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(BUNDLE_FOLDER) and not name.endswith("/"):
                content = re.sub(rb"\bLabGym\.(?=detectron2\b)", b"", archive.read(name))
                if b"labgym" in content.lower():
                    raise ConfigError(f"{name} in {wheel.name} needs LabGym. Report this as a bug.")
                target = project / "detectron2" / name.removeprefix(BUNDLE_FOLDER)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
    shutil.copy(PYPROJECT, project / "pyproject.toml")
    # detectron2 has the same license as this project, Apache-2.0.
    license_file = next(file for file in importlib.metadata.files("vil-detectron2") or () if file.name == "LICENSE")
    shutil.copy(license_file.locate(), project)


SOURCES = {"git": install_from_git, "index": install_from_index}


def install(source: str) -> None:
    """Install detectron2 unless it can be imported, and print its version and path.

    Args:
        source: ``"git"``, ``"index"``, or ``"auto"`` to try both in this order.

    Raises:
        ConfigError: If the installation fails.
    """
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("torchvision") is None:
        raise ConfigError(f"torch or torchvision is missing. Run '{sys.executable} -m pip install torch torchvision'.")
    try:
        print(f"keeping {probe()}")
        return
    except ConfigError as error:
        print(f"detectron2 cannot be imported: {error}", flush=True)
    for name in SOURCES if source == "auto" else [source]:
        with tempfile.TemporaryDirectory(prefix="install-detectron2-") as work:
            try:
                SOURCES[name](Path(work))
                print(f"installed {probe()}")
                return
            except ConfigError as error:
                if source == "git" or name == "index":
                    raise ConfigError(f"Cannot install detectron2 from {name}: {error}") from error
                print(f"cannot install from {name}: {error}", flush=True)
