"""The machine of a measurement, for the heading of its page."""

import platform
import time
from pathlib import Path

import psutil
import torch


def machine_and_date() -> str:
    """The machine and the date of the measurement."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    model = platform.processor() or platform.machine()
    # psutil does not report the model of the processor.
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {psutil.cpu_count()} cores, {time.strftime('%Y-%m-%d')}"
