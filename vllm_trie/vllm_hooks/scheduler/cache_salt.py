"""The cache salt of a request, on its way to the drafters.

vLLM keeps a request's ``cache_salt`` in the scheduler, where the prefix cache needs it; workers
never see it. Drafters that learn from finished requests must know whose text they may use, so the
scheduler adds the salt to the sampling parameters' ``extra_args``, which do travel.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_trie.vllm_hooks.frontend.request_options import CACHE_SALT


def install_in_scheduler() -> None:
    """Let schedulers pass cache salts on to the workers."""
    stock = Scheduler.add_request

    @functools.wraps(stock)
    def add_request(self: Any, request: Any) -> Any:
        if request.cache_salt and request.sampling_params is not None:
            extra = request.sampling_params.extra_args or {}
            request.sampling_params.extra_args = {**extra, CACHE_SALT: request.cache_salt}
        return stock(self, request)

    Scheduler.add_request = add_request
