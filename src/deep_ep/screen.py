"""What tools print: tables and lines on stdout, notes and progress on stderr. The only file that knows colours.

Colours appear on terminals only, and not if NO_COLOR is set; what is said never depends on them. Where stdout is not a
terminal, a row of a table is one line however long it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

Cells = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Columns and rows of a table."""

_STYLES = {
    "ok": "green",
    "PASSED": "green",
    "warning": "yellow",
    "problem": "bold red",
    "FAILED": "bold red",
}
_WIDTH_OF_FILES = 400


class Screen:
    """Where a command prints."""

    def __init__(self) -> None:
        self._out = Console(highlight=False, soft_wrap=True)
        if not self._out.is_terminal:
            self._out = Console(highlight=False, soft_wrap=True, width=_WIDTH_OF_FILES)
        self._err = Console(stderr=True, highlight=False, soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
        """Print a table; a column whose name ends with `>` has its cells at the right."""
        # A table must fit; soft wrap, which is right for lines, would let its rows run over the edge.
        with self._out.capture() as text:
            self._out.print(_table(columns, rows, title), soft_wrap=False)
        self._out.file.write("\n".join(line.rstrip() for line in text.get().splitlines()) + "\n\n")

    @contextmanager
    def live(self) -> Iterator[Callable[[Sequence[Cells], str], None]]:
        """Show tables in place of those before; what it yields is given columns and rows, and a note below them."""
        with Live(console=self._out, auto_refresh=False, vertical_overflow="crop") as shown:

            def update(tables: Sequence[Cells], note: str) -> None:
                parts = [_table(columns, rows) for columns, rows in tables]
                shown.update(Group(*parts, Text(note, style="dim")), refresh=True)

            yield update

    def line(self, *words: str) -> None:
        """Print a line of words, each styled by what it says."""
        self._out.print(Text(" ").join(_styled(word) for word in words))

    def record(self, fields: Mapping[str, Any]) -> None:
        """Print a line of JSON."""
        self._out.file.write(json.dumps(fields) + "\n")
        self._out.file.flush()

    def note(self, text: str) -> None:
        """Print a line on stderr."""
        self._err.print(Text(text, style="dim"))

    @contextmanager
    def progress(self, description: str, num_steps: int) -> Iterator[Callable[[], None]]:
        """Show a bar on stderr, if that is a terminal; what it yields is called after each step.

        Example:
            >>> with screen.progress("cases", len(cases)) as advance:
            ...     for case in cases:
            ...         run(case)
            ...         advance()
        """
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        is_hidden = not self._err.is_terminal
        # Seldom, as the ranks that are timed need the cores.
        with Progress(*columns, console=self._err, transient=True, disable=is_hidden, refresh_per_second=2) as bar:
            task = bar.add_task(description, total=num_steps)
            yield lambda: bar.advance(task)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, title=title or None, title_justify="left", pad_edge=False)
    for column in columns:
        is_number = column.endswith(">")
        table.add_column(column.removesuffix(">"), justify="right" if is_number else "left", no_wrap=is_number)
    for row in rows:
        table.add_row(*(_styled(cell) for cell in row))
    return table


def _styled(word: str) -> Text:
    return Text(word, style=_STYLES.get(word, ""))
