"""Ordinary requests that decode an item: where they are in their catalogues, and when they end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.logger import init_logger
from vllm.v1.request import Request, RequestStatus

from vllm_trie.items import ROOT
from vllm_trie.items.selection import view
from vllm_trie.vllm_hooks.scheduler.items.catalogues import Catalogues
from vllm_trie.vllm_hooks.wire import DECODING_KEY, Decoding, unpacked

logger = init_logger(__name__)

_STATE = "_vllm_trie_decoded_item"
"""Attribute of a request with its :class:`_DecodedItem`."""


class _DecodedItem:
    """The place of a request in its catalogue."""

    def __init__(self, request: Request, packed: str, catalogues: Catalogues) -> None:
        options = unpacked(packed)
        params = request.sampling_params
        assert params is not None
        assert params.eos_token_id is not None
        assert options.items is not None
        catalogue = catalogues.latest(options.items)
        selection = catalogues.select(catalogue, options)
        self._trie = view(catalogue.trie, selection)
        self._eos = params.eos_token_id
        self._wants_eos = options.items_end == "eos"
        self._node = ROOT
        path, trie = catalogue
        found = Decoding(str(path), trie.memory, trie.version, selection, self._eos)
        params.extra_args = {**(params.extra_args or {}), DECODING_KEY: found}

    def take(self, request: Request, token_ids: Sequence[int]) -> bool:
        """Take the request's new tokens; return whether it ends. Sets its status then."""
        for token_id in token_ids:
            if token_id == self._eos and self._ends():
                break
            children = self._trie.children(np.array([self._node]))
            found = children.nodes[children.token_ids == token_id]
            if not len(found):  # nothing is valid, or the worker lacks the catalogue
                request.status = RequestStatus.FINISHED_STOPPED
                return True
            self._node = int(found[0])
        leaf = not self._trie.has_children(np.array([self._node]))[0]
        if leaf and not self._wants_eos:  # also where the length would have ended it
            request.status = RequestStatus.FINISHED_STOPPED
        if request.status == RequestStatus.FINISHED_STOPPED and self._ends():
            (request.stop_reason,) = self._trie.item_ids(np.array([self._node]))
        return request.is_finished()

    def _ends(self) -> bool:
        return self._node != ROOT and bool(self._trie.is_terminal(np.array([self._node]))[0])


def begin(request: Request, catalogues: Catalogues) -> None:
    """Find the catalogue of a request that decodes an item; do nothing for others."""
    params = request.sampling_params
    packed = (params.extra_args or {}).get(DECODING_KEY) if params is not None else None
    if packed is not None:
        setattr(request, _STATE, _DecodedItem(request, packed, catalogues))


def take_tokens(request: Request, token_ids: Sequence[int]) -> bool:
    """Take a request's new tokens; return whether its item ends it. Sets its status then.

    An error ends the request alone.
    """
    state: _DecodedItem | None = getattr(request, _STATE, None)
    if state is None:
        return False
    try:
        return state.take(request, token_ids)
    except Exception:
        logger.exception("Request %s fails inside its catalogue", request.request_id)
        request.status = RequestStatus.FINISHED_ERROR
        return True
