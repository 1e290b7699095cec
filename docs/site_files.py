"""Hooks of mkdocs: the site has the repository's pages, under their paths there, and every file that they link to."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/*.md",
    "SECURITY.md",
    "deploy/README.md",
    "examples/README.md",
    "examples/kubernetes/README.md",
    "baton/models/demo/README.md",
    "bench/results/*.md",
)
_ASSETS = ("docs/site.css",)
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")


def pages() -> list[Path]:
    """All pages of the site."""
    return sorted(path for pattern in PAGES for path in ROOT.glob(pattern))


def linked_files() -> list[Path]:
    """The files of the repository, other than pages, that pages link to."""
    found = set()
    for page in pages():
        for target in _LINK.findall(_FENCE.sub("", page.read_text())):
            path = (page.parent / unquote(target)).resolve()
            if ":" not in target and path.is_file() and path.is_relative_to(ROOT):
                found.add(path)
    return sorted(found - set(pages()))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leaves out of the navigation what is not there yet, and adds the results of benchmarks."""
    assert config.nav is not None
    config.nav = _present(config.nav)
    results = sorted(ROOT.glob("bench/results/*.md"))
    benchmarks = next(item["Benchmarks"] for item in config.nav if "Benchmarks" in item)
    benchmarks += [{title_of(path): path.relative_to(ROOT).as_posix()} for path in results]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    ours = [_file(path, config) for path in (*pages(), *linked_files(), *(ROOT / name for name in _ASSETS))]
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *ours])


def title_of(page: Path) -> str:
    """Its first heading."""
    return next(line for line in page.read_text().splitlines() if line.startswith("# ")).removeprefix("# ")


def _present(nav: list[Any]) -> list[Any]:
    """The navigation without files that do not exist."""
    kept: list[Any] = []
    for item in nav:
        ((title, value),) = item.items()
        if isinstance(value, list):
            kept.append({title: _present(value)})
        elif (ROOT / value).is_file():
            kept.append(item)
    return kept


def _file(path: Path, config: MkDocsConfig) -> File:
    name = path.relative_to(ROOT).as_posix()
    destination = None
    if path.suffix == ".md":
        page = "" if name == "README.md" else name.removeprefix("docs/").removesuffix(".md").removesuffix("/README")
        destination = f"{page.lower()}/index.html".lstrip("/")
    elif path.suffix not in (".svg", ".png", ".css", ".json"):
        destination = f"source/{name}.txt"  # shown by browsers, not saved
    return File(name, str(ROOT), config.site_dir, config.use_directory_urls, dest_uri=destination)
