"""What vLLM's Python files say of the symbols of the ledger, read without importing them.

Follows imports between vLLM's modules, names of other names, and base classes.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import inspect
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Scope: TypeAlias = dict[str, tuple[ast.AST | None, ...]]
"""What each name of a block may stand for; None is for nothing."""
_KEEPING = {
    *("abstractmethod", "cache", "classmethod", "contextmanager", "final", "inference_mode"),
    *("instrument", "lru_cache", "no_grad", "override", "staticmethod", "step_eplb_after"),
}
"""Decorators that leave a function's parameters as they are, vLLM's among them."""


@dataclass(frozen=True, eq=False)
class _Module:
    name: str
    is_package: bool
    scope: Scope


@dataclass(frozen=True)
class _Class:
    node: ast.ClassDef
    module: _Module

    @property
    def scope(self) -> Scope:
        return _scope_of_class(self.node)


@dataclass(frozen=True)
class _Function:
    node: ast.FunctionDef | ast.AsyncFunctionDef
    module: _Module


@dataclass(frozen=True)
class _Real:
    """An object of Python's own library."""

    value: Any


@dataclass(frozen=True)
class _Unknown:
    """Something that is there, and of which the files tell no more."""

    name: str


_RECORDS = (_Unknown("NamedTuple"), _Unknown("msgspec.Struct"))
"""Bases that make parameters of a class's annotations, as ``dataclass`` does."""
_Symbol: TypeAlias = _Module | _Class | _Function | _Real | _Unknown


