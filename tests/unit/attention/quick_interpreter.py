"""Triton's interpreter without its checks of types, which take most of its time.

An operation of the language checks the types and shapes of its arguments, casts and broadcasts
them, and has the interpreter's builder compute with NumPy. Types and constants decide which
computations these are. So the first call with some types goes the stock way and is recorded; later
ones compute what was recorded. Some operations ask whether a scalar is true: they are recorded for
both. Whatever else looks at values goes the stock way each time.

`triton_check.py` compares both ways.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_EFFECTS = ("program", "load", "store", "atomic", "assert", "assume", "print", "barrier")
"""Parts of the names of what the builder does anew each time, whatever its arguments."""


class _Probe:
    """Tells what methods of the builder compute with."""

    binary_op = staticmethod(lambda lhs, rhs, operation: operation)
    cast_impl = staticmethod(lambda source, dtype: "cast")


def _operations_of_methods(num_arguments: int) -> dict[str, Any]:
    operations = {}
    for name, method in vars(InterpreterBuilder).items():
        with contextlib.suppress(Exception):
            operations[name] = method(_Probe, *[None] * num_arguments)
    return operations


_BINARY = {
    name: operation
    for name, operation in _operations_of_methods(2).items()
    if isinstance(operation, np.ufunc)
}
_CASTS = {
    name
    for name, operation in (_operations_of_methods(2) | _operations_of_methods(3)).items()
    if isinstance(operation, str)
}


class _Recorder:
    """Stands for the builder while an operation runs for the first time.

    Attributes:
        asks_truth, reads_values: whether the operation looked at values of its arguments.
    """

    def __init__(self, builder: Any, tensors: list[tl.tensor]) -> None:
        self.asks_truth = self.reads_values = False
        self._builder = builder
        self._tensors = tensors
        self._names = {id(tensor.handle): f"t{i}.handle" for i, tensor in enumerate(tensors)}
        self._constants: dict[str, Any] = {}
        self._lines: list[str] = []
        self._kept: list[Any] = []  # so that no identity is used twice

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._builder, name)
        if name.startswith(("create_", "get_")) and callable(value):
            return functools.partial(self._call, name, value)
        return value

    def _call(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        result = method(*args)
        results = result if isinstance(result, tuple) else (result,)
        handles = [value for value in results if isinstance(value, TensorHandle)]
        self._kept.append((args, results))
        if not handles and result is not None:
            return result  # a type
        inputs = [self._names.get(id(arg)) for arg in args if isinstance(arg, TensorHandle)]
        if None in inputs:  # from elsewhere
            self.reads_values = True
        elif any(part in name for part in _EFFECTS) or not self._constants.keys() >= set(inputs):
            call = self._numpy_call(name, args, result) or self._stock_call(method, args)
            targets = [f"h{len(self._kept)}_{i}" for i in range(len(handles))]
            self._names.update(zip(map(id, handles), targets, strict=True))
            self._lines.append(f"{', '.join(targets)} = {call}" if targets else call)
        else:
            for handle in handles:
                self._names[id(handle)] = self._constant(handle)
        return result

    def _stock_call(self, method: Callable[..., Any], args: Any) -> str:
        terms = [
            self._names[id(arg)] if isinstance(arg, TensorHandle) else self._constant(arg)
            for arg in args
        ]
        return f"{self._constant(method)}({', '.join(terms)})"

    def _numpy_call(self, name: str, args: Any, result: Any) -> str:
        """Return what the builder's method comes to with such data, or nothing."""
        data = [f"{self._names.get(id(arg))}.data" for arg in args]
        if name in _BINARY and {arg.data.dtype for arg in args} != {np.dtype(bool)}:
            dtype = _BINARY[name](*(arg.data for arg in args)).dtype
            term = f"{self._constant(_BINARY[name])}({', '.join(data)})"
        elif name in _CASTS and tl.bfloat16 not in (args[0].dtype.scalar, args[1].scalar):
            dtype, term = args[0].data.dtype, data[0]
        else:
            return ""
        if dtype != result.data.dtype:
            term += f".astype({self._constant(result.data.dtype)})"
        return f"handle({term}, {self._constant(result.dtype)})"

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def compiled(self, result: Any) -> Callable[..., Any]:
        """Return a function that does what was recorded, with tensors of the same types."""
        lines = [*self._lines, f"return {self._term(result)}"]
        parameters = ", ".join(f"t{i}" for i in range(len(self._tensors)))
        scope = {**self._constants, "tensor": _new_tensor, "handle": _new_handle}
        exec(f"def replay({parameters}):\n " + "\n ".join(lines), scope)
        replay: Callable[..., Any] = scope["replay"]
        return replay

    def _term(self, value: Any) -> str:
        for i, tensor in enumerate(self._tensors):
            if value is tensor:
                return f"t{i}"
        if isinstance(value, tl.tensor):
            handle = "None" if value.handle is None else self._names[id(value.handle)]
            _number_of_type(value)
            attributes = {name: part for name, part in vars(value).items() if name != "handle"}
            return f"tensor({handle}, {self._constant(attributes)})"
        if isinstance(value, tuple):
            return f"({''.join(f'{self._term(item)}, ' for item in value)})"
        return self._constant(value)


