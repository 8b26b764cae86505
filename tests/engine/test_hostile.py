"""No request ends a server or changes another's answer; `hostile.py` attacks for longer."""

import pytest

from tests.engine import hostile
from tests.engine.serving import running
from vllm_trie.searches.engine.constraint import option_names


@pytest.mark.slow
def test_hostile_requests_fail_alone(tmp_path):
    with running(tmp_path / "log", *hostile.server_options(tmp_path)) as server:
        figures = hostile.attack(server, 400, seed=1)
        waits = hostile.longest_waits(server, 1_000_000, 1)
        print(figures, max(waits.items(), key=lambda item: item[1]))
        assert server.is_healthy(), server.log_text()[-5000:]
    slow = {label: wait_s for label, wait_s in waits.items() if wait_s > 2.0}
    assert not slow, "large requests kept the server from answering others"
    assert not figures.wrong, figures.wrong[:5]
    assert not figures.failed, figures.failed[:5]
    assert figures.options >= option_names().keys()
    assert figures.statuses[200] > 30, "too few of the requests were right"
