"""Installs the clients that other people wrote, each set in an environment of its own: `make test-clients` calls it.

`environments/NAME.in` says what is wanted, `NAME.constraints` pins all of it; `package-lock.json` does both for npm.
"""

import ctypes.util
import hashlib
import shutil
import subprocess
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path

WANTED = Path(__file__).parent / "environments"
ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / ".clients"
# These see the project's packages: torch and transformers alone would take gigabytes a second time.
SHARING = ("sentence_transformers",)
# Mooncake's programs need them even where there is no RDMA: Debian's packages of libibverbs and what it needs.
RDMA_PACKAGES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")


def main() -> None:
    for wanted in sorted(WANTED.glob("*.in")):
        install_python(wanted)
    install_mooncake()
    for name, wanted in (("node", WANTED), ("agents", WANTED / "agents")):
        _install(name, [wanted / "package.json", wanted / "package-lock.json"], _npm)


def install_mooncake() -> Path:
    """Installs Mooncake Store; returns its directory, in which `system` has the libraries that the machine lacks."""
    place = install_python(WANTED / "mooncake.in")
    libraries = place / "system"
    if ctypes.util.find_library("ibverbs") is None and not libraries.exists():
        with tempfile.TemporaryDirectory() as folder:
            _extract_from_debian(RDMA_PACKAGES, Path(folder))
            libraries.mkdir()
            for found in Path(folder).rglob("*.so*"):
                shutil.copy(found, libraries)
    return place


def _extract_from_debian(packages: tuple[str, ...], folder: Path) -> None:
    """Unpacks Debian's packages into the folder. Package lists of our own need no root, and are never old."""
    apt = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root"]
    for name, option in (("lists", "Dir::State::lists"), ("cache", "Dir::Cache")):
        (folder / name / ("partial" if name == "lists" else "archives/partial")).mkdir(parents=True)
        apt += ["-o", f"{option}={folder / name}"]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *packages], cwd=folder, check=True)
    for file in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", file, folder], check=True)


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
    if wanted.stem in SHARING:
        packages = sysconfig.get_path("purelib", vars={"base": str(place)})
        Path(packages, "project.pth").write_text(sysconfig.get_path("purelib"))
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", str(constraints), "--requirement", str(wanted)], check=True)


def _npm(place: Path, package: Path, lock: Path) -> None:
    for source in (package, lock):
        shutil.copy(source, place)
    subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"], cwd=place, check=True)


if __name__ == "__main__":
    main()
