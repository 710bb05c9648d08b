"""Build step of the package. pyproject.toml has the metadata and the requirements."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Copy configs/ and examples/ into the installed package. An editable install reads them in the repository."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in ("configs", "examples"):
                self.copy_tree(name, str(Path(self.build_lib, "projects_vil", name)))


setup(cmdclass={"build_py": BuildWithConfigs})