class VllmFiles:
    """The Python files of a vLLM.

    Args:
        root: The folder, or the place in a wheel, that holds the folder `vllm`.
    """

    def __init__(self, root: Path | zipfile.Path) -> None:
        self._root = root
        self._modules: dict[str, _Module] = {}

    def parameters(self, target: str, is_called: bool = True) -> list[str]:
        """Return the names of a target's parameters; none where it is not called.

        Raises:
            ImportError: There is no such module.
            AttributeError: There is no such attribute.
            NotImplementedError: The files alone do not tell.
        """
        module, _, path = target.partition(":")
        try:
            symbol: _Symbol = self._module(module)
            for name in path.split(".") if path else ():
                symbol = self._attribute(symbol, name)
            return self._parameters(symbol) if is_called else []
        except RecursionError:
            raise NotImplementedError(f"{target} is defined by itself") from None

    def check_import(self, target: str) -> None:
        """Raise the same errors where the import of a module, or of a name from it, fails."""
        module, _, name = target.partition(":")
        if name:
            self._import(module, name)
        else:
            self._module(module)

    # -- modules and what they import --------------------------------------------------------------

    def _module(self, name: str) -> _Module:
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> _Module:
        stem = name.replace(".", "/")
        for file in (self._root / f"{stem}/__init__.py", self._root / f"{stem}.py"):
            if file.is_file():
                try:
                    body = ast.parse(file.read_text(encoding="utf-8")).body
                except SyntaxError as error:
                    raise NotImplementedError(
                        f"this Python does not read {name}: {error}"
                    ) from None
                return _Module(name, file.name == "__init__.py", scope_of(body))
        raise ModuleNotFoundError(f"No module named {name!r}")

    def _import(self, module: str, name: str) -> _Symbol:
        """Return what ``from module import name`` finds."""
        if module.partition(".")[0] != "vllm":
            return _outside(module, name)
        try:
            return self._attribute(self._module(module), name)
        except (AttributeError, NotImplementedError):
            with contextlib.suppress(ModuleNotFoundError):
                return self._module(f"{module}.{name}")
            raise

    def _imported(self, node: ast.Import | ast.ImportFrom, name: str, module: _Module) -> _Symbol:
        """Return what an import statement in a module makes a name stand for."""
        if isinstance(node, ast.Import):
            named = next((alias.name for alias in node.names if alias.asname == name), name)
            return self._module(named) if named.split(".")[0] == "vllm" else _outside(named)
        original = next((alias.name for alias in node.names if alias.asname == name), name)
        source = _source(node, module)
        if source == module.name:  # of its own submodules
            return self._module(f"{source}.{original}")
        return self._import(source, original)

    # -- names -------------------------------------------------------------------------------------

    def _attribute(self, owner: _Symbol, name: str) -> _Symbol:
        match owner:
            case _Module():
                return self._of_module(owner, name)
            case _Class():
                return self._of_class(owner, name)
            case _Real(value):
                return _Real(getattr(value, name))
        raise NotImplementedError(f"{_named(owner)} is not looked into for {name!r}")

    def _of_module(self, module: _Module, name: str) -> _Symbol:
        if name in module.scope:
            return self._meaning(name, module, module.scope)
        for (star,) in (nodes for key, nodes in module.scope.items() if key.startswith("*")):
            assert isinstance(star, ast.ImportFrom)
            try:
                return self._import(_source(star, module), name)
            except AttributeError:
                continue
        if "__getattr__" in module.scope:
            raise NotImplementedError(f"{module.name} makes attributes when asked")
        raise AttributeError(f"module {module.name!r} has no attribute {name!r}")

    def _of_class(self, owner: _Class, name: str) -> _Symbol:
        order = self._order(owner)
        for base in order:
            match base:
                case _Class() if name in base.scope:
                    return self._meaning(name, base.module, base.scope)
                case _Real(value) if hasattr(value, name):
                    return _Real(getattr(value, name))
                case _Unknown():
                    raise NotImplementedError(f"{owner.node.name} derives from {base.name}")
        if any(isinstance(base, _Class) and name in _annotated(base.node) for base in order):
            raise NotImplementedError(f"{owner.node.name}.{name} is annotated only")
        if name in vars(type):
            return _Unknown(name)
        raise AttributeError(f"type object {owner.node.name!r} has no attribute {name!r}")

    def _order(self, owner: _Class) -> list[_Symbol]:
        """Return a class and its bases in the order in which attributes are looked for."""
        order: list[_Symbol] = [owner]
        for node in owner.node.bases:
            try:
                base = self._expression(node, owner.module, owner.module.scope)
            except NotImplementedError:
                base = _Unknown("")
            match base:
                case _Class():
                    order += self._order(base)
                case _Real(type() as value):
                    order += map(_Real, value.__mro__)
                case _:
                    order.append(_Unknown(ast.unparse(node)))
        return list(dict.fromkeys([_Real(object), *reversed(order)]))[::-1]

    def _meaning(self, name: str, module: _Module, scope: Scope) -> _Symbol:
        match scope[name]:
            case (ast.FunctionDef() | ast.AsyncFunctionDef() as node,):
                return _Function(node, module)
            case (ast.ClassDef() as node,):
                return _Class(node, module)
            case (ast.Import() | ast.ImportFrom() as node,):
                return self._imported(node, name, module)
            case (ast.Assign(targets=[ast.Name()]) | ast.AnnAssign() as node,):
                assert node.value is not None
                return self._expression(node.value, module, scope)
            case meanings if None not in meanings:
                return _Unknown(name)
        raise NotImplementedError(f"{module.name} has {name!r} under conditions")

    def _expression(self, node: ast.expr, module: _Module, scope: Scope) -> _Symbol:
        match node:
            case ast.Name(id=name) if name in scope:
                return self._meaning(name, module, scope)
            case ast.Name(id=name) if name in module.scope or not hasattr(builtins, name):
                return self._of_module(module, name)
            case ast.Name(id=name):
                return _Real(getattr(builtins, name))
            case ast.Attribute(value=value, attr=name):
                return self._attribute(self._expression(value, module, scope), name)
            case ast.Subscript(value=value):  # a generic class
                return self._expression(value, module, scope)
        return _Unknown(ast.unparse(node))

    # -- parameters --------------------------------------------------------------------------------

    def _parameters(self, symbol: _Symbol) -> list[str]:
        match symbol:
            case _Function(node, _):
                if strange := sorted(_decorators(node) - _KEEPING):
                    raise NotImplementedError(f"{node.name} is decorated with {strange[0]}")
                given = node.args
                named = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs]
                return [argument.arg for argument in (*named, given.kwarg) if argument is not None]
            case _Class():
                return self._of_constructor(symbol)
            case _Real(value):
                return list(inspect.signature(value).parameters)
        raise NotImplementedError(f"{_named(symbol)} may be called in any way")

    def _of_constructor(self, symbol: _Class) -> list[str]:
        decorators = _decorators(symbol.node)
        if strange := sorted(decorators - {"dataclass"}):
            raise NotImplementedError(f"{symbol.node.name} is decorated with {strange[0]}")
        order = self._order(symbol)
        is_record = "dataclass" in decorators or any(base in order for base in _RECORDS)
        if is_record and "__init__" not in symbol.scope:
            classes = [base for base in reversed(order) if isinstance(base, _Class)]
            return list(dict.fromkeys(name for base in classes for name in _fields(base.node)))
        for name in ("__new__", "__init__"):
            method = self._of_class(symbol, name)
            if isinstance(method, _Function):
                return self._parameters(method)
        raise NotImplementedError(f"{symbol.node.name} has no constructor of its own")


