"""Topology: which ranks are one host's, who relays for whom, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_ep import topology
from deep_ep.errors import ConfigError, UnsupportedError
from deep_ep.topology import Path, Topology
from rank_pool import environment

NO_ID = (0, 0, 0)


def make(host_of, rank=0):
    """Return the topology of CPU ranks whose hosts are named by letters, like "AABBB"."""
    names = sorted(set(host_of), key=host_of.index)
    hosts = tuple(tuple(r for r, name in enumerate(host_of) if name == host) for host in names)
    paths = tuple(
        tuple(Path.SELF if a == b else Path.SHARED_MEMORY if host_of[a] == host_of[b] else Path.NETWORK for b in ranks)
        for ranks in [range(len(host_of))]
        for a in ranks
    )
    return Topology(rank, hosts, tuple(names), paths)


def test_equal_hosts_relay_through_the_same_local_index():
    found = make("AAABBB")
    assert [found.relay(source, 1) for source in range(6)] == [3, 4, 5, 3, 4, 5]
    assert found.sources(4) == (1, 4)


def test_uneven_hosts_share_the_relays_there_are():
    found = make("AAABB")
    assert [found.relay(source, 1) for source in range(5)] == [3, 4, 3, 3, 4]
    assert found.sources(3) == (0, 2, 3)
    assert [found.relay(source, 0) for source in range(5)] == [0, 1, 2, 0, 1]
    assert found.sources(2) == (2,)


def test_ranks_of_a_host_need_not_follow_each_other():
    found = make("ABAB", rank=3)
    assert found.hosts == ((0, 2), (1, 3))
    assert found.host_of == (0, 1, 0, 1)
    assert found.local_index == (0, 0, 1, 1)
    assert (found.host, found.local_ranks) == (1, (1, 3))
    assert found.relay(2, 1) == 3


@given(host_of=st.lists(st.sampled_from("ABCD"), min_size=1, max_size=12).map("".join))
def test_each_source_has_one_relay_on_each_host(host_of):
    found = make(host_of)
    for host, ranks in enumerate(found.hosts):
        lists = [found.sources(rank) for rank in ranks]
        assert sorted(source for sources in lists for source in sources) == list(range(len(host_of)))
        for rank, sources in zip(ranks, lists, strict=True):
            assert rank in sources
            assert all(found.relay(source, host) == rank for source in sources)


def test_the_table_has_every_path():
    text = make("AAB").table()
    assert text.splitlines()[0].split() == ["host", "to", "0", "to", "1", "to", "2"]
    assert text.splitlines()[1].split("  ")[0] == "rank 0"
    assert text.count("network") == 4
    assert text.count("shared memory") == 2
    assert text.count("self") == 3


def test_sharing_that_makes_no_hosts_is_refused():
    shares = [[True, True, False], [True, True, True], [False, True, True]]
    with pytest.raises(UnsupportedError, match="rank 0 shares memory with ranks"):
        topology._group(shares, [NO_ID] * 3, ["a"] * 3)


def test_one_node_id_on_two_machines_is_refused():
    apart = [[True, False], [False, True]]
    with pytest.raises(ConfigError, match=r"DEEP_EP_NODE_ID must share memory, but of ranks \[0, 1\]"):
        topology._group(apart, [(1, 5, 5)] * 2, ["node"] * 2)


def test_a_node_id_on_some_ranks_only_is_refused():
    together = [[True, True], [True, True]]
    with pytest.raises(ConfigError, match=r"not on ranks \[1\]"):
        topology._group(together, [(1, 5, 5), NO_ID], ["node", "host"])


def test_one_sided_sharing_is_no_sharing():
    assert topology._group([[True, True], [False, True]], [NO_ID] * 2, ["a", "b"]) == ((0,), (1,))


@pytest.mark.parametrize(
    ("can", "path"), [((), Path.PINNED_HOST_MEMORY), (("READ", "WRITE"), Path.PCIE), (("NVLINK",), Path.NVLINK)]
)
def test_paths_between_gpus_are_what_the_driver_says(can, path):
    class Nvml:
        NVML_P2P_STATUS_OK = 0
        NVML_P2P_CAPS_INDEX_READ, NVML_P2P_CAPS_INDEX_WRITE, NVML_P2P_CAPS_INDEX_NVLINK = "READ", "WRITE", "NVLINK"
        NVMLError = RuntimeError

        @staticmethod
        def nvmlDeviceGetHandleByUUID(uuid):  # noqa: N802 (as NVML has it)
            return uuid.decode()

        @staticmethod
        def nvmlDeviceGetP2PStatus(own, peer, capability):  # noqa: N802
            assert (own, peer) == ("GPU-a", "GPU-b")
            return 0 if capability in can else 2

    assert topology._gpu_path(Nvml, "GPU-a", "GPU-b") == path


def test_gpu_paths_without_the_management_library_are_still_told():
    uuids = ["GPU-a", "GPU-a", "GPU-b", "GPU-b"]
    same_host = [True, True, True, False]
    expected = [Path.SELF, Path.SAME_GPU, Path.PEER_ACCESS, Path.NETWORK]
    assert [
        Path.PEER_ACCESS if path in (Path.NVLINK, Path.PCIE, Path.PINNED_HOST_MEMORY) else path
        for path in topology._find_paths(0, same_host, uuids, use_peer_access=True)
    ] == expected
    without = topology._find_paths(0, same_host, uuids, use_peer_access=False)
    assert without == [Path.SELF, Path.PINNED_HOST_MEMORY, Path.PINNED_HOST_MEMORY, Path.NETWORK]


def test_uuids_and_names_survive_the_trip():
    uuid = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    assert topology._unpack_uuid(topology._uuid_words(uuid)) == uuid
    assert topology._unpack_uuid(topology._uuid_words("")) == ""
    assert topology._unpack_name(topology._pack_name("node-é-17")) == "node-é-17"
    assert all(0 <= word < 2**63 for word in topology._pack_name("ÿ" * 60))


def discover(rank, node_ids):
    with environment(DEEP_EP_NODE_ID=node_ids[rank.rank]):
        from deep_ep.memory.rendezvous import Rendezvous

        return topology.discover(rank.rank, Rendezvous(rank.group).all_gather, torch.device("cpu"))


def test_processes_of_one_machine_are_one_host(pool):
    for rank, found in enumerate(pool.run(3, discover, ("", "", ""))):
        assert found.rank == rank
        assert found.hosts == ((0, 1, 2),)
        assert found.paths[0] == (Path.SELF, Path.SHARED_MEMORY, Path.SHARED_MEMORY)


def test_node_ids_make_hosts_of_any_size(pool):
    for rank, found in enumerate(pool.run(4, discover, ("x", "y", "x", "x"))):
        assert found.hosts == ((0, 2, 3), (1,))
        assert found.host_names == ("x", "y")
        assert found.paths[1] == (Path.NETWORK, Path.SELF, Path.NETWORK, Path.NETWORK)
        assert found.host == int(rank == 1)
