"""Links what a wheel requires, and what that requires, from this interpreter's environment into another's.

Arguments: the other's site-packages, and the wheel; without a wheel everything is linked.
"""

import sys
from email import message_from_bytes
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement


def main(target: Path, wheel: str = "") -> None:
    if not wheel:
        (target / "dependencies.pth").write_text(f"{distribution('grpcio').locate_file('')}\n")
        return
    for name in sorted(required(wheel)):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (target / top).exists():
                (target / top).symlink_to(str(found.locate_file(top)))


def required(wheel: str) -> set[str]:
    """Names of all distributions that the wheel needs, but for extras."""
    with ZipFile(wheel) as opened:
        (metadata,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        waiting = message_from_bytes(opened.read(metadata)).get_all("Requires-Dist") or []
    found: set[str] = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in found:
            found.add(requirement.name)
            waiting.extend(distribution(requirement.name).requires or ())
    return found


main(Path(sys.argv[1]), *sys.argv[2:])
