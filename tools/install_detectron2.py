"""Install detectron2, or keep the one that is here.

detectron2 is not on the package index, so it cannot be an ordinary requirement. There are two ways to it:

* git: the official repository at a pinned commit, with compiled operators. Needs a compiler and the git host.
* index: the complete pure-Python copy that the LabGym wheel carries, taken out of it and installed as a
  package of its own. Needs the package index only. It has no compiled operators; torchvision's are used.

Only the standard library is used here: torch and torchvision may be all that is installed.
"""

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import pprint
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 13)
BUILD_REQUIREMENTS = ("setuptools<81", "wheel")

GIT_URL = "https://github.com/facebookresearch/detectron2"
GIT_COMMIT = "02b5c4e295e990042a714712c21dc79b731e8833"
GIT_TIMEOUT = 20  # seconds to find out whether the repository can be reached
# No question is ever asked, and a transfer that stalls for half a minute ends.
GIT_SETTINGS = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "",
    "SSH_ASKPASS": "",
    "GCM_INTERACTIVE": "never",
    "GIT_SSH_COMMAND": "ssh -o BatchMode=yes",
    "GIT_HTTP_LOW_SPEED_LIMIT": "1000",
    "GIT_HTTP_LOW_SPEED_TIME": "30",
}

BUNDLE = "LabGym==3.1.2"
BUNDLE_PYTHON = "3.10"  # the newest that this release admits; the part taken from it runs on later ones
BUNDLE_SHA256 = "a2900cff8a3fb508e1975f19b5f9abd9f261966db87b0c332697fb4138c1cb2b"
BUNDLE_FOLDER = "LabGym/detectron2/"
BUNDLE_PREFIX = re.compile(rb"\bLabGym\.(?=detectron2\b)")

METADATA = {
    "name": "detectron2",
    "version": "0.6+labgym3.1.2",
    "description": "FAIR's detectron2 as of 2024-01-08: the pure-Python copy carried by LabGym 3.1.2",
    "long_description": (
        f"detectron2 of {GIT_URL}, commit 864913f0 of 2024-01-08, without its compiled operators.\n"
        "Taken from the wheel of LabGym 3.1.2 by tools/install_detectron2.py of vil-detectron2, which\n"
        "changed one thing: it removed the prefix `LabGym.` from the module names.\n"
    ),
    "author": "FAIR",
    "url": GIT_URL,
    "license": "Apache-2.0",
    "python_requires": ">=3.7",
    "install_requires": [
        "Pillow>=7.1",
        "matplotlib",
        "pycocotools>=2.0.2",
        "termcolor>=1.1",
        "yacs>=0.1.8",
        "tabulate",
        "cloudpickle",
        "tqdm>4.29.0",
        "tensorboard",
        "fvcore>=0.1.5,<0.1.6",
        "iopath>=0.1.7,<0.1.10",
        "omegaconf>=2.1,<2.4",
        "hydra-core>=1.1",
        "black",
        "packaging",
        "setuptools<81",  # detectron2.model_zoo imports pkg_resources, which later ones do not have
    ],
    "package_data": {"detectron2.model_zoo": ["configs/**/*.yaml", "configs/**/*.py"]},
}
SETUP_PY = """from setuptools import find_packages, setup

setup(packages=find_packages(exclude=["detectron2.model_zoo.configs*"]), **{metadata})
"""
PYPROJECT_TOML = """[build-system]
requires = ["setuptools>=64"]
build-backend = "setuptools.build_meta"
"""


class InstallError(Exception):
    """What went wrong and the way out, in one line."""


class Probe(NamedTuple):
    """What this interpreter finds when it imports detectron2. Empty strings stand for nothing to say."""

    torch_problem: str
    present: bool
    problem: str
    version: str
    folder: str
    operators: str  # "" when the compiled operators load, otherwise why not


# Looking ----------------------------------------------------------------------------------------------------


def import_problem(*names: str) -> str:
    """Return why one of the modules cannot be imported, in one line, or an empty string."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            lines = str(error).splitlines()
            return f"{type(error).__name__}: {lines[0] if lines else name}"
    return ""


def look() -> Probe:
    """Import torch and detectron2 in this process, and say how that went."""
    torch_problem = import_problem("torch", "torchvision")
    spec = importlib.util.find_spec("detectron2")
    if torch_problem or spec is None:
        return Probe(torch_problem, spec is not None, "", "", "", "")
    folder = os.path.dirname(spec.origin or "") or str(spec.submodule_search_locations or "")
    # These two reach all that the project imports, so that an install which was cut short shows.
    problem = import_problem("detectron2", "detectron2.model_zoo", "detectron2.engine")
    if problem:
        return Probe("", True, problem, "", folder, "")
    return Probe("", True, "", installed_version(), folder, operators_problem())


def installed_version() -> str:
    """Return detectron2's version; that of its distribution where this only adds a label such as +cu118."""
    from importlib import metadata

    version = getattr(sys.modules["detectron2"], "__version__", "of unknown version")
    try:
        distribution = metadata.version("detectron2")
    except metadata.PackageNotFoundError:
        return version
    return distribution if distribution.split("+")[0] == version else version


