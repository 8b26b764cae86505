"""The experts of each token, where vLLM returns them (`enable_return_routed_experts`).

vLLM captures a row for each token of a step and returns those of a request's first tokens, as many
as were accepted.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.distributed.aux_output_connector.worker import (
        AuxOutputWorkerConnector,
        PendingAuxOutput,
    )


def take_shorter_steps(connector: AuxOutputWorkerConnector) -> None:
    """Let a connector take steps that verify fewer tokens than were scheduled.

    Under asynchronous scheduling vLLM expects a step to begin behind all scheduled tokens of the
    last one. It goes on behind the accepted ones, but only where it has seen the others in a step.
    """
    stock: Any = connector._commit_output

    def commit_output(pending: PendingAuxOutput) -> Any:
        for request_id in pending.request_ids:
            connector._requests[request_id].scheduled_cursor = sys.maxsize
        return stock(pending)

    connector.__dict__["_commit_output"] = commit_output


def follow_paths(
    connector: AuxOutputWorkerConnector, tokens: torch.Tensor, rows: torch.Tensor
) -> None:
    """Put the rows of the accepted nodes in front of each request's others.

    Args:
        connector: Its rows of the step are changed.
        tokens: int [logits rows], the token of the step that each row of logits belongs to.
        rows: int [logits rows], see :func:`walk_trees`.
    """
    experts = connector._capturer.device_buffer
    experts[tokens] = experts[tokens[rows]]
