"""Runs checkov over the manifests as they are meant to be deployed, and over the Dockerfile, for `make check-deploy`.

Checkov has an environment of its own. Where its advice is wrong, the object says so in an annotation `checkov.io/skip`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.clients.install import install_python
from tests.deploy.chart import Values, running_helm, values_of
from tests.deploy.manifests import OVERLAYS, ROOT, Rendered, render

ENVIRONMENT = Path(__file__).parent / "environments" / "checkov.in"
SCANNED = ("pinned-example",)
IMAGE: dict[str, Any] = {"image": {"digest": "sha256:" + "0" * 64}}
PINNED: Values = {"gateway": IMAGE, "prefill": IMAGE, "decode": IMAGE}


def main() -> None:
    checkov = install_python(ENVIRONMENT) / "bin" / "checkov"
    manifests = {name: render(OVERLAYS / name) for name in SCANNED}
    with running_helm() as helm:
        manifests["chart"] = helm.release(values_of("nvidia", "autoscaled"), PINNED).rendered
        pooled: Values = {"inferencePool": {"enabled": True}}
        manifests["chart-with-pool"] = helm.release(values_of("cpu-demo"), PINNED, pooled).rendered
    with tempfile.TemporaryDirectory() as folder:
        for name, rendered in manifests.items():
            _write(Path(folder) / f"{name}.yaml", rendered)
        found = [_scan(checkov, "kubernetes", "--directory", folder)]
    found.append(_scan(checkov, "dockerfile", "--file", str(ROOT / "deploy" / "Dockerfile")))
    sys.exit(any(found))


def _write(path: Path, rendered: Rendered) -> None:
    path.write_text(yaml.safe_dump_all(rendered.objects))


def _scan(checkov: Path, framework: str, *what: str) -> int:
    """The exit code; 0: nothing found."""
    print(f"==> checkov: {framework}", flush=True)
    command = [str(checkov), "--framework", framework, "--quiet", "--compact", "--skip-download", *what]
    return subprocess.run(command, timeout=600, check=False).returncode


if __name__ == "__main__":
    main()
