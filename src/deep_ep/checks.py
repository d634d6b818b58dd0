"""Checks at the door: everything a program passes is checked here, before anything is sent.

Each check names the argument, what it must be and what it is. A program that catches the error can call again with
better arguments: its peers, which wait meanwhile, do not notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from deep_ep.engines import few
from deep_ep.engines.base import Handle, Layout, LowLatencyHandle, NetworkHandle
from deep_ep.engines.exchange import DTYPES
from deep_ep.errors import ConfigError, MismatchError
from deep_ep.memory.rendezvous import AllGather
from deep_ep.topology import Topology

_IDX_DTYPES = (torch.int64, torch.int32)
_SUM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_agreement(rank: int, all_gather: AllGather, settings: dict[str, int | str]) -> None:
    """Compare settings that must be the same on all ranks.

    Args:
        rank: This rank.
        all_gather: How ranks exchange integers.
        settings: The settings by name: integers, or texts of which the first seven bytes count.

    Raises:
        MismatchError: If they differ.
    """
    words = [value if isinstance(value, int) else _pack(value) for value in settings.values()]
    for peer, theirs in enumerate(all_gather(words)):
        for (name, value), own_word, word in zip(settings.items(), words, theirs, strict=True):
            if word != own_word:
                other = word if isinstance(value, int) else _unpack(word)
                raise MismatchError(
                    f"the ranks disagree about {name}: it is {value} on rank {rank} and {other} on rank {peer}",
                    hint="all ranks must run the same version and make the buffer with the same arguments",
                )


def library_version() -> str:
    """Return the version that is installed, or that it is not: a checkout that is imported where it lies."""
    try:
        return version("deep-ep")
    except PackageNotFoundError:
        return "0.0.0"


def _pack(text: str) -> int:
    return int.from_bytes(text.encode()[:7].ljust(7, b"\0"))


def _unpack(word: int) -> str:
    return word.to_bytes(7).rstrip(b"\0").decode(errors="replace")


def check_tensor(
    name: str,
    tensor: object,
    *,
    device: torch.device,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
) -> Tensor:
    """Check one tensor and return it, contiguous and without gradient.

    Args:
        name: The argument.
        tensor: What was passed.
        device: Where it must be.
        shape: The size each dimension must have; a word stands for any size.
        dtypes: The dtypes it may have.

    Raises:
        TypeError: If it is no tensor.
        ConfigError: If it is another kind of tensor than it must be.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    sizes = tensor.shape
    if sizes != shape and (len(sizes) != len(shape) or any(map(_differ, shape, sizes))):
        hint = f"pass {name}.view(-1, {name}.size(-1))" if len(sizes) > 2 == len(shape) else None
        wanted = ", ".join(str(size) for size in shape)
        raise ConfigError(f"{name} must have shape [{wanted}], got {list(sizes)}", hint)
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ConfigError(f"{name} must be {names}, got {str(tensor.dtype).removeprefix('torch.')}")
    if tensor.device.type != device.type:
        raise ConfigError(f"{name} must be on {device.type}, where this buffer is, got a tensor on {tensor.device}")
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _differ(size: int | str, actual: int) -> bool:
    return size != actual and type(size) is not str


