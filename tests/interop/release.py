"""An earlier version of Baton, as its wheel has it, in processes of its own.

No version has been published yet. The wheel is built from the last commit whose nodes speak no newer wire version than
the oldest one that is still spoken, with the commit in its version and without the weights of the demo models.
"""

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from baton.settings.environment import child_environment

VERSION = "0.1.0+g85de5aa"
_WHEEL = Path(__file__).parent / f"baton_serving-{VERSION}-py3-none-any.whl"
_INSTALLED = Path(__file__).resolve().parents[2] / ".cache" / "interop"


def installed() -> Path:
    """The directory in which the wheel is installed; its dependencies are this environment's."""
    place = _INSTALLED / VERSION
    if place.is_dir():
        return place
    _INSTALLED.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(_WHEEL) as wheel:  # of pure Python: to unpack it is to install it
        wheel.extractall(unpacked := Path(mkdtemp(dir=_INSTALLED)))
    with suppress(OSError):  # another process was faster
        unpacked.rename(place)
    return place


def launch_release(program: str, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
    """As `baton.cli.processes.launch`, of the earlier version."""
    place = installed()
    return subprocess.Popen(
        [sys.executable, "-m", program, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        env=child_environment(OMP_NUM_THREADS="1", PYTHONPATH=str(place)),
        cwd=place,
        start_new_session=True,
    )
