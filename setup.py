"""Builds the protobuf code before packaging; everything else is in pyproject.toml."""

import runpy

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithProtos(build_py):
    def run(self) -> None:
        runpy.run_path("protos/generate.py")["generate"](with_stubs=False)
        super().run()


setup(cmdclass={"build_py": BuildWithProtos})