def operators_problem() -> str:
    """Return why detectron2's compiled operators cannot be used, or an empty string."""
    if importlib.util.find_spec("detectron2._C") is None:
        return "not there"
    problem = import_problem("detectron2._C")
    return f"there, but do not load ({problem})" if problem else ""


def probe() -> Probe:
    """Look in a fresh interpreter, which sees what was installed a moment ago and may crash on its own."""
    command = [sys.executable, "-W", "ignore", os.path.abspath(__file__), "--probe"]
    quiet = subprocess.DEVNULL
    result = subprocess.run(command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet)
    try:
        return Probe(*json.loads(result.stdout.decode().splitlines()[-1]))
    except (ValueError, IndexError):
        problem = f"importing it ended the interpreter with exit code {result.returncode}"
        return Probe("", True, problem, "", "", "")


def describe(found: Probe) -> str:
    """Return "detectron2 VERSION at FOLDER", as far as these are known."""
    return " ".join(filter(None, ["detectron2", found.version, found.folder and f"at {found.folder}"]))


def describe_operators(found: Probe) -> str:
    """Return the line that says whether the compiled operators are there."""
    if not found.operators:
        return "compiled operators (detectron2._C): there"
    return (
        f"compiled operators (detectron2._C): {found.operators}; torchvision's operators are used "
        "(detectron2's own deformable convolutions and rotated boxes are unavailable)"
    )


# Running pip and git ----------------------------------------------------------------------------------------


def say(line: str) -> None:
    """Print at once, also into a pipe."""
    print(line, flush=True)


def last_error(output: str) -> str:
    """Return the last line of pip's or git's output that reports an error; failing that the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(error|fatal)\b", line, re.IGNORECASE)]
    line = (errors or lines or ["no output"])[-1]
    return re.sub(r"^(error|fatal):\s*", "", line, flags=re.IGNORECASE)


def run_pip(arguments: list, work: Path) -> None:
    """Run pip with its temporary files in `work`; raise InstallError with its last error line if it fails."""
    settings = dict(os.environ, PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1", TMPDIR=str(work))
    settings.update(GIT_SETTINGS)
    result = subprocess.run(
        [sys.executable, "-m", "pip"] + arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=settings,
    )
    if result.returncode:
        raise InstallError(f"pip says: {last_error(result.stdout.decode(errors='replace'))}")


def git_problem(timeout: float = GIT_TIMEOUT) -> str:
    """Return why the official repository cannot be used, or an empty string, within `timeout` seconds."""
    if shutil.which("git") is None:
        return "git is not installed"
    process = subprocess.Popen(
        ["git", "ls-remote", "--exit-code", GIT_URL, "HEAD"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=dict(os.environ, LC_ALL="C", **GIT_SETTINGS),
        start_new_session=True,  # a group of its own, so that git's helper processes end with it
    )
    try:
        output = process.communicate(timeout=timeout)[1].decode(errors="replace")
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return f"{GIT_URL} did not answer within {timeout:g} s"
        raise
    return last_error(output) if process.returncode else ""


# The two ways -----------------------------------------------------------------------------------------------


def install_from_git(before: Probe, work: Path) -> None:
    """Build and install the pinned official commit."""
    problem = git_problem()
    if problem:
        raise InstallError(f"the official repository cannot be reached ({problem})")
    say(f"installing detectron2 from {ORIGINS['git']}; compiling its operators takes up to 10 minutes")
    try:
        run_pip(["install", *BUILD_REQUIREMENTS], work)
        if before.present:  # pip would take a broken one of the same version for this one
            run_pip(["uninstall", "--yes", "detectron2"], work)
        run_pip(["install", "--no-build-isolation", f"git+{GIT_URL}@{GIT_COMMIT}"], work)
    except InstallError as error:
        raise InstallError(f"the official commit could not be built and installed ({error})") from None


def install_from_index(before: Probe, work: Path) -> None:
    """Take detectron2 out of the bundle on the package index, and install it as a package of its own."""
    say(f"installing detectron2 and its requirements from {ORIGINS['index']}")
    wheel = download_bundle(work / "download")
    check_hash(wheel, BUNDLE_SHA256)
    project = work / "detectron2"
    unpack(wheel, project)
    write_project(project)
    try:
        run_pip(["install", str(project)], work)
    except InstallError as error:
        raise InstallError(
            f"the copy in {BUNDLE}, or one of its requirements, could not be installed ({error}); "
            "check the network connection and pip's index settings, then run this again"
        ) from None


def download_bundle(folder: Path) -> Path:
    """Download the bundle's wheel, and nothing that it requires, into `folder`."""
    folder.mkdir(parents=True)
    choice = ["--no-deps", "--only-binary=:all:", "--python-version", BUNDLE_PYTHON]
    try:
        run_pip(["download", "--retries", "1", "--timeout", "8", *choice, "--dest", str(folder), BUNDLE], folder.parent)
    except InstallError as error:
        raise InstallError(
            f"{BUNDLE} could not be downloaded ({error}); "
            "check the network connection and pip's index settings, then run this again"
        ) from None
    return next(folder.glob("*.whl"))


