"""Chat templates as their authors published them, from packages that carry them.

The texts are not in this repository. `pip` fetches the packages once, into .cache, and nothing of them is run.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / ".cache" / "chat_templates"
TRL, AXOLOTL = "trl-1.16.0-py3-none-any.whl", "axolotl-0.19.0-py3-none-any.whl"
REQUIREMENTS = """\
trl==1.16.0 --hash=sha256:c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396
axolotl==0.19.0 --hash=sha256:f28eb3ad3709975eec4adfe13307dd980c7e7917cc43cb03f2c6f26c007135cc
"""
FOLDERS = {TRL: "trl/chat_templates", AXOLOTL: "axolotl/utils/chat_templates/templates"}

# Name for people, wheel, file.
TEMPLATES = {
    "Command R": (TRL, "cohere"),
    "Command R7B": (TRL, "cohere2"),
    "Command A": (AXOLOTL, "command_a"),
    "Command A tools": (AXOLOTL, "command_a_tool_use"),
    "Aya": (AXOLOTL, "aya"),
    "ChatML": (AXOLOTL, "chatml"),
    "DeepSeek V2": (AXOLOTL, "deepseek_v2"),
    "DeepSeek V3": (AXOLOTL, "deepseek_v3"),
    "DeepSeek V3 0324": (TRL, "deepseekv3"),
    "DeepSeek R1 distilled": (TRL, "deepseek_r1_distill"),
    "EXAONE 4": (AXOLOTL, "exaone4"),
    "Falcon H1": (AXOLOTL, "falcon_h1"),
    "Gemma": (TRL, "gemma"),
    "Gemma 3": (TRL, "gemma3"),
    "Gemma 3n": (AXOLOTL, "gemma3n"),
    "Gemma 4": (TRL, "gemma4"),
    "GLM 4.5": (TRL, "glm4moe"),
    "gpt-oss": (TRL, "gptoss"),
    "Jamba": (AXOLOTL, "jamba"),
    "LFM 2": (TRL, "lfm2"),
    "Llama 3": (TRL, "llama3"),
    "Llama 3.1": (TRL, "llama3_1"),
    "Llama 3.2": (TRL, "llama3_2"),
    "Llama 3.2 Vision": (AXOLOTL, "llama3_2_vision"),
    "Llama 4": (AXOLOTL, "llama4"),
    "Mistral v1": (AXOLOTL, "mistral_v1"),
    "Mistral v3": (AXOLOTL, "mistral_v2v3"),
    "Mistral v3 tekken": (AXOLOTL, "mistral_v3_tekken"),
    "Mistral Small 3": (AXOLOTL, "mistral_v7_tekken"),
    "Nemotron 3 Nano": (TRL, "nemotron_3_nano"),
    "Phi 3": (TRL, "phi3"),
    "Phi 3.5": (TRL, "phi3_5"),
    "Phi 4": (AXOLOTL, "phi_4"),
    "Qwen 2.5": (TRL, "qwen2_5"),
    "Qwen 3": (TRL, "qwen3"),
    "Qwen 3 2507": (TRL, "qwen3_instruct_2507"),
    "Qwen 3.5": (TRL, "qwen3_5_think"),
    "Qwen 3 VL": (TRL, "qwen3_vl"),
}


def template(name: str) -> str:
    """The text of a published template."""
    wheel, file = TEMPLATES[name]
    _fetch()
    with zipfile.ZipFile(CACHE / wheel) as archive:
        return archive.read(f"{FOLDERS[wheel]}/{file}.jinja").decode()


def _fetch() -> None:
    if all((CACHE / wheel).is_file() for wheel in FOLDERS):
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(REQUIREMENTS)
        subprocess.run(
            [
                sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                "--only-binary", ":all:", "--require-hashes", "--requirement", str(requirements), "--dest", folder,
            ],
            check=True,
        )  # fmt: skip
        for wheel in FOLDERS:
            (Path(folder) / wheel).replace(CACHE / wheel)
