"""The command line: which commands there are and where they live, and how one that fails ends.

A command is a click command in a module of its own, which is imported when the command is used; a line in `COMMANDS`
makes it known. It prints through `deep_ep.screen`. Exit codes: 0 fine, 1 a problem was found, 2 wrong usage.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

import deep_ep
from deep_ep.errors import ConfigError, DeepEPError
from deep_ep.extras import MissingExtraError

COMMANDS: dict[str, tuple[str, str]] = {
    "check": ("deep_ep.check.command:command", "Tell whether this machine is right, and what to do if not."),
    "bench": ("deep_ep.bench.command:command", "Verify exchanges, then time them beside torch.distributed."),
    "tune": ("deep_ep.tune.command:command", "Search for the fastest launch parameters of this device."),
    "monitor": (
        "deep_ep.monitor.command:command",
        "Show the ranks of this host live, or serve their metrics.",
    ),
    "trace": (
        "deep_ep.trace.command:command",
        "Record a layer of experts on all ranks; draw what overlaps and what waits.",
    ),
    "waits": ("deep_ep.watchdog:command", "Show from the logs of all ranks who waited for whom."),
    "warm": ("deep_ep.warm:command", "Compile kernels ahead of time, with no GPU."),
}
"""Of each command the module and the name in it, like `deep_ep.check:command`, and what it does."""


class LazyGroup(click.Group):
    """Commands that are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write what each command does without importing any."""
        if COMMANDS:
            with formatter.section("Commands"):
                formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an error that the library raises on purpose is a sentence, not a traceback."""
        try:
            return super().invoke(ctx)
        except DeepEPError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(2 if isinstance(error, ConfigError | MissingExtraError) else 1)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(deep_ep.__version__, message="deep-ep %(version)s")
def cli() -> None:
    """Expert-parallel communication for mixture-of-experts models.

    Results go to stdout, notes and progress to stderr. With --json a command prints the same fields as lines of JSON.
    Exit codes: 0 fine, 1 a problem was found, 2 wrong usage.
    """
