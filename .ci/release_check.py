"""Check that this tree can be released: one version everywhere, complete packages, and a wheel that starts.

Example:
    python .ci/release_check.py
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = {
    "pyproject.toml": r'^version = "(.+)"',
    "CITATION.cff": r"^version: (.+)$",
    "CHANGELOG.md": r"^## \[?(\d[^\s\],]*)",
}


def run(*command: str) -> str:
    """Run a command in the repository and return its output, or exit with the output if it fails."""
    # With PYTHONPATH, pip finds this tree installed and leaves the wheel out.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    result = subprocess.run(command, cwd=ROOT, env=env, check=False, **output)
    if result.returncode:
        sys.exit(f"{result.stdout}error: '{' '.join(command)}' failed with status {result.returncode}")
    return result.stdout


def check_versions() -> str:
    """Return the version, the same in all files and in the release tags of this commit."""
    found = {}
    for name, pattern in VERSIONS.items():
        match = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        found[name] = match[1] if match else "no version"
    if (ROOT / ".git").exists():
        found |= {f"tag {tag}": tag[1:] for tag in run("git", "tag", "--points-at", "HEAD", "v*").split()}
    if len(set(found.values())) > 1:
        sys.exit(f"error: the versions differ: {', '.join(f'{name} has {version}' for name, version in found.items())}")
    return found["pyproject.toml"]


def check_wheel(wheel: Path) -> None:
    """Check that the wheel has the packages, their data and the configs, and nothing else."""
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    folders = {name.partition("/")[0] for name in names}
    if folders != {"backbones", "projects_vil", "vil", info}:
        sys.exit(f"error: {wheel.name} has the folders {', '.join(sorted(folders))}")
    files = [path for suffix in ("py", "yaml") for path in (ROOT / "configs").rglob(f"*.{suffix}")]
    configs = {f"projects_vil/{path.relative_to(ROOT).as_posix()}" for path in files}
    typed = {f"{package}/py.typed" for package in ("backbones", "projects_vil", "vil")}
    if missing := (configs | typed) - names:
        sys.exit(f"error: {wheel.name} lacks {', '.join(sorted(missing))}")


def try_wheel(wheel: Path, version: str) -> None:
    """Install the wheel without its requirements into a fresh environment, and start the command."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", str(wheel))
        location = run(python, "-I", "-c", "import vil; print(vil.__file__)")
        if not Path(location.strip()).is_relative_to(Path(folder).resolve()):
            sys.exit(f"error: 'import vil' found {location.strip()}, not the wheel")
        run(f"{folder}/bin/vil", "--help")
        if (shown := run(f"{folder}/bin/vil", "--version").strip()) != version:
            sys.exit(f"error: 'vil --version' prints {shown}, not {version}")


def main() -> None:
    version = check_versions()
    for old in (ROOT / "dist").glob("*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", "dist", ".")
    files = sorted((ROOT / "dist").iterdir())
    if [file.suffix for file in files] != [".whl", ".gz"] or any(f"-{version}" not in file.name for file in files):
        sys.exit(f"error: dist has {', '.join(file.name for file in files)}")
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, files))
    check_wheel(files[0])
    try_wheel(files[0], version)
    print(f"version {version} can be released: {', '.join(f'dist/{file.name}' for file in files)}")


if __name__ == "__main__":
    main()
