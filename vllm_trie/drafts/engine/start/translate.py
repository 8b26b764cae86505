"""From engine arguments to a configuration that vLLM accepts.

vLLM's ``SpeculativeConfig`` knows a fixed list of methods and refuses unknown keys. The plugin
therefore rewrites one of its methods to one of vLLM's (:mod:`.runner_choice`) with the plugin's
proposer as its model, and carries the method's name and options in
``additional_config["vllm_trie"]``. A method with a trained drafter becomes that drafter's method of
vLLM's, which loads its weights and gives it a KV cache.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_trie.drafts import available_methods
from vllm_trie.drafts.engine.config import PROPOSER_CLASS, SPECULATOR_CLASS, parse, parse_payload
from vllm_trie.drafts.engine.start import arguments
from vllm_trie.hooks.start import runner_choice
from vllm_trie.hooks.start.additional_config import (
    BEAM_KEYS,
    CONFIG_KEY,
    own_part,
    spelled,
)
from vllm_trie.hooks.start.limits import has_state, is_cuda
from vllm_trie.refusal import RefusedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

DEFAULT_NODES = 32
DEFAULT_CHAIN = 8
"""The default on Model Runner V2, whose scheduler makes room for as many in every request."""
DEFAULT_GPU_NODES = 31
"""The default of trees on Model Runner V2: with the committed token and 4 query heads for a KV head
they fill 128 rows, the most that the kernel multiplies with keys and values it has read once."""
_TIERS = ((64, 1), (128, 2), (256, 4))
"""On Model Runner V2: the largest batches with all draft tokens of a request, a half, a quarter;
larger ones draft none. The limits leave room for prefills in a step, and for their logits."""
_TIERS_OF_ONE_LENGTH = ((16, 1), (64, 2))
"""The same where CUDA graphs take one length for all requests. By estimate: an 8B model verifies 8
for each of 64 in the time of 2 steps."""
MAX_NODES = 256
"""Largest node limit: beyond it a tree costs more than it gains on any known hardware."""
_SCHEDULE = "num_speculative_tokens_per_batch_size"
_VLLM_FIELDS = (_SCHEDULE, "target_model_config", "target_parallel_config")
"""Of vLLM's ``SpeculativeConfig`` with each method; vLLM itself adds the last two."""
_OF_OTHER_METHODS = ("prompt_lookup_", "suffix_decoding_")


def requested_method(engine_args: EngineArgs) -> str | None:
    """Return the tree method that the engine arguments ask for, None if they ask for another.

    Raises:
        RefusedError: A method's name stands where a dictionary is expected.
    """
    speculative: Any = engine_args.speculative_config or {}
    methods = available_methods()
    if not isinstance(speculative, Mapping):
        written = _of_json(speculative)
        names = (speculative, engine_args.spec_method, engine_args.spec_model)
        for name in (*names, written.get("method"), written.get("model")):
            if name in methods:
                raise RefusedError(
                    f"speculative_config={speculative!r} must be a dictionary; write "
                    f"speculative_config={written or {'method': name}!r}"
                )
        speculative = {}  # vLLM has its own message for it
    named = (
        engine_args.spec_method,
        speculative.get("method"),
        engine_args.spec_model,
        speculative.get("model"),
    )
    for name in named:
        if name in methods:
            return str(name)
    is_drafter = named[1] is not None and named[1] == _speculator(engine_args)
    if PROPOSER_CLASS in named or SPECULATOR_CLASS in named or is_drafter:
        return own_part(engine_args.additional_config).get("method")
    return None


def _of_json(value: Any) -> dict[str, Any]:
    """Return the dictionary that a text has in JSON, as on the command line; else an empty one."""
    try:
        written = json.loads(value)
    except (TypeError, ValueError, RecursionError):
        return {}
    return written if isinstance(written, dict) else {}


def _speculator(engine_args: EngineArgs) -> str | None:
    """Return vLLM's method of the trained drafter that :func:`translate` wrote, if it did."""
    payload = own_part(engine_args.additional_config)
    if "method" not in payload:
        return None
    speculator = parse_payload(payload).speculator
    return None if speculator is None else speculator.method


