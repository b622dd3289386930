"""The version of a GPU's driver, of which torch says nothing."""

import ctypes
from pathlib import Path

import torch

NVIDIA = ("libnvidia-ml.so.1", "nvml.dll")  # NVIDIA's management library, part of each driver
AMD = Path("/sys/module/amdgpu/version")
LONGEST = 96  # characters, more than NVIDIA documents


def version():
    """As the driver calls itself, "580.159.04"; "" where nothing says."""
    return _of_amd() if torch.version.hip else _of_nvidia()


def _of_amd():
    try:
        return AMD.read_text().strip()
    except OSError:  # the kernel's own driver has no version but the kernel's
        return ""


def _of_nvidia():
    for name in NVIDIA:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        said = ctypes.create_string_buffer(LONGEST)
        if library.nvmlInit_v2() == 0:
            try:
                if library.nvmlSystemGetDriverVersion(said, ctypes.c_uint(LONGEST)) == 0:
                    return said.value.decode()
            finally:
                library.nvmlShutdown()
    return ""