def check_rows(x: object, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Check the `x` of a dispatch: a tensor, or a pair of a tensor and its scales."""
    scales: object = None
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise ConfigError(f"x must be a tensor or a pair of tensor and scales, got {len(x)} items")
        x, scales = x
    rows = check_tensor("x", x, device=device, shape=("num_tokens", "hidden"), dtypes=DTYPES)
    if scales is None:
        return rows, None
    shape = (rows.size(0), "num_scales")
    return rows, check_tensor("the scales of x", scales, device=device, shape=shape, dtypes=DTYPES)


def check_topk_idx(topk_idx: object, num_tokens: int | str, num_experts: int, device: torch.device) -> Tensor:
    """Check expert ids: -1, or one of the experts. On a GPU their values are not looked at: that would mean to wait."""
    idx = check_tensor("topk_idx", topk_idx, device=device, shape=(num_tokens, "num_topk"), dtypes=_IDX_DTYPES)
    if device.type == "cpu" and idx.numel():
        values = idx.view(-1).tolist() if few.is_few(idx.numel()) else [int(end) for end in torch.aminmax(idx)]
        for value in (min(values), max(values)):
            if not -1 <= value < num_experts:
                raise ConfigError(f"topk_idx must be -1 or from 0 to num_experts - 1 = {num_experts - 1}, got {value}")
    return idx


def check_topk(
    topk_idx: object, topk_weights: object, num_tokens: int, num_experts: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Check the top-k tensors of a dispatch: both, or neither."""
    if topk_idx is None and topk_weights is None:
        return None, None
    if topk_idx is None or topk_weights is None:
        missing = "topk_idx" if topk_idx is None else "topk_weights"
        raise ConfigError(f"topk_idx and topk_weights must be given together, but {missing} is None")
    idx = check_topk_idx(topk_idx, num_tokens, num_experts, device)
    weights = check_tensor("topk_weights", topk_weights, device=device, shape=tuple(idx.shape), dtypes=(torch.float32,))
    return idx, weights


def check_layout(
    num_tokens_per_rank: object,
    is_token_in_rank: object,
    num_tokens_per_expert: object,
    num_tokens: int,
    num_ranks: int,
    device: torch.device,
    num_tokens_per_host: object = None,
) -> Layout:
    """Check what `get_dispatch_layout` returned, or a program computed in its place."""
    given = {
        "num_tokens_per_rank": num_tokens_per_rank,
        "is_token_in_rank": is_token_in_rank,
        "num_tokens_per_expert": num_tokens_per_expert,
    }
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ConfigError(
            f"a dispatch without a handle needs {', '.join(given)}, but {', '.join(missing)} is None",
            hint="pass what get_dispatch_layout returned, or a handle",
        )
    int32 = (torch.int32,)
    layout = Layout(
        check_tensor("num_tokens_per_rank", num_tokens_per_rank, device=device, shape=(num_ranks,), dtypes=int32),
        check_tensor(
            "num_tokens_per_expert", num_tokens_per_expert, device=device, shape=("num_experts",), dtypes=int32
        ),
        check_tensor(
            "is_token_in_rank", is_token_in_rank, device=device, shape=(num_tokens, num_ranks), dtypes=(torch.bool,)
        ),
        None
        if num_tokens_per_host is None
        else check_tensor(
            "num_tokens_per_rdma_rank", num_tokens_per_host, device=device, shape=("num_hosts",), dtypes=int32
        ),
    )
    if layout.num_tokens_per_expert.numel() == 0:
        raise ConfigError("num_tokens_per_expert must have one item per expert, got none")
    return layout


def _items_of(handle: object, num_items: int, what: str) -> Sequence[Any]:
    """Return a handle that is a tuple (or list) of so many items."""
    if isinstance(handle, (tuple, list)) and len(handle) == num_items:
        return handle
    found = f"{len(handle)} items" if isinstance(handle, (tuple, list)) else type(handle).__name__
    raise ConfigError(f"handle must be the tuple of {num_items} {what}, got {found}")


def check_handle(handle: object, num_ranks: int, device: torch.device, num_tokens: int | str = "num_tokens") -> Handle:
    """Check a handle: the tuple that a dispatch returned, or one rebuilt from its tensors.

    Args:
        handle: What was passed.
        num_ranks: Ranks of the group.
        device: Where its tensors must be.
        num_tokens: The tokens that the dispatch had on this rank, if they are known.
    """
    items = _items_of(handle, len(Handle._fields), "tensors that dispatch returned")
    prefix, channels, recv_channels, src_idx, in_rank, head = items
    int32 = (torch.int32,)
    return Handle(
        check_tensor("handle[0]", prefix, device=device, shape=(num_ranks, num_ranks), dtypes=int32),
        channels,
        recv_channels,
        check_tensor("handle[3]", src_idx, device=device, shape=("num_recv_tokens",), dtypes=int32),
        check_tensor("handle[4]", in_rank, device=device, shape=(num_tokens, num_ranks), dtypes=(torch.bool,)),
        head,
    )


def check_network_handle(
    handle: object, topology: Topology, device: torch.device, num_tokens: int | str = "num_tokens"
) -> NetworkHandle:
    """Check a handle of a group that spans hosts: the tuple that a dispatch returned, or one rebuilt from its tensors.

    Args:
        handle: What was passed.
        topology: Where the ranks are.
        device: Where its tensors must be.
        num_tokens: The tokens that the dispatch had on this rank, if they are known.
    """
    what = f"tensors that dispatch returned on {topology.num_hosts} hosts"
    tensors = _items_of(handle, len(NetworkHandle._fields), what)
    num_ranks, num_sources = topology.num_ranks, len(topology.sources(topology.rank))
    shapes: dict[str, tuple[int | str, ...]] = {
        "is_token_in_rank": (num_tokens, num_ranks),
        "recv_rdma_rank_prefix_sum": (num_sources,),
        "recv_gbl_rank_prefix_sum": (num_ranks,),
        "recv_src_meta": ("num_recv_tokens", 8),
        "send_nvl_head": ("num_passed_tokens", len(topology.local_ranks)),
    }
    dtypes = {"is_token_in_rank": torch.bool, "recv_src_meta": torch.uint8}
    items = dict(zip(NetworkHandle._fields, tensors, strict=True))
    for number, name in enumerate(NetworkHandle._fields):
        if name in shapes:
            dtype = (dtypes.get(name, torch.int32),)
            items[name] = check_tensor(
                f"handle[{number}]", items[name], device=device, shape=shapes[name], dtypes=dtype
            )
    return NetworkHandle(**items)


def check_combine(
    x: object, topk_weights: object, bias: object, handle: Handle, device: torch.device
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Check the tensors of a combine; return rows, weights and biases."""
    num_rows, num_tokens = handle.num_rows, handle.is_token_in_rank.size(0)
    rows = check_tensor("x", x, device=device, shape=(num_rows, "hidden"), dtypes=_SUM_DTYPES)
    weights = None
    if topk_weights is not None:
        weights = check_tensor(
            "topk_weights", topk_weights, device=device, shape=(num_rows, "num_topk"), dtypes=(torch.float32,)
        )
    biases = () if bias is None else tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)
    if len(biases) > 2:
        raise ConfigError(f"bias must be None, a tensor or a pair of tensors, got {len(biases)} items")
    shape = (num_tokens, rows.size(1))
    return (
        rows,
        weights,
        tuple(check_tensor("bias", item, device=device, shape=shape, dtypes=(rows.dtype,)) for item in biases),
    )


def check_at_least(name: str, value: int, minimum: int) -> int:
    """Check an integer argument."""
    if value != int(value) or value < minimum:
        raise ConfigError(f"{name} must be an integer of at least {minimum}, got {value}")
    return int(value)


def check_stats(
    name: str, stats: object, dtype: torch.dtype, device: torch.device, size: int | str = "num_local_experts"
) -> Tensor | None:
    """Check a tensor that a call adds to, or None."""
    if stats is None:
        return None
    checked = check_tensor(name, stats, device=device, shape=(size,), dtypes=(dtype,))
    if checked.data_ptr() != stats.data_ptr():  # type: ignore[attr-defined]
        raise ConfigError(f"{name} must be contiguous, for the call adds to it in place")
    return checked


def check_low_latency_handle(handle: object, num_ranks: int, device: torch.device) -> LowLatencyHandle:
    """Check a handle of low-latency mode: the tuple that a dispatch returned, or one rebuilt from its items."""
    items = _items_of(handle, len(LowLatencyHandle._fields), "items that dispatch returned")
    src_info, layout_range, num_max_tokens, hidden, num_experts = items
    rows = num_ranks * num_max_tokens
    src_info = check_tensor(
        "handle[0]", src_info, device=device, shape=("num_local_experts", rows), dtypes=(torch.int32,)
    )
    shape = (src_info.size(0), num_ranks)
    layout_range = check_tensor("handle[1]", layout_range, device=device, shape=shape, dtypes=(torch.int64,))
    return LowLatencyHandle(src_info, layout_range, num_max_tokens, hidden, num_experts)