def check_hash(wheel: Path, expected: str) -> None:
    """Raise InstallError unless the file has the expected SHA-256."""
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != expected:
        raise InstallError(
            f"{wheel.name} has the SHA-256 {found}, but {expected} was expected; it is not used: "
            "look at where pip takes it from (`pip config list`), then run this again"
        )


def unpack(wheel: Path, project: Path) -> None:
    """Write the bundle's detectron2 to `project`, its module names without the bundle's prefix."""
    with zipfile.ZipFile(str(wheel)) as archive:
        names = [name for name in archive.namelist() if name.startswith(BUNDLE_FOLDER) and name[-1] != "/"]
        if not names:
            raise InstallError(f"{wheel.name} holds no {BUNDLE_FOLDER}; install another release by hand")
        for name in names:
            target = project / "detectron2" / name[len(BUNDLE_FOLDER) :]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(without_prefix(archive.read(name), name))


def without_prefix(content: bytes, name: str) -> bytes:
    """Remove the bundle's prefix from module names, also in strings; raise where another trace remains."""
    content = BUNDLE_PREFIX.sub(b"", content)
    if b"labgym" in content.lower():
        raise InstallError(f"{name} names LabGym otherwise than as a prefix of detectron2; it is not used")
    return content


def write_project(project: Path) -> None:
    """Write what makes a setuptools project of the unpacked detectron2: build files and the licence."""
    metadata = pprint.pformat(METADATA, width=110)
    (project / "setup.py").write_text(SETUP_PY.format(metadata=metadata), encoding="utf-8")
    (project / "pyproject.toml").write_text(PYPROJECT_TOML, encoding="utf-8")
    licence = Path(__file__).resolve().parent.parent / "LICENSE"  # Apache-2.0, which is detectron2's too
    if licence.is_file():
        shutil.copy(str(licence), str(project / "LICENSE"))


WAYS = {"git": install_from_git, "index": install_from_index}
ORIGINS = {
    "git": f"{GIT_URL} at {GIT_COMMIT[:8]}",
    "index": f"the copy that {BUNDLE} on the package index carries",
}


# The command ------------------------------------------------------------------------------------------------


def check_surroundings(found: Probe) -> None:
    """Raise InstallError where the environment lacks what either way needs."""
    if found.torch_problem:
        raise InstallError(
            f"detectron2 needs torch and torchvision, and they do not import ({found.torch_problem}); "
            f"way out: {sys.executable} -m pip install torch torchvision"
        )
    if importlib.util.find_spec("pip") is None:
        raise InstallError(f"pip is missing; way out: {sys.executable} -m ensurepip")


def install_one_way(way: str, before: Probe) -> Probe:
    """Install by one way and return what is found then; when it does not import, take it away and raise."""
    with tempfile.TemporaryDirectory(prefix="install-detectron2-") as folder:
        work = Path(folder)
        WAYS[way](before, work)
        found = probe()
        if found.problem or not found.present:
            run_pip(["uninstall", "--yes", "detectron2"], work)
            raise InstallError(
                f"{describe(found)} does not import after the install ({found.problem or 'not found'}), "
                "which was undone; remove that copy or mend what it lacks, then run this again"
            )
    say(f"installed {describe(found)} from {ORIGINS[way]}")
    return found


def install(source: str, before: Probe) -> Probe:
    """Install from the source; "auto" tries git, says in a line why that failed, and goes on to the index."""
    if source != "index":
        try:
            return install_one_way("git", before)
        except InstallError as error:
            if source == "git":
                raise InstallError(f"{error}; way out: --source index") from None
            say(f"not from git: {error}")
    return install_one_way("index", before)


def run(source: str) -> None:
    """Keep or install detectron2, and print which one it is."""
    if not OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        raise InstallError(f"this is Python {sys.version.split()[0]}, and 3.10 to 3.13 are supported: use one of these")
    found = probe()
    check_surroundings(found)
    if found.present and not found.problem:
        say(f"keeping {describe(found)}")
    else:
        if found.present:
            say(f"not keeping {describe(found)}: it does not import ({found.problem})")
        found = install(source, found)
    say(describe_operators(found))


def parse(arguments: list) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Install detectron2 beside torch, or keep the one that already imports.",
        epilog="example: python tools/install_detectron2.py --source index",
    )
    parser.add_argument(
        "--source",
        choices=["auto", "git", "index"],
        default="auto",
        help="git: the official commit, with compiled operators; index: a pure-Python copy from the package "
        "index; auto (default): git where it can be reached and built, otherwise index",
    )
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list = None) -> int:
    """Run the command, and return its exit status."""
    options = parse(arguments)
    if options.probe:
        print(json.dumps(look()))
        return 0
    try:
        run(options.source)
    except (InstallError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; run this again to finish", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
