"""Optional features, one folder for each, and the table of what they add.

The core asks :func:`brought` and :func:`loaded` and knows no extra by its name. A folder that is
not there brings nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Extra(NamedTuple):
    """The parts of an extra. Objects are named ``"module:attribute"`` below its folder, and are
    imported on use.

    Attributes:
        methods: Drafter classes by the name of their drafting method.
        hooks: Modules with entries of the ledger, by feature and platform.
        commands: Modules of the command line, relative to its folder, and their help, by the name
            of their group.
        request_options: Makers of what travels to the workers, see
            :class:`~vllm_trie.hooks.frontend.request_options.RequestOption`, by key of requests'
            extra arguments.
        chat_fields: Fields of the server's chats, which vLLM does not know.
        counters: Help texts of counters by the names under which extras count, see
            :meth:`~vllm_trie.hooks.wire.TreeStats.count`; their metrics begin with ``vllm:trie_``.
        draft_source: Makes a :class:`~vllm_trie.drafts.sources.DraftSource` for an engine; told of
            its steps if it is an observer of them, too.
        step_observer: Makes a :class:`~vllm_trie.drafts.engine.observers.StepObserver` for an
            engine, or None.
        draft_extension: Makes, for a scheduler of vLLM's, an object whose ``extend_drafts()`` adds
            to the ``spec_token_ids`` of running requests.
        archive_options: Options of `ngram_trie` that open an archive, a class derived from
            :class:`~vllm_trie.drafts.archive.ArchiveOptions`.
        text_stores: Takes vLLM's configuration and the drafter's context, and returns the
            :class:`~vllm_trie.drafts.text_store.TextStore` objects of an engine. Those that observe
            steps too are told of them.
        checks: Checks before an engine serves, by what they check: ``"drafts"`` or ``"attention"``
            on a device, or ``"release"``, of vLLM, that the ledger does not list.
        options: A pydantic model whose fields are options of every drafting method, see
            :data:`~vllm_trie.drafts.engine.config.AllOptions`.
        keys: Keys of ``additional_config["vllm_trie"]`` that need no drafting method.
        start_check: Takes vLLM's complete configuration and raises
            :class:`~vllm_trie.refusal.RefusedError` if the extra cannot serve in it.
        constraint: A :class:`~vllm_trie.searches.engine.constraint.SearchConstraint`.
        secrets: Environment variables that vLLM is to know, but not their values.
    """

    methods: Mapping[str, str] = {}
    hooks: Mapping[tuple[str, str], str] = {}
    commands: Mapping[str, tuple[str, str]] = {}
    request_options: Mapping[str, str] = {}
    chat_fields: tuple[str, ...] = ()
    counters: Mapping[str, str] = {}
    draft_source: str = ""
    step_observer: str = ""
    archive_options: str = ""
    text_stores: str = ""
    draft_extension: str = ""
    checks: Mapping[str, str] = {}
    options: str = ""
    keys: tuple[str, ...] = ()
    start_check: str = ""
    constraint: str = ""
    secrets: tuple[str, ...] = ()


EXTRAS: Mapping[str, Extra] = {
    "predictions": Extra(
        hooks={("speculation", "any"): "counts"},
        request_options={"prediction": "request:packed_for_engine"},
        chat_fields=("prediction",),
        counters={
            "accepted_prediction_tokens": "Tokens drafted from predictions that were accepted.",
            "rejected_prediction_tokens": "Tokens drafted from predictions that were not.",
        },
        draft_source="source:Predictions",
    ),
    "forced_tokens": Extra(
        hooks={("speculation", "any"): "forced_tokens"},
        draft_extension="forced_tokens:ForcedTokens",
    ),
    "traces": Extra(
        request_options={"speculation_trace": "request:checked"},
        step_observer="recorder:open_recorder",
        options="options:TraceOptions",
        start_check="request:check_folder",
    ),
    "memory": Extra(
        options="options:MemoryOptions",
        start_check="start:check_store",
        text_stores="warm_start:open_stores",
        secrets=("VLLM_TRIE_STORE_USER", "VLLM_TRIE_STORE_PASSWORD"),
    ),
    "corpus": Extra(
        commands={
            "corpus": (
                "...lab.commands.corpus",
                "Corpora that `ngram_trie` drafts from (its option `corpus`).",
            )
        },
        archive_options="options:CorpusOptions",
    ),
    "items": Extra(
        keys=("items",),
        start_check="start:check_catalogues",
        constraint="options:ItemOptions",
        commands={
            "items": (
                ".command",
                "Catalogues of items for constrained beam search (the request option `items`).",
            )
        },
    ),
    "device_checks": Extra(
        hooks={
            ("speculation", "any"): "uses release_check spawned_engines",
            ("beam", "any"): "search_check spawned_engines",
        },
        checks={
            "release": "release_check:check_release",
            "drafts": "start_check:reason_against_drafts",
            "attention": "gpu_check:check_device",
        },
    ),
    "heads": Extra(
        methods={"medusa_dynamic": "drafter:MedusaDrafter"},
        commands={"medusa": (".training.command", "Train Medusa heads for a model.")},
    ),
    "lookahead": Extra(methods={"lookahead_trie": "drafter:LookaheadDrafter"}),
    "union": Extra(
        methods={"trie_union": "drafter:TrieUnionDrafter"},
        hooks={("speculation", "any"): "checks"},
    ),
}
"""The extras, in the order in which the core asks them."""


def brought(part: str) -> Iterator[tuple[str, Any]]:
    """Yield the package of each extra that is there, and its part, see :class:`Extra`, if it has
    one."""
    for name, extra in EXTRAS.items():
        is_there = (Path(__file__).parent / name / "__init__.py").is_file()
        if is_there and (of_extra := getattr(extra, part)):
            yield f"{__name__}.{name}", of_extra


def load(package: str, name: str) -> Any:
    """Return the object called ``"module:attribute"`` below a package."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(f"{package}.{module}"), attribute)


def loaded(part: str, key: str | None = None) -> Iterator[Any]:
    """Yield the objects of a part, or those that have a key in it."""
    for package, of_extra in brought(part):
        if key is None or key in of_extra:
            yield load(package, of_extra if key is None else of_extra[key])
