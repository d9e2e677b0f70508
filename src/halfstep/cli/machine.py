"""What a measurement ran on."""

import platform
from pathlib import Path

import torch


def describe(device: torch.device) -> str:
    """Return the processor, the cores or the GPU in use, and the versions, in one line."""
    threads = torch.get_num_threads()
    where = f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name()}, {where}"
    return f"{where}, torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
