"""What a time or a result depends on besides the code."""

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import torch


def environment(device: torch.device) -> dict[str, Any]:
    """Returns versions, processor and threads. It names no host, user or path."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def machine() -> str:
    """Returns a word that differs between machines, so that their times are not compared. It does not tell a name."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def cpu_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's name as the system states it, or its architecture."""
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
