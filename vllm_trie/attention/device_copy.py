"""Copies from NumPy to a device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the array as a tensor on a device; on a CPU it shares the array's memory.

    A copy from pageable memory would wait for all queued work of the device. A copy from pinned
    memory joins the queue; torch keeps that memory until then.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
