"""What packaging needs besides pyproject.toml: the generated protobuf code, and the project's address.

`BATON_REPOSITORY_URL` is where the repository is published. A wheel built without it names no repository.
"""

import os
import runpy

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithProtos(build_py):
    def run(self) -> None:
        runpy.run_path("protos/generate.py")["generate"](with_stubs=False)
        super().run()


def project_urls(repository: str) -> dict[str, str]:
    urls = {"License": "https://www.apache.org/licenses/LICENSE-2.0"}
    return {"Repository": repository, **urls} if repository else urls


setup(
    cmdclass={"build_py": BuildWithProtos},
    project_urls=project_urls(os.environ.get("BATON_REPOSITORY_URL", "")),
)
