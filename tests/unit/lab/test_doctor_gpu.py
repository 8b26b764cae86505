"""What the doctor says about a GPU, with a check that only pretends to run."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_trie.attention.kernel_check import KernelCheck
from vllm_trie.lab.check.doctor import check_gpu


@pytest.mark.parametrize(
    ("capability", "error", "num_checked", "levels", "said"),
    [
        ((9, 0), 1e-3, 3, ["warning"], "allow_untested_gpu"),
        ((7, 5), 0.0, 2, ["warning"], "allow_untested_gpu"),  # it lacks bfloat16
        ((9, 0), 0.5, 3, ["warning", *["error"] * 3], "0.5 of the largest value, allowed is 0.01"),
        ((9, 0), None, 1, ["warning", "error"], "OSError: no ptxas"),
    ],
)
def test_what_is_said_of_a_gpu(capability, error, num_checked, levels, said):
    checked = []

    def check(shape: Any, device: Any) -> KernelCheck:
        checked.append(str(shape))
        if error is None:
            raise OSError("no ptxas")
        return KernelCheck(30, error, 1e-2)

    summary, problems = check_gpu("cuda:0", capability, check)
    assert len(checked) == num_checked
    assert capability >= (8, 0) or not any("bfloat16" in shape for shape in checked)
    assert [problem.level for problem in problems] == levels
    assert said in problems[-1].text
    if levels == ["warning"]:
        assert all(shape in summary for shape in checked)
    elif error is None:
        assert summary == "failed"
