#!/usr/bin/env python3
"""Two hosts on one machine: network namespaces with a cable between them, each with a /dev/shm of its own.

    python tests/hosts/two_hosts.py --ranks 2 2 --json results.json

Needs root, `ip` and `tc` (iproute2) and `unshare`. It sends nothing outside of the namespaces that it makes, and takes
them down at its end. Checks normal and low-latency mode against their specifications, counts the bytes that leave the
interface, with the link shaped to 1 Gbit/s, and kills a rank and cuts the link in the middle of exchanges.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
RATE_BITS_PER_S = 1e9


def why_not() -> str | None:
    """Return what this machine lacks, if anything."""
    for tool in ("ip", "tc", "unshare", "bash"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    name = f"deepep{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


class TwoHosts:
    """Two namespaces with a cable; a context manager that takes them down."""

    def __init__(self) -> None:
        self._id = os.getpid() % 10000
        self.names = [f"deepep{self._id}{side}" for side in "AB"]
        self.interfaces = [f"v{self._id}{side}" for side in "AB"]
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        self._folder = tempfile.TemporaryDirectory(prefix="two-hosts-")
        self._processes: list[subprocess.Popen] = []
        self._num_runs = 0

    def __enter__(self) -> TwoHosts:
        for name in self.names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", self.interfaces[0], "type", "veth", "peer", "name", self.interfaces[1])
        for name, interface, address in zip(self.names, self.interfaces, self.addresses, strict=True):
            _run("ip", "link", "set", interface, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", interface)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", interface, "up")
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)
        self._folder.cleanup()

    def shape(self) -> None:
        """Let each direction of the cable carry 1 Gbit/s."""
        for name, interface in zip(self.names, self.interfaces, strict=True):
            _run(
                *("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", interface, "root", "tbf"),
                *("rate", "1gbit", "burst", "256kb", "latency", "50ms"),
            )

    def cut(self) -> None:
        """Take the cable down."""
        _run("ip", "-n", self.names[0], "link", "set", self.interfaces[0], "down")

    def start(self, num_ranks: tuple[int, int], scenario: str, *args: str) -> Path:
        """Start ranks on both hosts; return the folder of their results."""
        self._num_runs += 1
        folder = Path(self._folder.name) / str(self._num_runs)
        folder.mkdir()
        first = 0
        for host in range(2):
            variables = {
                "GLOO_SOCKET_IFNAME": self.interfaces[host],
                "TP_SOCKET_IFNAME": self.interfaces[host],
                "MASTER_ADDR": self.addresses[0],
                "MASTER_PORT": str(29500 + self._num_runs),
                "WORLD_SIZE": str(sum(num_ranks)),
                "TWO_HOSTS_FOLDER": str(folder),
                "CUDA_VISIBLE_DEVICES": "",
            }
            program = shlex.join([sys.executable, str(HERE / "on_two_hosts.py"), scenario, *args])
            ranks = " ".join(str(first + i) for i in range(num_ranks[host]))
            script = (
                f"hostname node{'AB'[host]}; mount -t tmpfs tmpfs /dev/shm; "
                f"for rank in {ranks}; do RANK=$rank {program} > {folder}/$rank.out 2>&1 & done; wait"
            )
            command = ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "--ipc", "--mount", "bash", "-c"]
            self._processes.append(
                subprocess.Popen([*command, script], env=os.environ | variables, start_new_session=True)
            )
            first += num_ranks[host]
        return folder

    def results(self, folder: Path, ranks: list[int], timeout_s: float) -> list[dict]:
        """Wait for the results of some ranks."""
        deadline = time.monotonic() + timeout_s
        while not all((folder / f"{rank}.json").exists() for rank in ranks):
            ended = all(process.poll() is not None for process in self._processes)
            if time.monotonic() > deadline or ended:
                outputs = "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(folder.glob("*.out")))
                self.end()
                raise RuntimeError(f"no result of all ranks {ranks} in {timeout_s} s\n{outputs}")
            time.sleep(0.02)
        (folder / "end").touch()
        self.end(grace_s=20.0)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in ranks]

    def end(self, grace_s: float = 0.0) -> None:
        """End all ranks."""
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=grace_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()


def check(hosts: TwoHosts, num_ranks: tuple[int, int]) -> dict:
    """Check both modes."""
    folder = hosts.start(num_ranks, "check")
    result = hosts.results(folder, list(range(sum(num_ranks))), 240.0)[0]
    assert [len(ranks) for ranks in result["hosts"]] == list(num_ranks), result
    return result


def measure(hosts: TwoHosts, num_ranks: tuple[int, int]) -> dict:
    """Count bytes and time; the link is shaped."""
    folder = hosts.start(num_ranks, "measure")
    ranks = hosts.results(folder, list(range(sum(num_ranks))), 240.0)
    by_host = [ranks[: num_ranks[0]], ranks[num_ranks[0] :]]
    lines = {}
    for call in ("dispatch", "cached dispatch", "combine", "flat all_to_all"):
        worst = {"bytes_ratio": 0.0, "time_ratio": 0.0, "host_tx_bytes": 0, "one_copy_bytes": 0}
        for host, other in (by_host, by_host[::-1]):
            # A combine returns a row for each token that came: what this host sends is what the other one sent.
            senders = other if call == "combine" else host
            name = "tokens_to_other_ranks_of_other_hosts" if call == "flat all_to_all" else "tokens_to_other_hosts"
            one_copy = sum(rank[name] * rank["row_bytes"] for rank in senders)
            sent = host[0][call]["host_tx_bytes"]
            elapsed_s = max(rank[call]["s"] for rank in ranks)
            worst = {
                "bytes_ratio": max(worst["bytes_ratio"], sent / one_copy),
                "time_ratio": max(worst["time_ratio"], elapsed_s / (one_copy * 8 / RATE_BITS_PER_S)),
                "host_tx_bytes": worst["host_tx_bytes"] + sent,
                "one_copy_bytes": worst["one_copy_bytes"] + one_copy,
                "s": elapsed_s,
            }
        lines[call] = worst
    predicted = sum(rank["tokens_to_other_ranks_of_other_hosts"] for rank in ranks) / sum(
        rank["tokens_to_other_hosts"] for rank in ranks
    )
    measured = lines["flat all_to_all"]["host_tx_bytes"] / lines["dispatch"]["host_tx_bytes"]
    return {
        "shape": ranks[0]["shape"],
        "calls": lines,
        "flat_over_ours": {"by_routing": predicted, "on_the_wire": measured},
    }


def suffer(
    hosts: TwoHosts, num_ranks: tuple[int, int], harm: str, timeout_s: float = 4.0, slack_s: float = 1.0
) -> dict:
    """Kill a rank, or cut the cable, in the middle of exchanges; return what each survivor raised, and when.

    Beyond the time limit, `slack_s` may pass: a machine with more to do than cores is slow to tell.
    """
    ranks = list(range(sum(num_ranks)))
    folder = hosts.start(num_ranks, "suffer", str(timeout_s))
    deadline = time.monotonic() + 60.0
    while not all((folder / f"{rank}.ready").exists() for rank in ranks):
        if time.monotonic() > deadline:
            hosts.results(folder, ranks, 0.0)
        time.sleep(0.02)
    victim = ranks[-1]
    if harm == "kill":
        os.kill(int((folder / f"{victim}.pid").read_text()), signal.SIGKILL)
        ranks.remove(victim)
    else:
        hosts.cut()
    harmed_s = time.monotonic()
    results = hosts.results(folder, ranks, 60.0)
    survivors = {}
    for rank, result in zip(ranks, results, strict=True):
        after_s = result["at_s"] - harmed_s
        survivors[rank] = {"after_s": after_s, **{key: result[key] for key in ("kind", "message", "again")}}
        assert after_s < timeout_s + slack_s, f"rank {rank} raised after {after_s} s: {result}"
        assert result["again_s"] < slack_s, result
        host = 0 if rank < num_ranks[0] else 1
        others = list(range(num_ranks[0])) if host else list(range(num_ranks[0], sum(num_ranks)))
        text = result["message"]
        if harm == "kill":
            assert any(name in text for name in (f"rank {victim}", f"[{victim}]")), f"rank {rank}: {text}"
        else:
            assert any(f"rank {other}" in text or f"[{other}]" in text for other in others), f"rank {rank}: {text}"
    texts = [result["message"] for result in results]
    assert any("GLOO_SOCKET_IFNAME" in text and hosts.interfaces[0][:-1] in text for text in texts), texts
    return {"timeout_s": timeout_s, "survivors": survivors}


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs=2, default=(2, 2), help="ranks of each host (default: 2 2)")
    parser.add_argument("--only", nargs="+", default=("check", "measure", "kill", "link"))
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    lacking = why_not()
    if lacking:
        print(f"this machine cannot play two hosts: {lacking}")
        return 2
    num_ranks = tuple(args.ranks)
    report = {
        "ranks": num_ranks,
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.release()}",
    }
    with TwoHosts() as hosts:
        if "check" in args.only:
            report["check"] = check(hosts, num_ranks)
            print("normal and low-latency mode: as specified")
        if "kill" in args.only:
            report["kill"] = suffer(hosts, num_ranks, "kill")
            print("a killed rank: every survivor names it in time")
        if "measure" in args.only:
            hosts.shape()
            report["measure"] = measure(hosts, num_ranks)
            for call, line in report["measure"]["calls"].items():
                print(
                    f"{call}: {line['bytes_ratio']:.3f} times one copy per destination, "
                    f"{line['time_ratio']:.2f} times its time at 1 Gbit/s"
                )
            print(f"flat all_to_all over ours: {report['measure']['flat_over_ours']}")
        if "link" in args.only:
            report["link"] = suffer(hosts, num_ranks, "link")
            print("a cut link: every rank names one behind it in time")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
