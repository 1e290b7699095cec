"""What packaging needs besides pyproject.toml: protobuf code, the modules of this distribution, its address."""

import runpy

from setuptools import setup

split = runpy.run_path("deploy/packages/split.py")
setup(cmdclass={"build_py": split["build_part"]("baton-serving")}, project_urls=split["project_urls"]())
