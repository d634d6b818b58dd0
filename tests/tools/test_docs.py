"""The documentation: its site builds without a broken link, its code runs, and it names what there is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from deep_ep import cli, env
from rank_pool import FreshRanks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))


def code_of(page):
    """Return the code of a page that is meant to run: its blocks follow each other as one program."""
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL))


def run_pages(rank, folder):
    os.chdir(folder)
    # Here the ranks have met already.
    dist.init_process_group = lambda *_, **__: None
    for page in PAGES:
        if code := code_of(page):
            exec(compile(code, page, "exec"), {"__name__": "__main__"})
            dist.barrier()


def test_code_of_every_page_runs_on_two_ranks(tmp_path):
    with FreshRanks(2, run_pages, str(tmp_path), env={"DEEP_EP_CACHE_DIR": str(tmp_path / "cache")}) as ranks:
        ranks.results(timeout_s=200)
    assert (tmp_path / "trace.png").exists()
    assert sum(bool(code_of(page)) for page in PAGES) >= 8


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_site_has_every_page_figure_and_variable(site):
    for page in PAGES:
        name = page.removesuffix(".md")
        assert (site / ("index.html" if name == "index" else f"{name}/index.html")).exists()
    for figure in ("routing", "layout", "protocol", "timeline"):
        assert (site / "figures" / f"{figure}.svg").read_text().rstrip().endswith("</svg>")
    variables = (site / "environment" / "index.html").read_text()
    assert all(f"<code>{variable.name}</code>" in variables for variable in env.ALL_VARIABLES)
    reference = (site / "api" / "index.html").read_text()
    assert all(f'id="deep_ep.Buffer.{name}"' in reference for name in ("dispatch", "low_latency_combine", "destroy"))
    assert not list(site.rglob("*.py")), "what builds the site is no part of it"


def test_no_marker_is_left(site):
    left = [path for path in site.rglob("*.html") if re.search(r"<!-- (table|readme):", path.read_text())]
    assert left == []


def test_every_command_is_in_the_documentation():
    text = "\n".join((DOCS / page).read_text() for page in PAGES)
    assert all(f"`deep-ep {name}" in text for name in cli.COMMANDS)
    named = set(re.findall(r"`?deep-ep ([a-z]+)", text)) - set(cli.COMMANDS)
    assert named == set(), "commands that do not exist"


def test_variables_that_the_documentation_names_exist():
    text = "\n".join((DOCS / page).read_text() for page in PAGES)
    named = set(re.findall(r"DEEP_EP_(?!TEST_)[A-Z0-9_]+", text))  # those of tests are no part of the library
    assert named <= {variable.name for variable in env.ALL_VARIABLES}