def translate(engine_args: EngineArgs) -> None:
    """Rewrite the engine arguments, in place, into a configuration that stock vLLM accepts.

    Does nothing if they ask for no method of vllm-trie; may be called again on its own result.

    Raises:
        RefusedError: An option or a combination is not allowed, or a method is misspelled.
    """
    method = requested_method(engine_args)
    if method is None:
        arguments.refuse_misspelled_method(engine_args)
        _refuse_options_without_method(engine_args)
        return
    requested = _requested_options(engine_args)
    plugin_options = _own_options(engine_args, method)
    if requested.get("method") is not None and requested["method"] == _speculator(engine_args):
        requested |= {"method": method, "model": None}  # this function wrote them
    _check_method(method, requested.pop("method", None))
    model_option = plugin_options.pop("draft_model", None)
    if (draft_model := _draft_model(method, requested.pop("model", None))) is None:
        draft_model = model_option
    vllm_method = runner_choice.vllm_method()
    requested_nodes = requested.pop("num_speculative_tokens", None)

    vllm_fields = _speculative_config_fields()
    vllm_options = {key: requested.pop(key) for key in list(requested) if key in vllm_fields}
    for key, value in plugin_options.items():
        _add(requested, key, value, spelled(key))
    payload = {"method": method, **requested}
    if draft_model is not None:
        payload["draft_model"] = draft_model
    parsed = parse(payload)  # the errors should reach the user now, not in a worker
    allowed = {*_VLLM_FIELDS, *(("revision",) if draft_model is not None else ())}
    if parsed.speculator is not None:
        allowed = {key for key in vllm_options if not key.startswith(_OF_OTHER_METHODS)}
    _refuse_fields_without_effect(method, vllm_options, allowed)
    is_v2 = vllm_method != runner_choice.V1_METHOD or parsed.speculator is not None
    on_v2 = DEFAULT_GPU_NODES if parsed.engine_options.verification == "tree" else DEFAULT_CHAIN
    num_nodes = _check_num_nodes(requested_nodes, on_v2 if is_v2 else DEFAULT_NODES)
    if is_v2 and parsed.speculator is None:
        limits = _TIERS if runner_choice.takes_any_length(engine_args) else _TIERS_OF_ONE_LENGTH
        vllm_options.setdefault(_SCHEDULE, _tiers(num_nodes, limits))

    model: str | None = SPECULATOR_CLASS if is_v2 else PROPOSER_CLASS
    if parsed.speculator is not None:
        vllm_method, model = parsed.speculator.method, parsed.speculator.model
    engine_args.spec_method = engine_args.spec_model = engine_args.spec_tokens = None
    engine_args.speculative_config = {
        **vllm_options,
        "method": vllm_method,
        "model": model,
        "num_speculative_tokens": num_nodes,
    }
    additional = dict(engine_args.additional_config or {})
    beam = {k: v for k, v in additional.get(CONFIG_KEY, {}).items() if k in BEAM_KEYS}
    engine_args.additional_config = {**additional, CONFIG_KEY: {**beam, **payload}}


def _refuse_options_without_method(engine_args: EngineArgs) -> None:
    idle = own_part(engine_args.additional_config).keys() - BEAM_KEYS
    if idle:
        raise RefusedError(
            f"additional_config[{CONFIG_KEY!r}] sets {', '.join(sorted(idle))}, but no speculative "
            "method of vllm-trie is asked for; name one with --spec-method or "
            f"speculative_config={{'method': NAME}}: {', '.join(available_methods())}"
        )


def _refuse_fields_without_effect(
    method: str, options: Mapping[str, object], allowed: Collection[str]
) -> None:
    """Refuse fields of vLLM's that are of its own drafters, or change how drafts are verified; not
    where they say what vLLM does without them."""
    defaults = _speculative_config_fields()
    foreign = [
        f"{key}={value!r}"
        for key, value in options.items()
        if value is not None and value is not False and value != defaults[key]
        if key not in allowed
    ]
    if foreign:
        raise RefusedError(
            f"speculative_config sets {', '.join(foreign)}, which method {method!r} does not read; "
            "without a trained drafter it reads, of vLLM's fields, method, model, "
            f"num_speculative_tokens, {_SCHEDULE} and, next to a model, revision; leave the others "
            "out"
        )


