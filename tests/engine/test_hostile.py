"""No request ends a server or changes another's answer; `hostile.py` attacks for longer."""

import pytest

from tests.engine import hostile
from vllm_trie.searches.engine.constraint import option_names


@pytest.mark.slow
def test_hostile_requests_fail_alone(full_server):
    figures = hostile.attack(full_server, 400, seed=1)
    waits = hostile.longest_waits(full_server, 1_000_000, 1)
    print(figures, max(waits.items(), key=lambda item: item[1]))
    assert full_server.is_healthy(), full_server.log_text()[-5000:]
    slow = {label: wait_s for label, wait_s in waits.items() if wait_s > 2.0}
    assert not slow, "large requests kept the server from answering others"
    assert not figures.wrong, figures.wrong[:5]
    assert not figures.failed, figures.failed[:5]
    assert figures.options >= option_names().keys()
    assert figures.statuses[200] > 30, "too few of the requests were right"
