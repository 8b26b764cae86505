"""What the doctor says about a GPU, with a check that only pretends to run."""

from __future__ import annotations

from typing import Any

from vllm_trie.attention.kernel_check import KernelCheck
from vllm_trie.lab.check.doctor import check_gpu


def levels(problems: list[Any]) -> list[str]:
    return [problem.level for problem in problems]


def test_a_gpu_that_passes_is_warned_of() -> None:
    seen = []

    def check(shape: Any, device: Any) -> KernelCheck:
        seen.append(str(shape))
        return KernelCheck(30, 1e-3, 1e-2)

    summary, problems = check_gpu("cuda:0", (9, 0), check)
    assert len(seen) == 3
    assert all(shape in summary for shape in seen)
    assert levels(problems) == ["warning"]
    assert "allow_untested_gpu" in problems[0].text


def test_a_dtype_that_the_gpu_lacks_is_left_out() -> None:
    seen = []

    def check(shape: Any, device: Any) -> KernelCheck:
        seen.append(str(shape))
        return KernelCheck(30, 0.0, 1e-2)

    check_gpu("cuda:0", (7, 5), check)
    assert len(seen) == 2
    assert not any("bfloat16" in shape for shape in seen)


def test_a_wrong_result_is_an_error() -> None:
    _, problems = check_gpu("cuda:0", (9, 0), lambda *_: KernelCheck(30, 0.5, 1e-2))
    assert levels(problems) == ["warning", "error", "error", "error"]
    assert "0.5 of the largest value, allowed is 0.01" in problems[1].text


def test_a_crash_is_an_error() -> None:
    def check(shape: Any, device: Any) -> KernelCheck:
        raise OSError("no ptxas")

    summary, problems = check_gpu("cuda:0", (9, 0), check)
    assert summary == "failed"
    assert levels(problems) == ["warning", "error"]
    assert "OSError: no ptxas" in problems[1].text
