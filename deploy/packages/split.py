"""Which distribution each module belongs to. All of them install into the same folders, and no file belongs to two.

`tests/unit/baton/test_distributions.py` proves that each one imports only itself and what it depends on.
"""

import os
import runpy
from fnmatch import fnmatchcase
from pathlib import Path

from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parents[2]
CLIENT = (
    "baton",
    "baton.client*",
    "baton.core",
    "baton.core.error_codes",
    "baton.core.errors",
    "baton.core.limits",
    "baton.core.proxies",
    "baton.core.regular_file",
    "baton.core.sampling",
    "baton.core.sampling_field",
    "baton.core.setting_names",
    "baton.core.types",
    "baton.core.version",
    "baton.protos",
    "baton.protos.v1*",
    "baton.rpc",
    "baton.rpc.channels",
    "baton.rpc.convert",
    "baton.rpc.error_detail",
    "baton.rpc.status",
    "baton.security",
    "baton.security.access",
    "baton.security.channels",
    "baton.security.exposure",
    "baton.security.pem",
    "baton.security.roles",
    "baton.security.tls",
    "baton.security.watched",
    "baton.settings",
    "baton.settings.environment",
)
TOOLS = ("baton.load*", "baton.planner*", "baton.training*")
PARTS = {"baton-client": CLIENT, "baton-tools": TOOLS}
REST = "baton-serving"


def distribution_of(module: str) -> str:
    """The distribution of a module or package, by its dotted name."""
    owners = [name for name, patterns in PARTS.items() if any(fnmatchcase(module, each) for each in patterns)]
    assert len(owners) < 2, f"{module} belongs to {owners}"
    return owners[0] if owners else REST


def build_part(distribution: str) -> type[build_py]:
    """The build command of one distribution: it generates the protobuf code, and takes that distribution's files."""

    class BuildPart(build_py):
        def run(self) -> None:
            runpy.run_path(str(ROOT / "protos/generate.py"))["generate"](with_stubs=False)
            super().run()

        def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
            found = super().find_package_modules(package, package_dir)
            return [
                (owner, module, path)
                for owner, module, path in found
                if distribution_of(owner if module == "__init__" else f"{owner}.{module}") == distribution
            ]

        def find_data_files(self, package: str, src_dir: str) -> list[str]:
            return super().find_data_files(package, src_dir) if distribution_of(package) == distribution else []

    return BuildPart


def project_urls() -> dict[str, str]:
    """Addresses of the project; a distribution built without BATON_REPOSITORY_URL names no repository."""
    urls = {"License": "https://www.apache.org/licenses/LICENSE-2.0"}
    repository = os.environ.get("BATON_REPOSITORY_URL", "")
    return {"Repository": repository, **urls} if repository else urls