def _new_handle(data: Any, dtype: Any, new: Any = object.__new__) -> TensorHandle:
    handle = new(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    return handle


def _new_tensor(handle: Any, attributes: dict[str, Any], new: Any = object.__new__) -> tl.tensor:
    tensor = new(tl.tensor)
    tensor.__dict__.update(attributes)
    tensor.handle = handle
    return tensor


_recorder: _Recorder | None = None
_type_numbers: dict[Any, int] = {}


def _number_of_type(tensor: Any) -> int:
    """Return a number for the tensor's type and its data's, which the tensor keeps."""
    try:
        return tensor.number_of_type
    except AttributeError:
        dtype = None if tensor.handle is None else tensor.handle.data.dtype
        address_space = getattr(tensor.dtype, "address_space", None)
        key = type(tensor.type), tensor.type.name, address_space, dtype
        tensor.number_of_type = _type_numbers.setdefault(key, len(_type_numbers))
        return tensor.number_of_type


def _describe(values: Iterable[Any], key: list[Any], tensors: list[tl.tensor]) -> bool:
    """Append what decides on an operation's computations to `key`, and the tensors to `tensors`.

    Returns whether that is all.
    """
    for value in values:
        kind = type(value)
        if kind is tl.tensor:
            if type(value.handle) is not TensorHandle:
                return False
            key.append(_number_of_type(value))
            tensors.append(value)
        elif value is None or kind is int or kind is bool or kind is str:
            key += (kind, value)
        elif kind is float:
            key += (kind, repr(value))  # so that zeros differ by their signs
        elif kind is tl.dtype or kind is tl.pointer_type or kind is tl.block_type:
            key += (kind, value.name)
        elif kind is tl.PropagateNan:
            key += (kind, int(value))
        else:
            if kind is tuple or kind is list or kind is tl.tuple:
                parts = list(value)
            elif kind is tl.constexpr:
                parts = [value.value]
            elif kind is slice:
                parts = [value.start, value.stop, value.step]
            else:
                return False
            key += (kind, len(parts))
            if not _describe(parts, key, tensors):
                return False
    return True


_BY_TRUTH, _STOCK = object(), object()


@functools.cache
def _replayed(member: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation of the language that is recorded, and replayed from then on."""
    semantic = interpreter.interpreter_semantic
    plans: dict[Any, Any] = {}

    def record(args: Any, kwargs: Any, tensors: list[tl.tensor], key: Any, has_truths: bool) -> Any:
        global _recorder
        builder = semantic.builder
        semantic.builder = _recorder = recorder = _Recorder(builder, tensors)
        try:
            result = member(*args, **kwargs, _semantic=semantic)
        finally:
            semantic.builder, _recorder = builder, None
        if recorder.reads_values:
            plans[key] = _STOCK
        elif recorder.asks_truth and not has_truths:
            plans[key] = _BY_TRUTH
        else:
            plans[key] = recorder.compiled(result)
        return result

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("_semantic", None)
        parts: list[Any] = []
        tensors: list[tl.tensor] = []
        if (
            _recorder is not None  # a part of the operation that is recorded
            or not _describe(args, parts, tensors)
            or (
                kwargs
                and not _describe((part for i in kwargs.items() for part in i), parts, tensors)
            )
        ):
            return member(*args, **kwargs, _semantic=semantic)
        key = tuple(parts)
        plan = plans.get(key)
        has_truths = plan is _BY_TRUTH
        if has_truths:
            key = (key, *(tensor.handle.data.size == 1 and bool(tensor) for tensor in tensors))
            plan = plans.get(key)
        if plan is None:
            return record(args, kwargs, tensors, key, has_truths)
        if plan is _STOCK:
            return member(*args, **kwargs, _semantic=semantic)
        return plan(*tensors)

    return call


def replay_operations() -> None:
    """Have kernels that are launched from here on record and replay operations, in this process."""
    patch_language, patch_tensors = interpreter._patch_lang, interpreter._patch_lang_tensor
    np_dtype, np_dtypes = interpreter._get_np_dtype, {}

    def patch_operation(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(owner, name, _replayed(member))

    def patch_tensors_that_note_reads(tensor: Any, scope: Any) -> None:
        patch_tensors(tensor, scope)
        truth, index = tensor.__bool__, tensor.__index__

        def noting_truth(self: Any) -> bool:
            if _recorder is not None:
                _recorder.asks_truth = True
            return truth(self)

        def noting_index(self: Any) -> int:
            if _recorder is not None:
                _recorder.reads_values = True
            return index(self)

        scope.set_attr(tensor, "__bool__", noting_truth)
        scope.set_attr(tensor, "__index__", noting_index)

    @functools.cache
    def patch_language_once(function: Any) -> Any:
        """Leave operations where each launch and call would put them and launches remove them."""
        patch_language(function)
        return interpreter._LangPatchScope()  # which restores nothing

    def np_dtype_of(dtype: Any) -> Any:
        """Return the type of the data; the stock function makes a table for each call."""
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = np_dtype(dtype)
        return np_dtypes[dtype.name]

    # Sums are checked for overflow, and nobody is told.
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    interpreter._patch_attr = patch_operation
    interpreter._patch_lang = patch_language_once
    interpreter._patch_lang_tensor = patch_tensors_that_note_reads
    interpreter._get_np_dtype = np_dtype_of
    _launch_with_tensors_of_cpus()


def _launch_with_tensors_of_cpus() -> None:
    """Have launches take tensors as they are, and keep what they ask of functions and tensors.

    The stock way copies all storages from the device and back, which is the CPU. PyTorch's modes
    do not see what a launch asks of tensors: that would take long.
    """
    convert, pointer_types = interpreter._implicit_cvt, {}
    executor = interpreter.GridExecutor
    launch = executor.__call__
    signature = functools.cache(inspect.getfullargspec)

    def converted(arg: Any) -> Any:
        if type(arg) is not torch.Tensor:
            return convert(arg)
        if arg.dtype not in pointer_types:
            pointer_types[arg.dtype] = convert(arg).type
        kind = pointer_types[arg.dtype]
        return tl.tensor(TensorHandle(np.array([arg.data_ptr()], dtype=np.uint64), kind), kind)

    def arguments(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        spec = signature(function)
        defaults = spec.defaults or ()
        return {
            **dict(zip(spec.args[len(spec.args) - len(defaults) :], defaults, strict=True)),
            **dict(zip(spec.args, args, strict=False)),
            **(spec.kwonlydefaults or {}),
            **kwargs,
        }

    def launch_unseen(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch._C.DisableTorchFunction():
            launch(self, *args, **kwargs)

    executor.__call__ = launch_unseen
    executor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    executor._restore_args_dev = lambda self, *args: None
    interpreter._implicit_cvt = converted
    replaced = {"getfullargspec": signature, "getcallargs": arguments}
    interpreter.inspect = SimpleNamespace(**{**vars(inspect), **replaced})
