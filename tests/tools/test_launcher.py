"""What torchrun and mpirun tell their ranks."""

import shutil
import subprocess
import sys

import pytest

from deep_ep.bench import launcher
from deep_ep.bench.launcher import Place, find_place
from deep_ep.errors import ConfigError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MEETING_POINT = {"MASTER_ADDR": "there", "MASTER_PORT": "1234"}


@pytest.fixture(autouse=True)
def _without_mpi4py(monkeypatch):
    monkeypatch.setattr(launcher, "find_spec", lambda _: None)


@pytest.mark.parametrize(
    ("variables", "init_method"),
    [(TORCHRUN, "env://"), (OPEN_MPI, "tcp://there:1234"), (MPICH, "tcp://there:1234")],
    ids=["torchrun", "Open MPI", "MPICH"],
)
def test_every_launcher_is_understood(monkeypatch, variables, init_method):
    for name, text in (variables | MEETING_POINT).items():
        monkeypatch.setenv(name, text)
    assert find_place() == Place(3, 4, 1, 2, init_method)


def test_a_process_that_nobody_launched_is_no_rank():
    assert find_place() is None


def test_ranks_of_one_host_meet_in_a_file_of_their_job(monkeypatch):
    variables = {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-here-12@1"}
    for name, text in (OPEN_MPI | variables).items():
        monkeypatch.setenv(name, text)
    place = find_place()
    assert place.num_local_ranks == 4
    assert place.init_method.startswith("file://")
    assert "prterun-here-12-1" in place.init_method


def test_ranks_of_several_hosts_need_a_place_to_meet(monkeypatch):
    for name, text in OPEN_MPI.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match="mpirun -x MASTER_ADDR=host-of-rank-0"):
        find_place()


SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[007-009,012]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}


def test_srun_is_understood(monkeypatch):
    for name, text in SLURM.items():
        monkeypatch.setenv(name, text)
    place = find_place()
    assert place[:4] == (5, 7, 1, 2)
    address, _, port = place.init_method.rpartition(":")
    assert address == "tcp://gpu007"
    assert 20000 <= int(port) < 32000
    monkeypatch.setenv("MASTER_ADDR", "there")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert find_place().init_method == "tcp://there:1234"


def test_a_batch_script_is_no_rank(monkeypatch):
    for name in ("SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, SLURM[name])
    assert find_place() is None


@pytest.mark.parametrize(
    ("nodes", "first"), [("gpu[007-009,012],login1", "gpu007"), ("a1,a2", "a1"), ("rack[1-2]n[3-4]", "rack1n3")]
)
def test_the_first_host_of_a_list(nodes, first):
    assert launcher._first_host(nodes) == first


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun of Open MPI or MPICH")
def test_the_real_mpirun_is_understood():
    """Two hosts of one machine: ranks of different words of DEEP_EP_NODE_ID."""
    command = ["mpirun", "--oversubscribe", "--allow-run-as-root"]
    for word in ("a", "b"):
        command += ["-np", "2", "-x", f"DEEP_EP_NODE_ID={word}", sys.executable, "-c", MPIRUN_PROGRAM, ":"]
    done = subprocess.run(command[:-1], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("two hosts of two ranks") == 4


MPIRUN_PROGRAM = """
import torch.distributed as dist
from deep_ep import Buffer
from deep_ep.bench.launcher import find_place
place = find_place()
dist.init_process_group("gloo", init_method=place.init_method, rank=place.rank, world_size=place.num_ranks)
buffer = Buffer(dist.group.WORLD, device="cpu")
assert buffer.topology.hosts == ((0, 1), (2, 3)), buffer.topology
print("two hosts of two ranks", flush=True)
buffer.destroy()
dist.barrier()
"""
