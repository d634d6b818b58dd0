"""The dispatcher files of vLLM, SGLang, NeMo Automodel and LMDeploy work with `deep_ep` as they are.

They are not ours to ship: they are fetched from the package index, into a folder that DEEP_EP_TEST_CLIENTS names.
"""

import os
from pathlib import Path

import client_files
import pytest

from rank_pool import FreshRanks

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("client", client_files.CLIENTS)
def test_a_client_gets_what_a_dense_computation_gives(client):
    folder = os.environ.get("DEEP_EP_TEST_CLIENTS")
    if not folder:
        pytest.skip("clients are fetched only if DEEP_EP_TEST_CLIENTS names a folder for them")
    client_files.fetch(client_files.CLIENTS[client], Path(folder).expanduser())
    with FreshRanks(2, client_files.run_client, str(Path(folder).expanduser()), client) as ranks:
        results = ranks.results(timeout_s=240.0)
    assert all(results)