def _add(options: dict[str, object], key: str, value: object, place: str) -> None:
    """Add a setting from another place; where both have it, they must agree."""
    if options.setdefault(key, value) != value:
        raise RefusedError(
            f"{place}={value!r} and speculative_config[{key!r}]={options[key]!r} differ; give one "
            "of them"
        )


def _requested_options(engine_args: EngineArgs) -> dict[str, Any]:
    """Return ``speculative_config`` with what the short flags say."""
    speculative = engine_args.speculative_config or {}
    requested = {key.replace("-", "_"): value for key, value in speculative.items()}
    # Next to heads in the dictionary, a method's name as the model names the method.
    has_heads = requested.get("model") is not None
    names_method = has_heads and engine_args.spec_model in available_methods()
    for flag, key, value in (
        ("--spec-method", "method", engine_args.spec_method),
        ("--spec-model", "method" if names_method else "model", engine_args.spec_model),
        ("--spec-tokens", "num_speculative_tokens", engine_args.spec_tokens),
    ):
        if value is not None:
            _add(requested, key, value, flag)
    return requested


def _own_options(engine_args: EngineArgs, method: str) -> dict[str, Any]:
    """Return the options of the method that ``additional_config`` carries."""
    additional = engine_args.additional_config or {}
    if not isinstance(additional, Mapping):
        raise RefusedError(
            f"additional_config={additional!r} must be a mapping to carry the options of "
            f"method {method!r}; pass a dictionary"
        )
    options = {key: value for key, value in own_part(additional).items() if key not in BEAM_KEYS}
    named = options.pop("method", method)
    if named != method:
        raise RefusedError(
            f"method {method!r} and {spelled('method')}={named!r} differ; give one of them"
        )
    return options


def _check_method(method: str, named: object) -> None:
    if named not in (None, method, *runner_choice.METHODS):
        raise RefusedError(
            f"the speculative model {method!r} is a method of vllm-trie, but method={named!r} was "
            f"asked for; leave the model out or set method={method!r}"
        )


def _draft_model(method: str, model: object) -> object:
    """Return the model that the drafter should load, None if the name is only the method's."""
    if model in (method, PROPOSER_CLASS, SPECULATOR_CLASS):
        return None
    if model in available_methods():
        raise RefusedError(
            f"the methods {method!r} and {model!r} (as the speculative model) differ; give one of "
            "them"
        )
    return model


def _check_num_nodes(value: object, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_NODES:
        raise RefusedError(
            f"num_speculative_tokens={value!r} is the node limit of a request's draft tree and "
            f"must be a whole number from 1 to {MAX_NODES}; leave it out for {default}"
        )
    return value


def _tiers(num_nodes: int, limits: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return vLLM's schedule: first and last batch size, and draft tokens of each request."""
    tiers, first = [], 1
    for last, divisor in limits:
        tiers.append((first, last, num_nodes // divisor))
        first = last + 1
    return [*tiers, (first, 1 << 20, 0)]


def draft_for_one_length(vllm_config: VllmConfig) -> None:
    """Have large batches draft less where CUDA graphs take one length for all requests, as the
    complete configuration shows."""
    speculative = vllm_config.speculative_config
    assert speculative is not None
    any_length, one_length = (
        _tiers(speculative.num_speculative_tokens, limits)
        for limits in (_TIERS, _TIERS_OF_ONE_LENGTH)
    )
    backend = vllm_config.attention_config.backend
    takes_one = (
        vllm_config.model_config.use_mla
        or has_state(vllm_config)
        or (backend is not None and backend.name not in ("FLASH_ATTN", "TRITON_ATTN"))
    )
    graphs = vllm_config.compilation_config.cudagraph_mode
    has_graphs = is_cuda() and graphs is not None and graphs.has_full_cudagraphs()
    if has_graphs and takes_one and getattr(speculative, _SCHEDULE) == any_length:
        setattr(speculative, _SCHEDULE, one_length)


def _speculative_config_fields() -> dict[str, object]:
    """Return the fields of vLLM's ``SpeculativeConfig`` with their defaults."""
    from vllm.config import SpeculativeConfig

    return {field.name: field.default for field in dataclasses.fields(SpeculativeConfig)}
