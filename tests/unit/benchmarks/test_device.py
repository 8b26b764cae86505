"""The device of the benchmarks' engines."""

from __future__ import annotations

import pytest
from support import device


def test_a_device_that_vllm_does_not_run_on_is_refused():
    device.check_device("cpu")
    with pytest.raises(SystemExit, match="--device cuda: this vLLM runs on 'cpu'"):
        device.check_device("cuda")
