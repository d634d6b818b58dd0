"""`deep-ep check`: what it says of machines, right and wrong, and its exit codes."""

import json
from dataclasses import replace
from functools import partial

import pytest
from click.testing import CliRunner

from deep_ep.bench import facts
from deep_ep.bench.facts import Gpu, Machine, NetworkDevice
from deep_ep.check import command as check_command
from deep_ep.check import exchange
from deep_ep.check.exchange import ExchangePath, try_path
from deep_ep.check.findings import Status, judge, missing_of_nvshmem, nvshmem_version
from deep_ep.cli import cli

LAPTOP = Machine(
    system="Linux 6.1",
    processor="A processor",
    num_cores=8,
    python=(3, 12, 3),
    torch="2.13.0+cpu",
    triton="3.7.1",
    cuda=None,
    cuda_bindings=None,
    driver=None,
    num_gpus_of_driver=0,
    memory_limit_bytes=32 << 30,
    memory_free_bytes=16 << 30,
    locked_memory_bytes=None,
    num_files=65536,
    can_share_memory=True,
    has_peer_memory_module=False,
)
H200 = Gpu(name="NVIDIA H200", capability=(9, 0), memory_bytes=139 << 30, num_links=18, is_exclusive=False)
SERVER = replace(
    LAPTOP,
    torch="2.11.0+cu130",
    cuda="13.0",
    cuda_bindings="13.0.1",
    driver="580.95.05",
    num_gpus_of_driver=2,
    gpus=[H200, H200],
    peer_access=[[True, True], [True, True]],
    network=[NetworkDevice(name="mlx5_0:1", kind="InfiniBand", is_up=True, speed="400 Gb/sec")],
    has_peer_memory_module=True,
)


def concerns(machine):
    """Return name, status and advice of what is not ok."""
    return {f.name: (f.status, f.advice) for f in judge(machine) if f.status is not Status.OK}


@pytest.mark.parametrize("machine", [LAPTOP, SERVER], ids=["laptop", "server"])
def test_a_right_machine_has_no_concerns(machine):
    assert concerns(machine) == {}


def without_links(machine):
    return replace(machine, gpus=[replace(gpu, num_links=0) for gpu in machine.gpus])


