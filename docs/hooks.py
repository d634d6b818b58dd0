"""What MkDocs does while it builds the site: tables are made from the code, figures are drawn by it."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from deep_ep import env
from deep_ep.config import PROFILES

ROOT = Path(__file__).parent.parent


def on_files(files: Any, config: Any) -> Any:
    """Add the figures."""
    sys.path.insert(0, str(ROOT / "docs" / "figures"))
    import draw

    for name, content in draw.draw_all().items():
        files.append(File.generated(config, f"figures/{name}", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put what the code says for `<!-- table: NAME -->`, and a part of README.md for `<!-- readme: TITLE -->`."""
    markdown = re.sub(r"<!-- table: (\w+) -->", lambda found: TABLES[found[1]](), markdown)
    return re.sub(r"<!-- readme: (.+?) -->", lambda found: part_of_readme(found[1]), markdown)


def environment_table() -> str:
    """Return every environment variable."""
    rows = []
    for variable in env.ALL_VARIABLES:
        default = {True: "1", False: "0", "": "", None: ""}.get(variable.default, variable.default)
        if isinstance(default, float):
            default = f"{default:g}"
        rows.append((f"`{variable.name}`", str(default), variable.rule, variable.meaning))
    return _table(("variable", "default", "is", "meaning"), rows)


def profile_table() -> str:
    """Return the cluster profiles, a column for each."""
    names = [field.name for field in dataclasses.fields(next(iter(PROFILES.values()))) if field.name != "name"]
    rows = [(f"`{name}`", *(f"{getattr(profile, name):,}" for profile in PROFILES.values())) for name in names]
    return _table(("", *PROFILES), rows)


def part_of_readme(title: str) -> str:
    """Return a section of README.md without its heading, with links that work from here."""
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"README.md has no section {title!r}")
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", found[1]).strip()


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TABLES = {"environment": environment_table, "profiles": profile_table}
