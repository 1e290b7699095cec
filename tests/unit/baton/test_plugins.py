"""Entry points of other distributions: found by name, and refused with the distribution's name if they do not fit."""

import os
import sys
from pathlib import Path

import pytest

from baton.core import plugins
from baton.core.errors import ConfigError
from baton.settings.node_config import PrefillSettings

GROUP = plugins.TRANSPORTS
OURS = {"ucx": 1, "loopback": 2}


def install(folder: Path, distribution: str, entry: str, *, code: str = "", group: str = GROUP) -> None:
    """Writes what pip leaves of a distribution with one module and one entry point."""
    module = distribution.replace("-", "_")
    info = folder / f"{module}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    (folder / f"{module}.py").write_text(code)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_part_of_another_distribution_is_found_by_its_name(folder: Path) -> None:
    install(folder, "pigeon-post", "pigeon = pigeon_post:PIGEON", code="PIGEON = 7\n")
    assert plugins.plugin_names(GROUP, OURS) == ("pigeon",)
    assert plugins.find_registered(GROUP, "pigeon", OURS, int) == 7
    assert plugins.find_registered(GROUP, "ucx", OURS, int) == 1
    assert plugins.find_registered(GROUP, "raven", OURS, int) is None


def test_a_distribution_that_is_installed_later_is_found(folder: Path) -> None:
    assert plugins.plugin_names(GROUP, OURS) == ()
    install(folder, "late-post", "late = late_post:KIND")
    os.utime(folder, ns=(1, 1))  # the clock of the file system may not have moved
    assert plugins.plugin_names(GROUP, OURS) == ("late",)


def test_a_plugin_is_not_imported_before_it_is_wanted(folder: Path) -> None:
    install(folder, "broken-post", "broken = broken_post:BROKEN", code="raise RuntimeError('imported')\n")
    assert plugins.find_registered(GROUP, "ucx", OURS, int) == 1


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import no_such_package_anywhere\n", "ModuleNotFoundError: No module named 'no_such_package_anywhere'"),
        ("", "AttributeError: module 'torn_post' has no attribute 'KIND'"),
        ("KIND = 'seven'\n", "it is of class str, not int"),
    ],
)
def test_a_broken_plugin_names_its_distribution_and_the_cure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    monkeypatch.delitem(sys.modules, "torn_post", raising=False)
    install(folder, "torn-post", "torn = torn_post:KIND", code=code)
    with pytest.raises(ConfigError) as caught:
        plugins.find_registered(GROUP, "torn", OURS, int)
    text = str(caught.value)
    assert text.startswith("torn-post 1.5 registers 'torn_post:KIND' as 'torn' in baton.transports, and ")
    assert why in text
    assert "pip uninstall torn-post" in text


def test_a_plugin_cannot_take_a_name_of_ours(folder: Path) -> None:
    install(folder, "other-ucx", "ucx = other_ucx:KIND")
    with pytest.raises(ConfigError, match=r"other-ucx 1\.5 registers 'ucx' .*, and Baton has it already"):
        plugins.find_registered(GROUP, "loopback", OURS, int)


def test_two_distributions_cannot_register_one_name(folder: Path) -> None:
    install(folder, "first-post", "post = first_post:KIND")
    install(folder, "second-post", "post = second_post:KIND")
    with pytest.raises(ConfigError) as caught:
        plugins.plugin_names(GROUP, OURS)
    assert all(name in str(caught.value) for name in ("first-post 1.5", "second-post 1.5"))


def test_a_transport_of_a_plugin_is_a_value_of_the_setting(folder: Path) -> None:
    install(folder, "pigeon-post", "pigeon = pigeon_post:PIGEON", code="PIGEON = 7\n")
    assert PrefillSettings(transport="pigeon").transport == "pigeon"
    with pytest.raises(ValueError, match="'raven' is not a transport; allowed: ucx, loopback, pigeon"):
        PrefillSettings(transport="raven")
