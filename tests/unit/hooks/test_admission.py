"""Slots under a claim."""

from types import SimpleNamespace
from typing import Any

from vllm.v1.request import RequestStatus

from vllm_trie.searches.engine.scheduler.admission import SOON, Admission


def request_of(max_tokens: int) -> Any:
    counts = {"num_tokens": 8, "num_computed_tokens": 0, "num_output_tokens": 0}
    return SimpleNamespace(status=RequestStatus.RUNNING, max_tokens=max_tokens, **counts)


def test_long_requests_of_the_step_count_once() -> None:
    scheduler: Any = SimpleNamespace(
        max_num_active_reqs=4,
        max_num_scheduled_tokens=64,
        scheduler_config=SimpleNamespace(async_scheduling=False),
        lora_config=None,
        running=[],
        num_waiting_for_streaming_input=0,
        current_step=0,
    )
    admission = Admission(scheduler, 99)
    admission.begin_step([])
    assert admission.lets_start(request_of(1000))
    assert admission.lets_start(request_of(1000))
    group: Any = SimpleNamespace(beam_width=3, arrival_step=0)
    admission._claim = admission._claim_of(group)
    assert admission._claim is not None
    assert admission._claim[:2] == (SOON, 1)  # both are expected to have ended by then
    assert admission.lets_start(request_of(1000))  # takes the slot that is left over
    assert not admission.lets_start(request_of(1000))
    assert admission.lets_start(request_of(SOON))


def test_a_group_is_expected_to_grow_as_long_again() -> None:
    scheduler: Any = SimpleNamespace(
        max_num_active_reqs=4,
        max_num_scheduled_tokens=64,
        scheduler_config=SimpleNamespace(async_scheduling=False),
        lora_config=None,
    )
    admission = Admission(scheduler, 99)
    settings = SimpleNamespace(max_new_tokens=1000)
    for steps, length in ((0, SOON), (SOON + 1, 2 * SOON + 2), (800, 1000)):
        search = SimpleNamespace(steps=steps, settings=settings)
        group: Any = SimpleNamespace(
            search=search, blocks_with=lambda num_new_tokens: num_new_tokens
        )
        assert admission.expected_blocks(group) == length
