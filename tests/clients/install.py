"""Installs the clients that other people wrote, each set in an environment of its own: `make test-clients` calls it.

`environments/NAME.in` says what is wanted, `NAME.constraints` pins all of it; `package-lock.json` does both for npm.
"""

import hashlib
import shutil
import subprocess
import time
import venv
from collections.abc import Callable
from pathlib import Path

WANTED = Path(__file__).parent / "environments"
ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / ".clients"


def main() -> None:
    for wanted in sorted(WANTED.glob("*.in")):
        install_python(wanted)
    for name, wanted in (("node", WANTED), ("agents", WANTED / "agents")):
        _install(name, [wanted / "package.json", wanted / "package-lock.json"], _npm)


def install_python(wanted: Path) -> Path:
    """Installs NAME.in with NAME.constraints into an environment of Python; returns its directory."""
    _install(wanted.stem, [wanted, wanted.with_suffix(".constraints")], _python)
    return CLIENTS / wanted.stem


def _install(name: str, sources: list[Path], install: Callable[..., None]) -> None:
    """Installs an environment unless it is there and its sources have not changed."""
    place = CLIENTS / name
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    stamp = place / ".installed"
    if stamp.is_file() and stamp.read_text() == digest:
        return
    print(f"==> installing {name} into {CLIENTS.name}", flush=True)
    start_s = time.monotonic()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    install(place, *sources)
    stamp.write_text(digest)
    print(f"    done in {time.monotonic() - start_s:.0f} s", flush=True)


def _python(place: Path, wanted: Path, constraints: Path) -> None:
    venv.create(place, with_pip=True)
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", str(constraints), "--requirement", str(wanted)], check=True)


def _npm(place: Path, package: Path, lock: Path) -> None:
    for source in (package, lock):
        shutil.copy(source, place)
    subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"], cwd=place, check=True)


if __name__ == "__main__":
    main()
