"""Requests that run through an engine before it serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import Request, RequestStatus

from vllm_trie.hooks import ledger
from vllm_trie.hooks.start.limits import switch_off
from vllm_trie.hooks.wire import internal_params

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

logger = init_logger(f"vllm.{__name__}")

_MAX_STEPS = 10_000
"""A request that has not ended after as many steps never does."""


def outputs_of(core: EngineCore, requests: Sequence[Request]) -> list[list[EngineCoreOutput]]:
    """Run requests to their end; return their outputs.

    Raises:
        RuntimeError: One fails, or does not end.
    """
    for request in requests:
        core.add_request(request)
    outputs: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
    for _ in range(_MAX_STEPS):
        if not (core.scheduler.has_requests() or core.batch_queue):
            break
        of_clients, executed = core.step_fn()
        core.post_step(executed)
        for of_client in (of_clients or {}).values():
            for output in of_client.outputs:
                outputs[output.request_id].append(output)
    else:
        raise RuntimeError(f"requests that do not end in {_MAX_STEPS} steps")
    for of_request in outputs.values():
        if of_request[-1].finish_reason == FinishReason.ERROR:
            raise RuntimeError("a request failed, see the lines above")
    return [*outputs.values()]


def drop_requests(core: EngineCore) -> None:
    """End what an exception has left in an engine."""
    core.collective_rpc(_drop_step)
    core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    if core.batch_queue is not None:
        core.batch_queue.clear()
    core.step_fn()  # tells the workers


def _drop_step(worker: Any) -> None:
    worker.model_runner.execute_model_state = None  # vLLM would wait for the step's sampling


def keep_serving(core: EngineCore, why: str) -> bool:
    """Take the plugin out of an engine in which an ordinary request fails; return whether none did.

    Raises:
        Exception: It fails without the plugin, too.
    """
    try:
        _decode(core)
    except Exception:
        logger.exception("An ordinary request failed at the start of the engine")
        leave(core, why)
        _decode(core)
        return False
    return True


def _decode(core: EngineCore) -> None:
    params, hasher = internal_params(2), core.request_block_hasher
    outputs_of(core, [Request("_vllm_trie_plain", [0], params, None, block_hasher=hasher)])


def leave(core: EngineCore, why: str) -> None:
    """Take the plugin out of an engine without drafts: its patches and its scheduler."""
    logger.error("vllm-trie steps aside: %s. vLLM goes on without it.", why)
    switch_off(core.vllm_config, why)
    process: Any = core
    if hasattr(process, "_make_ready_response"):  # by which the front end hears of it
        process._make_ready_response = process._make_ready_response
    scheduler = type(core.scheduler)
    stock = (base for base in scheduler.__mro__ if base.__module__.startswith("vllm."))
    ledger.undo()
    core.collective_rpc(_undo)
    core.scheduler.__class__ = next(stock)
    drop_requests(core)


def _undo(worker: Any) -> None:
    ledger.undo()
