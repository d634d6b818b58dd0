"""The door of the command line: `deep-ep`, or `python -m deep_ep`."""

from __future__ import annotations

import sys

from deep_ep import extras


def main() -> None:
    """Run a command; without the packages that it needs, say how to get them."""
    try:
        extras.require("cli")
    except extras.MissingExtraError as error:
        sys.stderr.write(f"deep-ep: {error}\n")
        sys.exit(2)
    # Only now, as it needs what was looked for.
    from deep_ep.cli import cli

    cli(prog_name="deep-ep")


if __name__ == "__main__":
    main()
