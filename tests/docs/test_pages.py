"""Pages that come from code are up to date and complete, and the site is built without a broken link."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton.core import errors
from baton.kvcache.layout import LOGICAL_AXES, MLA_LAYOUTS, KVCacheLayout
from baton.models.families.reader import read_config
from baton.models.loading.needs import kv_cache_spec
from docs import benchmarks, models, troubleshooting, wire
from docs.site_files import ROOT, pages

_FENCED = re.compile(r"^ *```.*?^ *```", re.M | re.S)
_TEXT_AFTER_A_TABLE = re.compile(r"^\|.*\n(?!\||<!--)(.+)", re.M)
_AXES = {"L": "layer", "K": "key/value", "B": "block", "N": "slot", "H": "head", "C": "channel"}


@pytest.mark.parametrize("module", [benchmarks, models, troubleshooting, wire], ids=lambda module: module.__name__)
def test_a_page_is_made_from_the_code(module: object) -> None:
    assert module.PAGE.read_text() == module.page(), "run `make docs`"  # type: ignore[attr-defined]


def test_every_error_has_a_cause_and_a_cure() -> None:
    known = {
        error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, errors.BatonError)
    }
    assert set(troubleshooting.CAUSES) == known - {errors.BatonError}


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_the_page_of_layouts_has_the_order_of_each(layout: KVCacheLayout) -> None:
    left_out = "KH" if layout in MLA_LAYOUTS else ""
    assert set(layout.axes) == set(LOGICAL_AXES)
    order = ", ".join(_AXES[axis] for axis in layout.axes if axis not in left_out)
    row = next(line for line in _page("layouts.md").splitlines() if f"| `{layout.name}` |" in line)
    assert row.endswith(f"| {order} |")


def test_the_page_of_sizes_has_the_kv_of_a_token() -> None:
    rows = re.findall(r"^\| \[([\w.-]+)\]\S+ \| ([\d,]+) B \| ([\d,]+) B \| ([\d,]+) \|$", _page("planning.md"), re.M)
    assert rows
    for name, *cells in rows:
        config = read_config(ROOT / "bench" / "engine" / "configs" / name)
        bf16, fp8 = (kv_cache_spec(config, "bfloat16", dtype).bytes_per_token for dtype in ("", "float8_e4m3fn"))
        assert [int(cell.replace(",", "")) for cell in cells] == [bf16, fp8, (40 << 30) // bf16], name


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_an_empty_line_ends_each_table(page: Path) -> None:
    """Without one, Markdown shows the sentence after a table as its last row."""
    assert _TEXT_AFTER_A_TABLE.findall(_FENCED.sub("", page.read_text())) == []


def test_the_site_is_built_and_no_link_is_broken(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr
    hosts = [
        page for page in tmp_path.rglob("*.html") if 'src="http' in page.read_text() or "fonts.g" in page.read_text()
    ]
    assert hosts == [], "these pages load something from another host"
