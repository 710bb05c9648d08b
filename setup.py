"""Build step of the package. pyproject.toml has the metadata and the requirements."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Copy configs/ into the installed package. An editable install reads configs/ in the repository instead."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_tree("configs", str(Path(self.build_lib, "projects_vil/configs")))


setup(cmdclass={"build_py": BuildWithConfigs})
