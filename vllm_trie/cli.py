"""The `vllm-trie` command.

Commands import what they need when they run, so that `vllm-trie model-path` answers at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vllm_trie._version import __version__
from vllm_trie.extras import brought

LAB = "vllm_trie.lab.commands.main"
LAB_COMMANDS = ("model-path", "fetch-model", "doctor")
"""Commands of the application in :data:`LAB`."""
_OF_EXTRAS = {
    name: (importlib.util.resolve_name(module, package), summary)
    for package, commands in brought("commands")
    for name, (module, summary) in commands.items()
}
GROUPS = {
    "demo": "vllm_trie.lab.demo.command",
    "explore": "vllm_trie.lab.commands.explore",
    "validate": "vllm_trie.lab.check.command",
    **{name: module for name, (module, _) in _OF_EXTRAS.items()},
}
"""Commands that live in other modules, each as a typer application named ``app``."""


SUMMARIES = {name: summary for name, (_, summary) in _OF_EXTRAS.items()}
"""The help of these groups, so that `--help` lists them without their imports."""


_REMOVED = {
    "store": "an engine's log says at its start how many texts it read",
    "beam check": 'take `vllm-trie validate --part "beam search"`',
    "beam": "take `vllm-trie explore --beam-width 4`, or `beam_trace` of a request",
    "demo --svg": "take `vllm-trie explore`",
    "demo --html": "take `vllm-trie explore`",
}
"""Commands and options of earlier releases, and what to use instead."""


class _LazyGroup(TyperGroup):
    """A group that imports the modules of :data:`GROUPS` only when they are asked for."""

    _lists = False

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._lists = True
        super().format_help(ctx, formatter)

    def list_commands(self, ctx: Any) -> list[str]:
        groups = sorted(name for name, module in GROUPS.items() if _is_installed(module))
        return [*(LAB_COMMANDS if _is_installed(LAB) else ()), *groups]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self._lists and cmd_name in SUMMARIES:
            return TyperGroup(name=cmd_name, help=SUMMARIES[cmd_name])
        module = LAB if cmd_name in LAB_COMMANDS else GROUPS.get(cmd_name)
        if module is None or not _is_installed(module):
            return None
        command = typer.main.get_command(importlib.import_module(module).app)
        if cmd_name in LAB_COMMANDS:
            return command.commands[cmd_name]  # type: ignore[attr-defined]
        command.name = cmd_name
        return command


def _is_installed(module: str) -> bool:
    """Return whether a module is there: an installation may lack the laboratory."""
    # The search for a module imports the packages that it is in, and Medusa's imports torch.
    return not module.startswith("vllm_trie.lab.") or bool(
        importlib.util.find_spec("vllm_trie.lab")
    )


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Token tries for vLLM: tree speculative decoding and trie beam search.",
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options of the command itself."""


def main() -> None:
    """Run the command."""
    words = [word.partition("=")[0] for word in sys.argv[1:]]
    for removed, instead in _REMOVED.items():
        command, _, option = removed.partition(" --")
        path = command.split()
        if words[: len(path)] == path and (not option or f"--{option}" in words):
            sys.exit(f"error: `vllm-trie {removed}` is gone; {instead}")
    app(prog_name="vllm-trie")


if __name__ == "__main__":
    main()
