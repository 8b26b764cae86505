"""From NumPy to the device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on a device; on a CPU it shares the array's memory.

    A copy from ordinary memory would wait until the device has done all that was asked of it
    before. From pinned memory it takes its place in the queue; torch keeps that memory until then.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
