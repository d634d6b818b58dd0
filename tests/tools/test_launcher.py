"""What torchrun and mpirun tell their ranks."""

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
