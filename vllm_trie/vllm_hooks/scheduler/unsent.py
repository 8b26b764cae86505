"""Rows that the worker does not know: new, forked, moved or preempted ones."""

from __future__ import annotations

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from vllm_trie.vllm_hooks.scheduler.group import BeamGroup
from vllm_trie.vllm_hooks.scheduler.rows import BeamRows


class UnsentRows(BeamRows):
    """Tells the worker about rows, and has it forget rows."""

    def _send_as_new(self, output: SchedulerOutput) -> None:
        """Move rows that the worker does not know from the cached to the new requests.

        A new request carries its tokens and its block table; its prompt is all it has so far, and
        from here on the scheduler counts its output tokens as the worker does.
        """
        cached = output.scheduled_cached_reqs
        unknown = [i for i, row_id in enumerate(cached.req_ids) if row_id in self._unsent]
        for new in output.scheduled_new_reqs:  # Model Runner V2 resumes requests as new ones
            self._unsent.discard(new.req_id)
        if not unknown:
            return
        for i in unknown:
            row_id = cached.req_ids[i]
            row = self.requests[row_id]
            output.scheduled_new_reqs.append(
                NewRequestData(
                    req_id=row_id,
                    prompt_token_ids=self._group_of_row[row_id].all_tokens(row),
                    mm_features=[],
                    sampling_params=row.sampling_params,
                    pooling_params=None,
                    block_ids=self.kv_cache_manager.get_block_ids(row_id),
                    num_computed_tokens=cached.num_computed_tokens[i],
                    lora_request=row.lora_request,
                    prefill_token_ids=row._all_token_ids if self.use_v2_model_runner else None,
                )
            )
            row.num_prompt_tokens = row.num_tokens
            row._output_token_ids.clear()
            self._unsent.discard(row_id)
        _drop(cached, set(unknown))

    def _rename(self, group: BeamGroup, row: Request) -> None:
        """Make a row without KV a stranger to the worker.

        The worker has appended its own token to the row, and under asynchronous scheduling it
        takes the last token of the step before by the row's id: the row cannot be resumed there.
        An output that is still on its way comes for an id that nobody knows, and is ignored.
        """
        old = row.request_id
        row.request_id = new = group.new_row_id()
        row.num_in_flight_tokens = row.num_stale_output_tokens = 0
        row.drop_stale_output = False
        del self.requests[old], self._group_of_row[old]
        self.requests[new] = row
        self._group_of_row[new] = group
        if old in group.outputs:
            group.outputs[new] = group.outputs.pop(old)
        if old in self._unsent:
            self._unsent.remove(old)
        else:
            self.finished_req_ids.add(old)
        self._unsent.add(new)


def _drop(cached: CachedRequestData, places: set[int]) -> None:
    """Take the requests in these places out."""
    for i in places:
        cached.resumed_req_ids.discard(cached.req_ids[i])
        cached.all_token_ids.pop(cached.req_ids[i], None)
    kept = [i for i in range(len(cached.req_ids)) if i not in places]
    for name in ("req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"):
        values = getattr(cached, name)
        setattr(cached, name, [values[i] for i in kept])
    if cached.new_token_ids:
        cached.new_token_ids = [cached.new_token_ids[i] for i in kept]
    # A cached property of what was there before.
    cached.__dict__.pop("_req_id_to_num_output_tokens", None)
