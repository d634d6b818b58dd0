"""The oracle itself: examples worked by hand, and identities that hold whatever the engine."""

import doctest

import pytest
import torch

from deep_ep import reference


def test_examples_in_the_docstrings_hold():
    assert doctest.testmod(reference).failed == 0


def two_ranks_by_hand():
    """Two ranks, four experts (0, 1 on rank 0; 2, 3 on rank 1), two slots, five tokens."""
    topk_idx_RTK = [torch.tensor([[0, 2], [3, 2], [-1, 1]]), torch.tensor([[1, 0], [-1, -1]])]
    topk_weights_RTK = [
        torch.tensor([[0.5, 0.25], [1.0, 2.0], [9.0, 3.0]]),
        torch.tensor([[4.0, 5.0], [6.0, 7.0]]),
    ]
    x_RTH = [torch.tensor([[10.0], [11.0], [12.0]]), torch.tensor([[20.0], [21.0]])]
    return x_RTH, topk_idx_RTK, topk_weights_RTK


def test_layout_counts_a_token_once_per_rank_and_every_slot_per_expert():
    layout = reference.get_dispatch_layout(torch.tensor([[0, 1], [2, 2], [-1, 3], [-1, -1]]), 4, 2)
    assert layout.num_tokens_per_rank.tolist() == [1, 2]
    assert layout.num_tokens_per_expert.tolist() == [1, 1, 2, 1]
    assert layout.is_token_in_rank.tolist() == [[True, False], [False, True], [False, True], [False, False]]


def test_dispatch_by_hand():
    x_RTH, topk_idx_RTK, topk_weights_RTK = two_ranks_by_hand()
    layouts = [reference.get_dispatch_layout(topk_idx_TK, 4, 2) for topk_idx_TK in topk_idx_RTK]
    first, second = reference.dispatch(
        x_RTH,
        layouts,
        topk_idx_RTK=topk_idx_RTK,
        topk_weights_RTK=topk_weights_RTK,
        expert_alignment=4,
        num_sms=4,
    )
    assert first.x.flatten().tolist() == [10.0, 12.0, 20.0]
    assert first.topk_idx.tolist() == [[0, -1], [-1, 1], [1, 0]]
    assert first.topk_weights.tolist() == [[0.5, 0.0], [0.0, 3.0], [4.0, 5.0]]
    assert first.num_recv_tokens_per_expert == [4, 4]
    assert second.x.flatten().tolist() == [10.0, 11.0]
    assert second.topk_idx.tolist() == [[-1, 0], [1, 0]]
    assert second.topk_weights.tolist() == [[0.0, 0.25], [1.0, 2.0]]
    assert second.num_recv_tokens_per_expert == [4, 4]


def test_handle_by_hand():
    x_RTH, topk_idx_RTK, _ = two_ranks_by_hand()
    layouts = [reference.get_dispatch_layout(topk_idx_TK, 4, 2) for topk_idx_TK in topk_idx_RTK]
    first, second = (received.handle for received in reference.dispatch(x_RTH, layouts, num_sms=4))
    # Rank 0 sends two tokens to itself and two to rank 1; rank 1 sends one to rank 0.
    assert first.rank_prefix_matrix.tolist() == second.rank_prefix_matrix.tolist() == [[2, 2], [3, 2]]
    # Two channels of two tokens: rank 0 has tokens 0 and 1 in the first, token 2 in the second.
    assert first.channel_prefix_matrix.tolist() == [[1, 2], [2, 2]]
    assert second.channel_prefix_matrix.tolist() == [[1, 1], [0, 0]]
    assert first.recv_channel_prefix_matrix.tolist() == [[0, 1], [0, 1]]
    assert second.recv_channel_prefix_matrix.tolist() == [[0, 2], [0, 0]]
    assert first.recv_src_idx.tolist() == [0, 2, 0]
    assert second.recv_src_idx.tolist() == [0, 1]
    assert first.send_head.tolist() == [[0, 0], [-1, 1], [0, -1]]
    assert second.send_head.tolist() == [[0, -1], [-1, -1]]
    assert all(item.dtype == torch.int32 for item in (*first[:4], first.send_head))


def test_combine_by_hand():
    x_RTH, topk_idx_RTK, topk_weights_RTK = two_ranks_by_hand()
    layouts = [reference.get_dispatch_layout(topk_idx_TK, 4, 2) for topk_idx_TK in topk_idx_RTK]
    received = reference.dispatch(x_RTH, layouts, topk_idx_RTK=topk_idx_RTK, topk_weights_RTK=topk_weights_RTK)
    handles = [r.handle for r in received]
    first, second = reference.combine(
        [torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0.1], [0.2]])],
        handles,
        topk_weights_RNK=[r.topk_weights for r in received],
        biases_RTH=[[torch.full((3, 1), 100.0)], [torch.full((2, 1), 200.0), torch.full((2, 1), 1.0)]],
    )
    assert first.x.flatten().tolist() == pytest.approx([101.1, 100.2, 102.0])
    assert second.x.flatten().tolist() == [204.0, 201.0]
    # Slots that named an expert come back; slots of -1 come back as 0.
    assert first.topk_weights.tolist() == [[0.5, 0.25], [1.0, 2.0], [0.0, 3.0]]
    assert second.topk_weights.tolist() == [[4.0, 5.0], [0.0, 0.0]]


def test_combine_adds_in_float32_from_bias_through_ascending_ranks_and_rounds_once():
    layouts = [reference.get_dispatch_layout(torch.tensor([[0, 1, 2]]), 3, 3) for _ in range(3)]
    handles = [received.handle for received in reference.dispatch([torch.ones(1, 1)] * 3, layouts)]
    # In another order, or with a rounding on the way, the small terms would vanish or count double.
    bias, terms = 1.0, [2.0**-8, 2.0**-8, -1.0]
    x_RNH = [torch.full((3, 1), term, dtype=torch.bfloat16) for term in terms]
    combined = reference.combine(x_RNH, handles, biases_RTH=[[torch.full((1, 1), bias).bfloat16()]] * 3)
    assert [c.x.item() for c in combined] == [2.0**-7] * 3
    assert combined[0].x.dtype == torch.bfloat16


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(7, 3), (8, 4), (2, 5), (1, 1), (264, 8), (5, 8)])
def test_experts_are_split_as_torch_splits_a_tensor(num_experts, num_ranks):
    expected = [part.tolist() for part in torch.arange(num_experts).tensor_split(num_ranks)]
    assert [list(experts) for experts in reference.local_experts(num_experts, num_ranks)] == expected


def test_worst_case_rows_follow_the_real_ones():
    x_RTH, topk_idx_RTK, topk_weights_RTK = two_ranks_by_hand()
    layouts = [reference.get_dispatch_layout(topk_idx_TK, 4, 2) for topk_idx_TK in topk_idx_RTK]
    second = reference.dispatch(
        x_RTH, layouts, topk_idx_RTK=topk_idx_RTK, topk_weights_RTK=topk_weights_RTK, num_worst_tokens=5
    )[1]
    assert second.x.flatten().tolist() == [10.0, 11.0, 0.0, 0.0, 0.0]
    assert second.topk_idx.tolist() == [[-1, 0], [1, 0], [-1, -1], [-1, -1], [-1, -1]]
    assert second.num_recv_tokens_per_expert == []
    assert len(second.handle.recv_src_idx) == 5
