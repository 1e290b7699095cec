"""What packaging needs besides pyproject.toml: as the setup.py of the tree's root."""

import runpy

from setuptools import setup

split = runpy.run_path("../split.py")
setup(cmdclass={"build_py": split["build_part"]("baton-client")}, project_urls=split["project_urls"]())
