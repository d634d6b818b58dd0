"""`deep-ep monitor`: what the ranks of this host are doing."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict
from importlib import resources
from pathlib import Path

import click

from deep_ep import extras
from deep_ep.errors import ConfigError
from deep_ep.metrics import LOCALHOST
from deep_ep.monitor import view
from deep_ep.monitor.ranks import HostCollector, find_processes, scrape_all
from deep_ep.screen import Screen

_NO_RANKS = (
    "no process of this user on this host serves metrics; start the job with DEEP_EP_METRICS=1, or call "
    "deep_ep.metrics.serve(buffer)"
)


@click.command
@click.option("--once", is_flag=True, help="Print what there is now and end; exit code 1 if there are no ranks.")
@click.option("--json", "as_json", is_flag=True, help="Print lines of JSON, and end: as with --once.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--serve", "is_server", is_flag=True, help="Serve the metrics of all ranks of this host for Prometheus.")
@click.option("--address", default=LOCALHOST, show_default=True, help="With --serve: who may connect.")
@click.option("--port", type=click.IntRange(0, 65535), default=9464, show_default=True, help="With --serve: the port.")
@click.option(
    "--dashboard", type=click.Path(dir_okay=False, path_type=Path), help="Write a dashboard for Grafana, and end."
)
def command(
    interval_s: float, address: str, port: int, dashboard: Path | None, *, once: bool, as_json: bool, is_server: bool
) -> None:
    """Show the ranks of this host: their calls, waits and experts, until Ctrl-C.

    Ranks are seen if they were started with DEEP_EP_METRICS=1. What is shown is what came since the last look.
    """
    screen = Screen()
    if dashboard is not None:
        dashboard.write_text(resources.files("deep_ep.monitor").joinpath("dashboard.json").read_text())
        screen.note(f"{dashboard}: import it in Grafana (Dashboards, New, Import)")
        return
    extras.require("monitor")
    if once or as_json:
        _print_once(screen, interval_s, as_json=as_json)
        return
    with suppress(KeyboardInterrupt):
        if is_server:
            _serve(screen, address, port)
        else:
            _show(screen, interval_s)


def _print_once(screen: Screen, interval_s: float, *, as_json: bool) -> None:
    now = view.read(scrape_all(find_processes()))
    if not now:
        screen.note(_NO_RANKS)
        raise click.exceptions.Exit(1)
    operations, ranks = view.operation_lines(now, {}, interval_s), view.rank_lines(now, {}, interval_s)
    if as_json:
        for operation in operations:
            screen.record(asdict(operation))
        for rank in ranks:
            screen.record(asdict(rank))
        return
    screen.table(view.OPERATION_COLUMNS, view.operation_rows(operations))
    screen.table(view.RANK_COLUMNS, view.rank_rows(ranks))


def _show(screen: Screen, interval_s: float) -> None:
    """Show tables that change, until somebody interrupts."""
    before: dict[view.Key, view.Reading] = {}
    seen_s = time.monotonic()
    with screen.live() as update:
        while True:
            now = view.read(scrape_all(find_processes()))
            now_s = time.monotonic()
            since_s, seen_s = now_s - seen_s, now_s
            if now:
                operations, ranks = view.operation_lines(now, before, since_s), view.rank_lines(now, before, since_s)
                tables = [
                    (view.OPERATION_COLUMNS, view.operation_rows(operations)),
                    (view.RANK_COLUMNS, view.rank_rows(ranks)),
                ]
                update(tables, "Ctrl-C ends this; the job goes on.")
            else:
                update([], f"{_NO_RANKS}. Still looking; Ctrl-C ends this.")
            before = now
            time.sleep(interval_s)


def _serve(screen: Screen, address: str, port: int) -> None:
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(HostCollector())
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        raise ConfigError(f"--address {address} --port {port} cannot be served: {error.strerror}") from error
    screen.line(f"http://{address}:{server.server_port}/metrics")
    screen.note("serves the metrics of all ranks of this host; Ctrl-C ends this")
    if address != LOCALHOST:
        screen.note(f"whoever reaches {address} can read them")
    try:
        thread.join()
    finally:
        server.shutdown()