def scope_of(body: Iterable[ast.stmt]) -> Scope:
    """Return the names that a block's statements define; what only types need is left out."""
    scope: Scope = {}
    for node in body:
        for name, meanings in _defined(node).items():
            sure = tuple(meaning for meaning in meanings if meaning is not None)
            # What may not be defined here leaves what was defined before.
            scope[name] = sure if None not in meanings else sure + scope.get(name, (None,))
    return scope


def _defined(node: ast.stmt) -> Scope:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name: (node,)}
        case ast.Import():
            return {a.asname or a.name.partition(".")[0]: (node,) for a in node.names}
        case ast.ImportFrom(names=[ast.alias(name="*")]):
            return {f"* at {node.lineno}": (node,)}
        case ast.ImportFrom():
            return {alias.asname or alias.name: (node,) for alias in node.names}
        case ast.Assign():
            targets = [name for target in node.targets for name in ast.walk(target)]
            return {name.id: (node,) for name in targets if isinstance(name, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            return {name: (node,)}
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return scope_of(node.orelse)
        case ast.If():
            return _either(node.body, node.orelse)
        case ast.Try():
            handlers = [handler.body for handler in node.handlers]
            going_on = [body for body in handlers if not isinstance(body[-1], ast.Raise)]
            return _either([*node.body, *node.orelse], *going_on) | scope_of(node.finalbody)
        case ast.With():
            return scope_of(node.body)
        case ast.For() | ast.While():
            return _either(node.body, [])
    return {}


def _either(*branches: list[ast.stmt]) -> Scope:
    scopes = [scope_of(branch) for branch in branches]
    names = dict.fromkeys(name for scope in scopes for name in scope)
    return {name: tuple(m for scope in scopes for m in scope.get(name, (None,))) for name in names}


@functools.cache
def _scope_of_class(node: ast.ClassDef) -> Scope:
    return scope_of(node.body)


def _annotated(node: ast.ClassDef) -> list[str]:
    """Return the names that a class annotates in its body, in order."""
    fields = (child for child in node.body if isinstance(child, ast.AnnAssign))
    return [field.target.id for field in fields if isinstance(field.target, ast.Name)]


def _fields(node: ast.ClassDef) -> list[str]:
    """Return the parameters that the annotations in a class's body make."""
    body = ast.unparse(node)
    if "ClassVar" in body or "KW_ONLY" in body or "kw_only" in body or "init=False" in body:
        raise NotImplementedError(f"the fields of {node.name} are of several kinds")
    return _annotated(node)


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    """Return the last words of a definition's decorators."""
    named = (getattr(decorator, "func", decorator) for decorator in node.decorator_list)
    return {ast.unparse(name).rpartition(".")[2] for name in named}


def _source(node: ast.ImportFrom, module: _Module) -> str:
    """Return the absolute name of the module that an import statement names."""
    if not node.level:
        return node.module or ""
    parents = module.name.split(".")
    parents = parents[: len(parents) - node.level + module.is_package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _outside(module: str, name: str = "") -> _Symbol:
    """Return what a module outside of vLLM holds, where it is Python's own."""
    if module.partition(".")[0] in sys.stdlib_module_names:
        loaded: Any = importlib.import_module(module)
        return _Real(getattr(loaded, name) if name else loaded)
    return _Unknown(f"{module}.{name}".rstrip("."))


def _named(symbol: _Symbol) -> str:
    named: Any = getattr(symbol, "node", symbol)
    return str(named.name)
