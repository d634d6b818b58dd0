"""Few tokens take their routing from plain Python, many from torch operators; nobody can tell by the result."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_ep.engines import few, routing, rows


def both_ways(monkeypatch, call):
    results = []
    for limit in (10**9, -1):
        monkeypatch.setattr(few, "NUM_MAX_ITEMS", limit)
        results.append(call())
    return results


@given(data=st.data())
def test_few_and_many_tokens_are_routed_alike(data):
    num_tokens, num_topk = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 8))
    num_experts, num_ranks = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 9))
    seed, num_channels = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 12))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    num_biases = data.draw(st.integers(0, 2))
    shape = (num_tokens, num_topk)
    topk_idx = torch.randint(-1, num_experts, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def route():
        layout = routing.compute_layout(topk_idx, num_experts, num_ranks)
        channels = routing.compute_channels(layout.is_token_in_rank, num_channels)
        tokens = routing.tokens_by_rank(layout.is_token_in_rank, layout.num_tokens_per_rank.tolist())
        token_rows = rows.TokenRows(tokens, num_tokens, num_biases)
        return [
            *layout[:3],
            channels.send_head,
            *map(torch.as_tensor, tokens),
            token_rows.rows,
            token_rows.begins,
        ], channels

    with pytest.MonkeyPatch.context() as monkeypatch:
        (few_tensors, few_channels), (many_tensors, many_channels) = both_ways(monkeypatch, route)
    assert few_channels.ends == many_channels.ends
    for got, want in zip(few_tensors, many_tensors, strict=True):
        assert got.shape == want.shape
        assert torch.equal(got, want)


def test_what_few_makes_has_the_dtypes_of_many():
    topk_idx = torch.tensor([[0, 1], [1, -1]])
    layout = routing.compute_layout(topk_idx, 2, 2)
    assert [tensor.dtype for tensor in layout[:3]] == [torch.int32, torch.int32, torch.bool]
    assert routing.compute_channels(layout.is_token_in_rank, 1).send_head.dtype == torch.int32
