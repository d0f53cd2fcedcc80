"""Puts csrc/ into wheels: `torchtitan_dmuon.native` compiles from it. Else see pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Copies the C++ sources beside the modules. An editable install reads the checkout's."""

    def run(self):
        super().run()
        if not self.editable_mode:
            source = Path(__file__).resolve().parent / "csrc"
            target = Path(self.build_lib) / "torchtitan_dmuon" / "csrc"
            shutil.copytree(source, target, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildPy})