EXCLUSIVE = replace(H200, is_exclusive=True)
PCIE = [[True, False], [False, True]]
BAD = {
    "old Python": (replace(LAPTOP, python=(3, 10, 1)), "Python", Status.PROBLEM, "3.11"),
    "old torch": (replace(LAPTOP, torch="2.9.1"), "torch", Status.PROBLEM, "pip install --upgrade torch"),
    "no Triton": (replace(LAPTOP, triton=None), "Triton", Status.WARNING, "pip install 'triton>=3.6'"),
    "no Triton on GPUs": (replace(SERVER, triton="3.5.0"), "Triton", Status.PROBLEM, "pip install 'triton>=3.6'"),
    "torch without CUDA": (replace(LAPTOP, num_gpus_of_driver=2), "GPU", Status.PROBLEM, "without CUDA"),
    "old driver": (replace(LAPTOP, num_gpus_of_driver=2, cuda="13.0"), "GPU", Status.PROBLEM, "update the driver"),
    "older driver": (replace(SERVER, driver="535.1"), "driver", Status.WARNING, "Update the driver"),
    "old CUDA": (replace(SERVER, cuda="12.1"), "CUDA of torch", Status.PROBLEM, "newer CUDA"),
    "no bindings": (replace(SERVER, cuda_bindings=None), "cuda-bindings", Status.PROBLEM, "pip install cuda-bindings"),
    "old GPU": (replace(SERVER, gpus=[replace(H200, capability=(7, 5))]), "GPU 0", Status.PROBLEM, "Ampere"),
    "Ampere": (replace(SERVER, gpus=[replace(H200, capability=(8, 0))]), "GPU 0", Status.WARNING, "fp8"),
    "no NVLink": (without_links(SERVER), "NVLink", Status.WARNING, "PCIe"),
    "no peer access": (replace(SERVER, peer_access=PCIE), "peer access", Status.WARNING, "DEEP_EP_USE_P2P=0"),
    "exclusive": (replace(SERVER, gpus=[EXCLUSIVE]), "compute mode", Status.WARNING, "nvidia-smi"),
    "no memory": (replace(LAPTOP, memory_free_bytes=1 << 20), "host memory", Status.PROBLEM, "container"),
    "no memory files": (replace(LAPTOP, can_share_memory=False), "shared memory", Status.PROBLEM, "/proc"),
    "few files": (replace(LAPTOP, num_files=1024), "open files", Status.WARNING, "ulimit -n 4096"),
    "no module": (replace(SERVER, has_peer_memory_module=False), "GPUDirect RDMA", Status.WARNING, "nvidia_peermem"),
    "locked": (replace(SERVER, locked_memory_bytes=65536), "locked memory", Status.WARNING, "ulimit -l unlimited"),
    "port down": (
        replace(SERVER, network=[replace(SERVER.network[0], is_up=False)]), "network ports", Status.WARNING, "ibstat"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_wrong_machine_is_told_what_to_do(what):
    machine, name, status, word = BAD[what]
    assert concerns(machine)[name][0] is status
    assert word in concerns(machine)[name][1]


@pytest.mark.parametrize(
    ("name", "text", "status"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", Status.WARNING),
        ("DEEP_EP_TIMEOUTS", "3", Status.WARNING),
        ("DEEP_EP_TIMEOUT_S", "soon", Status.PROBLEM),
        ("NVSHMEM_DIR", "/nonexistent", Status.WARNING),
    ],
)
def test_a_variable_that_makes_no_sense_is_told(monkeypatch, name, text, status):
    monkeypatch.setenv(name, text)
    found = concerns(LAPTOP)
    assert found["NVSHMEM" if name == "NVSHMEM_DIR" else name][0] is status


def test_a_cache_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEP_EP_CACHE_DIR", str(tmp_path / "new" / "folder"))
    assert "cache" not in concerns(LAPTOP)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert concerns(LAPTOP)["cache"][0] is Status.WARNING


def test_a_folder_of_nvshmem_is_looked_through(tmp_path):
    assert missing_of_nvshmem(tmp_path) == [
        "include/nvshmem.h", "lib/libnvshmem_host.so", "lib/libnvshmem_device.a"
    ]  # fmt: skip
    for name in ("include/nvshmem.h", "lib/libnvshmem_host.so.3", "lib/libnvshmem_device.a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert missing_of_nvshmem(tmp_path) == []
    assert nvshmem_version(tmp_path) is None
    header = "#define NVSHMEM_VENDOR_MAJOR_VERSION 3\n#define NVSHMEM_VENDOR_MINOR_VERSION 4\n"
    (tmp_path / "include/nvshmem_version.h").write_text(header + "#define NVSHMEM_VENDOR_PATCH_VERSION 5\n")
    assert nvshmem_version(tmp_path) == "3.4.5"


def test_this_machine_is_looked_at_and_an_exchange_is_verified():
    result = CliRunner().invoke(cli, ["check", "--ranks", "2", "--json"])
    records = [json.loads(line) for line in result.stdout.splitlines()]
    kinds = {kind: [r for r in records if r["kind"] == kind] for kind in ("finding", "variable", "exchange")}
    assert {"Python", "torch", "cores", "NVSHMEM"} <= {r["name"] for r in kinds["finding"]}
    assert "DEEP_EP_TIMEOUT_S" in {r["name"] for r in kinds["variable"]}
    assert kinds["exchange"]
    assert all(r["error"] is None for r in kinds["exchange"]), kinds["exchange"]
    assert {r["num_claims"] for r in kinds["exchange"]} == {12}
    assert "network" in kinds["exchange"][1]["topology"]
    assert records[-1]["kind"] == "summary"
    assert result.exit_code == (1 if records[-1]["num_problems"] else 0)


def test_a_table_is_printed_and_problems_are_exit_code_1(monkeypatch):
    monkeypatch.setattr(facts, "look", lambda: LAPTOP)
    result = CliRunner().invoke(cli, ["check"])
    assert result.exit_code == 0
    assert "A processor: ok (0 problems, 0 warnings)" in result.stdout
    monkeypatch.setattr(facts, "look", lambda: replace(LAPTOP, torch="2.9.1"))
    result = CliRunner().invoke(cli, ["check"])
    assert result.exit_code == 1
    assert "A processor: problem (1 problem, 0 warnings)" in result.stdout
    assert any(
        line.startswith("torch ") and "pip install --upgrade torch" in line for line in result.stdout.split("\n")
    )


def test_a_failed_exchange_is_a_problem(monkeypatch):
    path = ExchangePath(
        name="a bad path", device="cpu", variables=partial(exchange._set, {"DEEP_EP_TIMEOUT_S": "soon"})
    )
    outcome = try_path(path, 2, 60.0)
    assert "DEEP_EP_TIMEOUT_S must be a positive number" in outcome.error
    monkeypatch.setattr(facts, "look", lambda: LAPTOP)
    monkeypatch.setattr(check_command, "paths", lambda *_: [path])
    monkeypatch.setattr(check_command, "try_path", lambda *_: outcome)
    result = CliRunner().invoke(cli, ["check", "--ranks", "2"])
    assert result.exit_code == 1
    assert "a bad path, 2 ranks: problem rank " in result.stdout


@pytest.mark.parametrize("arguments", [["--ranks", "-1"], ["--ranks", "many"], ["--timeout-s", "0"], ["extra"]])
def test_wrong_usage_is_exit_code_2(arguments):
    assert CliRunner().invoke(cli, ["check", *arguments]).exit_code == 2
