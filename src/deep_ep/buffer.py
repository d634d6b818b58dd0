"""Buffer: the class that programs use, with the interface of DeepEP V1.

It checks what it is given (`deep_ep.checks`), hands it to the engine (`deep_ep.engines`), and turns the result into the
tuples that V1 returns.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import count
from typing import Any, ClassVar, TypeVar, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep import checks, env, metrics, tuned
from deep_ep.config import (
    BufferSizeHint,
    ClusterProfile,
    Config,
    buffer_size_hint,
    combine_config,
    dispatch_config,
)
from deep_ep.engines.base import CachedDispatchRequest, CombineRequest, DispatchRequest, Engine, Handle
from deep_ep.engines.cpu import CpuEngine
from deep_ep.engines.cpu_low_latency import CpuLowLatencyEngine
from deep_ep.engines.gpu import GpuEngine
from deep_ep.engines.gpu_low_latency import GpuLowLatencyEngine
from deep_ep.engines.low_latency_plans import LowLatencyTuning
from deep_ep.engines.network import NetworkEngine, NetworkTuning
from deep_ep.engines.network_low_latency import NetworkLowLatencyEngine
from deep_ep.errors import ConfigError, DestroyedError, UnsupportedError
from deep_ep.events import EventHandle, EventOverlap
from deep_ep.latency import LatencyMonitor
from deep_ep.low_latency import LowLatencyCalls
from deep_ep.memory.control import Control
from deep_ep.memory.rendezvous import Rendezvous
from deep_ep.streams import CpuStreams, CudaStreams, Event
from deep_ep.topology import count_network_cards, discover
from deep_ep.tuning import GpuTuning, next_power_of_two
from deep_ep.warmup import Shapes, timed_start_up

logger = logging.getLogger("deep_ep")

_LIVE: WeakValueDictionary[int, Buffer] = WeakValueDictionary()
_OP_IDS = count()

T = TypeVar("T")
Rows = Tensor | tuple[Tensor, Tensor]
DispatchReturn = tuple[Rows, Tensor | None, Tensor | None, list[int] | None, tuple[Tensor, ...] | None, EventOverlap]


class Buffer(LowLatencyCalls):
    """Expert-parallel exchange between the ranks of a group: dispatch tokens to experts, combine what they make.

    All ranks of the group construct one together, and then make the same calls in the same order.

    Args:
        group: The ranks. Any `torch.distributed` process group: Gloo or NCCL, a sub-group or the world, also of one
            rank. It is used while the buffer is made, and never for tokens.
        num_nvl_bytes: Bytes of shared memory that this rank brings for exchange inside a host. It is touched at once.
            A call that needs more makes all ranks map more, so 0 is a fine value.
        num_rdma_bytes: Bytes that this rank keeps for messages between hosts; not used inside one host. A call that
            needs more takes more. 0 takes DEEP_EP_RDMA_BUFFER_SIZE, or the profile's.
        low_latency_mode: Whether low-latency calls will be made.
        num_qps_per_rank: Kept for programs that pass it; between hosts, `torch.distributed` opens its own connections.
        allow_nvlink_for_low_latency_mode: Kept for programs that pass it; the path to each peer is chosen by where the
            peer is.
        allow_mnnvl: Likewise.
        explicitly_destroy: If true, the program promises to call `destroy`; a warning is logged if it does not.
        enable_shrink: Whether ranks may be masked: see `mask` and `low_latency_update_mask_buffer`. Low-latency calls
            then mask a rank that does not come in time, and go on without it.
        comm: An mpi4py communicator, for programs without `torch.distributed`; used if `group` is None.
        timeout_s: Seconds a call waits for a peer before it raises `PeerTimeoutError`. None takes DEEP_EP_TIMEOUT_S,
            or the profile's.
        device: Where the tensors of all calls are: a CUDA device, or the CPU. None takes the current CUDA device, or
            the CPU where there is none.
        profile: "small", "medium" or "large", or a `deep_ep.config.ClusterProfile`; the same on all ranks. None
            chooses by the number of ranks.
        preinitialize: Whether to do now what the first calls would have to do: compile or load kernels, get memory,
            make an exchange of each shape and an empty one. See `deep_ep.warmup`.
        shapes: What calls will look like, for `preinitialize` and `warmup_async`: `deep_ep.shapes.ExchangeShape`s or
            their fields; the same on all ranks. None takes the shapes that programs on this machine have used.

    Attributes:
        group, group_size, rank: The ranks, their number, this rank.
        num_nvl_bytes, num_rdma_bytes, low_latency_mode, explicitly_destroy, enable_shrink: As they were passed.
        profile: The `deep_ep.config.ClusterProfile` in force.
        init_report: Where the time of the constructor went, a `deep_ep.warmup.InitReport`.
        latency: How long calls take, a `deep_ep.latency.LatencyMonitor`.
        op_id: The number under which the operators of `deep_ep.ops` know this buffer.
        num_sms, num_nvlink_channels: Class attributes, see `set_num_sms` and `set_nvlink_channels`.

    Raises:
        ConfigError: If an argument breaks a rule.
        UnsupportedError: If the ranks do not share memory, or what was asked for is not in this version.
        CapacityError: If a rank could not get its memory.

    Example:
        >>> buffer = Buffer(dist.group.WORLD)
        >>> per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
        >>> recv_x, recv_topk_idx, recv_topk_weights, tokens_per_expert, handle, _ = buffer.dispatch(
        ...     x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        ...     topk_idx=topk_idx, topk_weights=topk_weights)
        >>> combined_x, _, _ = buffer.combine(experts(recv_x, recv_topk_idx, recv_topk_weights), handle)
    """

    num_sms: ClassVar[int] = 20
    num_nvlink_channels: ClassVar[int] = 0
    use_rdma: ClassVar[bool | None] = None
    _num_tuned_channels: int = 0

    @timed_start_up
    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: float = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        timeout_s: float | None = None,
        device: torch.device | str | None = None,
        profile: ClusterProfile | str | None = None,
        preinitialize: bool = False,
        shapes: Shapes | None = None,
    ) -> None:
        self._engine: Engine | None = None
        self._low_latency = None
        checks.check_at_least("num_nvl_bytes", num_nvl_bytes, 0)
        checks.check_at_least("num_rdma_bytes", num_rdma_bytes, 0)
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(f"timeout_s must be a positive number of seconds, got {timeout_s}")
        rendezvous = Rendezvous(group, comm)
        self.group = group if group is not None else comm
        self.rank, self.group_size = rendezvous.rank, rendezvous.num_ranks
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self.explicitly_destroy = explicitly_destroy
        self.profile = ClusterProfile.of(profile, self.group_size)
        if timeout_s is None:
            timeout_s = env.TIMEOUT_S.get() or self.profile.timeout_s
        rendezvous.timeout_s = timeout_s
        checks.check_agreement(
            self.rank,
            rendezvous.all_gather,
            {
                "the version of deep_ep": checks.library_version(),
                "low_latency_mode": int(low_latency_mode),
                "enable_shrink": int(enable_shrink),
            },
        )
        self._device = _choose_device(device)
        self.topology = discover(self.rank, rendezvous.all_gather, self._device)
        if self.topology.num_hosts > 1 and self._device.type != "cpu":
            raise UnsupportedError(
                f"this group spans {self.topology.num_hosts} hosts, over which this version carries CPU ranks only"
            )
        if enable_shrink and (self.topology.num_hosts > 1 or self._device.type != "cpu"):
            raise UnsupportedError(
                f"enable_shrink=True masks CPU ranks of one host, this group is of {self.topology.num_hosts} host(s) "
                f"with tensors on {self._device}",
                hint="leave enable_shrink out; a rank that is lost is then named by PeerTimeoutError",
            )
        waited_ns: list[int] | None = None
        if self._device.type == "cpu":
            cpu_engine: CpuEngine | NetworkEngine
            if self.topology.num_hosts > 1:
                cpu_engine = self._connect_hosts(rendezvous, timeout_s)
            else:
                cpu_engine = CpuEngine(rendezvous, int(num_nvl_bytes), timeout_s, can_mask=enable_shrink)
            self._engine, self._streams = cpu_engine, CpuStreams()
            waited_ns = cpu_engine.exchanger.control.waited_ns
            if low_latency_mode:
                if isinstance(cpu_engine, NetworkEngine):
                    self._low_latency = NetworkLowLatencyEngine(cpu_engine)
                else:
                    self._low_latency = CpuLowLatencyEngine(cpu_engine.exchanger)
        else:
            # Ranks that need more memory tell each other without the program's group, in whatever thread they are.
            meeting = Control(self.rank, self.group_size, rendezvous.all_gather, timeout_s, rendezvous.ranks)
            rendezvous.all_gather = meeting.all_gather
            self._engine = GpuEngine(
                rendezvous,
                int(num_nvl_bytes),
                timeout_s,
                self._device,
                use_peer_access=env.USE_P2P.get(),
                tuning=self._gpu_tuning(rendezvous),
            )
            self._streams = CudaStreams(self._device)
            if low_latency_mode:
                self._low_latency = GpuLowLatencyEngine(
                    rendezvous,
                    timeout_s,
                    self._device,
                    use_peer_access=env.USE_P2P.get(),
                    tuning=self._tuned(LowLatencyTuning, rendezvous),
                )

        self.latency = LatencyMonitor(self.rank, self.group_size, self._device, waited_ns)
        self.op_id = next(_OP_IDS)
        _LIVE[self.op_id] = self
        metrics.serve_if_asked(self)
        self._start_up(rendezvous, timeout_s, shapes, preinitialize=preinitialize, num_hosts=self.topology.num_hosts)

    def _tuned(self, kind: type[T], rendezvous: Rendezvous) -> T:
        """Return the tuning that `deep-ep tune` found for this GPU, if all ranks know it."""
        tuning = tuned.load(kind, torch.cuda.get_device_name(self._device), self.group_size)
        return tuned.agree(tuning, kind(), rendezvous.all_gather)

    def _gpu_tuning(self, rendezvous: Rendezvous) -> GpuTuning:
        stream = Buffer.is_sm90_compiled() and not env.DISABLE_AGGRESSIVE_PTX_INSTRS.get()
        tuning = replace(self._tuned(GpuTuning, rendezvous), stream=stream)
        self._num_tuned_channels = tuning.num_channels_per_peer
        return tuning

    def _connect_hosts(self, rendezvous: Rendezvous, timeout_s: float) -> NetworkEngine:
        """Return the engine of CPU ranks of several hosts."""
        if Buffer.use_rdma is False:
            hosts = ", ".join(
                f"{name} (ranks {list(ranks)})"
                for name, ranks in zip(self.topology.host_names, self.topology.hosts, strict=True)
            )
            raise UnsupportedError(
                f"set_communication_mode(use_rdma=False) keeps buffers to one host, but this group spans "
                f"{self.topology.num_hosts}: {hosts}",
                hint="pass a group of one host's ranks, or allow the network with use_rdma=None",
            )
        warning = self.profile.warning_of(self.topology.num_hosts - 1, count_network_cards())
        if warning and self.topology.local_index[self.rank] == 0:
            logger.warning("rank %d: %s", self.rank, warning)
        num_wire_bytes = int(self.num_rdma_bytes) or env.RDMA_BUFFER_SIZE.get() or self.profile.num_rdma_bytes
        tuning = NetworkTuning(num_chunks=self.profile.num_chunks)
        return NetworkEngine(rendezvous, self.topology, int(self.num_nvl_bytes), num_wire_bytes, timeout_s, tuning)

    # Lifetime

    @property
    def runtime(self) -> Engine | None:
        """The engine that carries the exchanges, None after `destroy`."""
        return self._engine

    def destroy(self) -> None:
        """Let go of the shared memory. Does not wait for any peer; calling it again does nothing.

        Tensors that calls have returned stay valid.
        """
        self._stop_warming()
        if self._low_latency is not None:
            self._low_latency.close()
            self._low_latency = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is None:
            return
        if self.explicitly_destroy:
            logger.warning(
                "rank %d: a buffer made with explicitly_destroy=True was dropped without destroy()", self.rank
            )
        self.destroy()

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long calls wait for a peer from now on, on this rank.

        A CUDA graph keeps the limit that it was captured with.

        Args:
            timeout_s: Seconds.

        Raises:
            ConfigError: If it is not positive.
        """
        self._running()
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s must be a positive number of seconds, got {timeout_s}")
        for engine in (self._engine, self._low_latency):
            if engine is not None:
                engine.set_timeout(timeout_s)

    # Ranks that are gone

    def mask(self, rank: int) -> None:
        """Go on without a rank, in normal and in low-latency mode; all other ranks call this between the same calls.

        A masked rank is sent nothing, and nothing is expected of it: its tokens are missing from a dispatch, and what
        its experts would have made from a combine. In calls that use a handle from before, its rows are zeros.

        With `enable_shrink=True`, a normal call that a rank does not come to raises `PeerTimeoutError` on all other
        ranks, which may then call this for each of the missing ranks and repeat the call. A rank that comes late finds
        a `MaskedError`.

        Args:
            rank: The rank to mask.

        Raises:
            ConfigError: If there is no such rank, it is this one, or the buffer was made with `enable_shrink=False`.
            UnsupportedError: On GPUs, where normal calls need every rank.
        """
        self._masking(rank).mask(self._other_rank(rank), is_masked=True)

    def unmask(self, rank: int) -> None:
        """Take a masked rank in again; all ranks, that one too, call this between the same calls of the others.

        It must have been masked by then: a rank that finds a `MaskedError` knows that it has.
        Handles from the time without it must not be used any more.

        Args:
            rank: The rank, which may be this one.

        Raises:
            ConfigError: If there is no such rank, or the buffer was made with `enable_shrink=False`.
            PeerTimeoutError: If it is this rank, and the others do not take it in within the time limit.
            UnsupportedError: As in `mask`.
        """
        self._masking(rank).mask(rank, is_masked=False)

    def _masking(self, rank: int) -> CpuEngine:
        engine = self._running()
        self._check_maskable(rank)
        if not isinstance(engine, CpuEngine):
            raise UnsupportedError(
                "normal calls on GPUs need every rank of the group",
                hint="make a Buffer of the remaining ranks; low_latency_update_mask_buffer masks low-latency calls",
            )
        return engine

    # Settings and helpers

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Tell whether kernels may use more than plain loads and stores: not if DISABLE_SM90_FEATURES is 1."""
        return not env.DISABLE_SM90_FEATURES.get()

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the number of SMs that configs from `get_dispatch_config` and `get_combine_config` have from now on.

        Args:
            new_num_sms: An even number.

        Raises:
            ConfigError: If it is odd or negative.
        """
        if new_num_sms % 2 or new_num_sms < 0:
            raise ConfigError(f"num_sms must be even and at least 0, got {new_num_sms}")
        Buffer.num_sms = int(new_num_sms)

    @staticmethod
    def set_communication_mode(use_rdma: bool | None = None) -> None:
        """Set whether buffers that are made from now on may exchange over the network; the same on all ranks.

        Args:
            use_rdma: False keeps to one host: a group that spans hosts is refused. True or None, as it is at first,
                choose the path to each peer by where it is (`deep_ep.topology`).
        """
        if use_rdma not in (None, False, True):
            raise ConfigError(f"use_rdma must be True, False or None, got {use_rdma!r}")
        Buffer.use_rdma = use_rdma

    @staticmethod
    def set_nvlink_channels(num_channels: int) -> None:
        """Set how many programs carry rows to each peer on GPUs from now on; the same on all ranks.

        Args:
            num_channels: At least 1; or 0, as it is at first, to choose by the number of ranks. Never more than
                `num_sms` of the call's config allows.

        Raises:
            ConfigError: If it is negative.
        """
        Buffer.num_nvlink_channels = checks.check_at_least("num_channels", num_channels, 0)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return the recommended config of a dispatch over so many ranks."""
        return dispatch_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Return the recommended config of a combine over so many ranks."""
        return combine_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event at this point of the current stream, to pass as `previous_event`."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the bytes that DeepEP V1 wants as `num_rdma_bytes` for low-latency mode.

        Args:
            num_max_dispatch_tokens_per_rank: Most tokens that a rank sends in one call.
            hidden: Size of a token's row.
            num_ranks: Ranks of the group; V1's value does not depend on it.
            num_experts: Experts on all ranks.
        """
        checks.check_at_least("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 0)
        checks.check_at_least("hidden", hidden, 1)
        checks.check_at_least("num_ranks", num_ranks, 1)
        checks.check_at_least("num_experts", num_experts, 1)
        num_scales = hidden // 128
        dispatch_bytes = 16 + max(2 * hidden, hidden + 4 * num_scales)
        combine_bytes = 4 * num_scales + 2 * hidden
        num_slots = num_experts * num_max_dispatch_tokens_per_rank
        send_bytes = max(num_max_dispatch_tokens_per_rank * dispatch_bytes, num_slots * combine_bytes)
        recv_bytes = num_slots * max(dispatch_bytes, combine_bytes)
        signal_bytes = -(-num_experts * 4 // 128) * 128
        return (2 * (send_bytes + recv_bytes + signal_bytes) + 128) // 128 * 128

    @staticmethod
    def get_buffer_size_hint(
        num_max_tokens_per_rank: int,
        hidden_bytes: int,
        num_ranks: int,
        num_topk: int = 0,
        num_scales: int = 0,
        profile: ClusterProfile | str | None = None,
    ) -> BufferSizeHint:
        """Return the bytes with which no call in normal mode needs more, whatever the routing: twice an exchange.

        An exchange is largest for a rank to which every rank sends all its tokens. Each row brings `hidden_bytes`, 4
        bytes per scale, 12 per top-k slot and 4 of its own; 640 bytes are for alignment. Over the network come, from
        every other host, the tokens of one rank. Twice that is room for a combine while the rows of its dispatch are in
        use, which on CPU ranks lie there. Hosts are taken to have as many ranks as the profile says.

        Args:
            num_max_tokens_per_rank: Most tokens that a rank sends in one call.
            hidden_bytes: Bytes of one token's row.
            num_ranks: Ranks of the group.
            num_topk: Top-k slots per token.
            num_scales: Scales of four bytes per token.
            profile: As for the constructor.

        Returns:
            `num_nvl_bytes` and `num_rdma_bytes`, the latter 0 for one host.

        Example:
            >>> Buffer.get_buffer_size_hint(4096, 14336, 8, num_topk=8)  # 2 * (8 * 4096 * 14436 + 640)
            BufferSizeHint(num_nvl_bytes=946078976, num_rdma_bytes=0)
        """
        return buffer_size_hint(num_max_tokens_per_rank, hidden_bytes, num_ranks, num_topk, num_scales, profile)

    def get_comm_stream(self) -> Any:
        """Return the stream that asynchronous calls run on: on CPU ranks, the one stream that a CPU has."""
        self._running()
        return self._streams.comm_stream()

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Tensor:
        """Return this rank's shared memory as a tensor, to look at or to clear between calls.

        Args:
            dtype: The dtype to view it as.
            size: The shape to give it; None gives all of it, in one dimension.
            offset: Where to begin, in bytes.
            use_rdma_buffer: The memory of low-latency mode instead; on CPU ranks both modes share one.

        Raises:
            ConfigError: If the memory is too small for that.
        """
        engine = self._running()
        if use_rdma_buffer:
            local = self._low_latency.local_bytes() if self._low_latency is not None else engine.local_bytes()[:0]
        else:
            local = engine.local_bytes()
        if offset % dtype.itemsize or not 0 <= offset <= local.numel():
            raise ConfigError(
                f"offset must be a multiple of {dtype.itemsize} from 0 to {local.numel()} bytes, got {offset}"
            )
        num_items = (local.numel() - offset) // dtype.itemsize
        if size is not None and size.numel() > num_items:
            raise ConfigError(f"size must be at most {num_items} items of {dtype}, got {list(size)}")
        view = local[offset : offset + num_items * dtype.itemsize].view(dtype)
        return view if size is None else view[: size.numel()].view(size)

    # Normal mode

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Count where this rank's tokens go. Involves no peer.

        Args:
            topk_idx: `[num_tokens, num_topk]` int64 or int32; the experts of each token, -1 for none.
            num_experts: Experts on all ranks. They are split over the ranks as `torch.tensor_split` splits: evenly,
                with one more on each of the first ranks where it does not come out even.
            previous_event: What to wait for first; None waits for the current stream.
            async_finish: Return an event instead of making the current stream wait.
            allocate_on_comm_stream: Let the results belong to the communication stream. On CPU ranks, where calls
                are done when they return, these three change nothing but the returned event; any combination is fine.

        Returns:
            `num_tokens_per_rank` `[num_ranks]` int32, where a token counts once per rank;
            `num_tokens_per_rdma_rank` `[num_hosts]` int32, where a token counts once per host; None inside one host;
            `num_tokens_per_expert` `[num_experts]` int32, where each slot of a token counts;
            `is_token_in_rank` `[num_tokens, num_ranks]` bool; and an event.

        Raises:
            ConfigError: If an argument breaks a rule.
        """
        engine = self._running()
        checks.check_at_least("num_experts", num_experts, 1)
        topk_idx = checks.check_topk_idx(topk_idx, "num_tokens", num_experts, engine.device)
        layout, event = self._streams.run(
            lambda: self.latency.run("get_dispatch_layout", engine.compute_layout, topk_idx, num_experts),
            (topk_idx,),
            previous_event,
            async_finish,
        )
        return (
            layout.num_tokens_per_rank,
            layout.num_tokens_per_host,
            layout.num_tokens_per_expert,
            layout.is_token_in_rank,
            event,
        )

    def dispatch(
        self,
        x: Rows,
        handle: tuple[Tensor, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> DispatchReturn:
        """Send each token once to every rank that owns one of its experts.

        Args:
            x: `[num_tokens, hidden]` of any dtype, or a pair of that and its scales `[num_tokens, num_scales]`, of any
                dtype and strides. Rows and scales travel as opaque bytes.
            handle: What an earlier dispatch returned: send the way that one went. Then no layout and no top-k tensors
                are given.
            num_tokens_per_rank: From `get_dispatch_layout`, as are the next three.
            num_tokens_per_rdma_rank: Not used inside one host; between hosts it is compared with `is_token_in_rank`.
            is_token_in_rank: See above.
            num_tokens_per_expert: See above.
            topk_idx: `[num_tokens, num_topk]` int64 or int32, or None.
            topk_weights: `[num_tokens, num_topk]` float32; given together with `topk_idx`.
            expert_alignment: Round each expert's count of tokens up to a multiple of this.
            num_worst_tokens: If not 0, return exactly that many rows and no counts. It must be at least the number of
                rows that arrive.
            config: None takes `get_dispatch_config`. `config.num_sms // 2` is the number of channels of the handle.
            previous_event: As for `get_dispatch_layout`, like the next two.
            async_finish: See above.
            allocate_on_comm_stream: See above.

        Returns:
            `recv_x` `[num_recv, hidden]`, or a pair with `recv_scales` `[num_recv, num_scales]`, row-major. The rows
            are sorted by source rank, then by the token's index there. They lie in shared memory, which is theirs as
            long as a tensor on it lives.
            `recv_topk_idx` `[num_recv, num_topk]`, of the dtype of `topk_idx`: ids among this rank's experts, -1 for
            experts of other ranks (and in rows past the real ones, with `num_worst_tokens`).
            `recv_topk_weights` `[num_recv, num_topk]` float32, 0 where the id is -1.
            A list of this rank's tokens per expert, aligned; empty with `num_worst_tokens`.
            The handle, a tuple of six tensors (`deep_ep.engines.base.Handle`), or of ten where the group spans hosts
            (`deep_ep.engines.base.NetworkHandle`).
            An event.
            With `handle`, items 1 to 4 are None.

        Raises:
            ConfigError: If an argument breaks a rule; nothing has been sent.
            MismatchError: If the ranks disagree about the call.
            CapacityError: If memory could not be had, or `num_worst_tokens` is too small on some rank.
            PeerTimeoutError: If a peer does not do its part in time.
        """
        engine = self._running()
        rows, scales = checks.check_rows(x, engine.device)
        config = self._config(config, self.get_dispatch_config)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise ConfigError("topk_idx and topk_weights must be None when a handle is given, got tensors")
            checked = self._check_handle(handle, engine.device, rows.size(0))
            cached = CachedDispatchRequest(x=rows, scales=scales, handle=checked, config=config)
            recv, event = self._streams.run(
                lambda: self.latency.run("cached_dispatch", engine.dispatch_cached, cached),
                (cached,),
                previous_event,
                async_finish,
            )
            return _pair(*recv), None, None, None, None, event
        layout = checks.check_layout(
            num_tokens_per_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            rows.size(0),
            self.group_size,
            engine.device,
            num_tokens_per_rdma_rank if self.topology.num_hosts > 1 else None,
        )
        num_experts = layout.num_tokens_per_expert.numel()
        idx, weights = checks.check_topk(topk_idx, topk_weights, rows.size(0), num_experts, engine.device)
        if checks.check_at_least("num_worst_tokens", num_worst_tokens, 0) and idx is None:
            raise ConfigError(f"num_worst_tokens={num_worst_tokens} needs topk_idx and topk_weights, got None")
        request = DispatchRequest(
            x=rows,
            scales=scales,
            topk_idx=idx,
            topk_weights=weights,
            layout=layout,
            expert_alignment=checks.check_at_least("expert_alignment", expert_alignment, 1),
            num_worst_tokens=int(num_worst_tokens),
            config=config,
        )
        if engine.device.type == "cuda" and num_worst_tokens == 0 and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a dispatch with new routing waits on the host for its counts, which a CUDA graph cannot capture",
                hint="pass num_worst_tokens, or a handle",
            )
        if idx is not None and rows.dtype in (torch.bfloat16, torch.float8_e4m3fn) and rows.numel():
            is_fp8, num_tokens = rows.dtype == torch.float8_e4m3fn, next_power_of_two(rows.size(0))
            self._note_shape((rows.size(1), idx.size(1), num_experts, num_tokens, False, is_fp8, config.num_sms))
        result, event = self._streams.run(
            lambda: self.latency.run("dispatch", engine.dispatch, request), (request,), previous_event, async_finish
        )
        return (
            _pair(result.x, result.scales),
            result.topk_idx,
            result.topk_weights,
            result.num_recv_tokens_per_expert,
            result.handle,
            event,
        )

    def combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, ...] | None = None,
        config: Config | None = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Send each row back to where its token came from, and add up the rows of each token.

        The sum is not weighted. It starts from the biases, adds the ranks in ascending order in float32, and is
        rounded once. A token that went nowhere gives its bias, or zeros. Where the group spans hosts, each host adds
        up its ranks like that first and rounds its sum; then come the biases and the hosts, in the order of their
        lowest ranks.

        Args:
            x: `[num_recv, hidden]` bfloat16, float16 or float32; a row for every row that the dispatch returned.
            handle: What that dispatch returned. It may be used again.
            topk_weights: `[num_recv, num_topk]` float32 to be brought back and added likewise, or None.
            bias: None, or one or two tensors `[num_tokens, hidden]` of the dtype of `x` to add.
            config: None takes `get_combine_config`.
            previous_event: As for `get_dispatch_layout`, like the next two.
            async_finish: See above.
            allocate_on_comm_stream: See above.

        Returns:
            `combined_x` `[num_tokens, hidden]` of the dtype of `x`;
            `combined_topk_weights` `[num_tokens, num_topk]` float32, or None; and an event.

        Raises:
            ConfigError: If an argument breaks a rule; nothing has been sent.
            MismatchError: If the ranks disagree about the call, or their handles do not fit together.
            CapacityError: If memory could not be had.
            PeerTimeoutError: If a peer does not do its part in time.
        """
        engine = self._running()
        checked = self._check_handle(handle, engine.device)
        rows, weights, biases = checks.check_combine(x, topk_weights, bias, checked, engine.device)
        config = self._config(config, self.get_combine_config)
        request = CombineRequest(x=rows, topk_weights=weights, biases=biases, handle=checked, config=config)
        combined, event = self._streams.run(
            lambda: self.latency.run("combine", engine.combine, request), (request,), previous_event, async_finish
        )
        return *combined, event

    def internode_dispatch(
        self,
        x: Rows,
        handle: tuple[Tensor, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> DispatchReturn:
        """Do what `dispatch` does, in a group that spans hosts; V1 has it public.

        Raises:
            ConfigError: If the group is on one host; and what `dispatch` raises.
        """
        self._check_spans_hosts("internode_dispatch", "dispatch")
        return self.dispatch(
            x,
            handle=handle,
            num_tokens_per_rank=num_tokens_per_rank,
            num_tokens_per_rdma_rank=num_tokens_per_rdma_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=num_tokens_per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            expert_alignment=expert_alignment,
            num_worst_tokens=num_worst_tokens,
            config=config,
            previous_event=previous_event,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )

    def internode_combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, ...] | None = None,
        config: Config | None = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Do what `combine` does, in a group that spans hosts; V1 has it public.

        Raises:
            ConfigError: If the group is on one host; and what `combine` raises.
        """
        self._check_spans_hosts("internode_combine", "combine")
        return self.combine(
            x,
            handle,
            topk_weights=topk_weights,
            bias=bias,
            config=config,
            previous_event=previous_event,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )

    def _check_spans_hosts(self, name: str, other: str) -> None:
        if self.topology.num_hosts == 1:
            raise ConfigError(f"{name} is for groups that span hosts, this one is on one", hint=f"call {other}")

    def _running(self) -> Engine:
        if self._engine is None:
            raise DestroyedError("this buffer has been destroyed", hint="make a new Buffer")
        if self._warmup is not None:
            self._let_call_in(self._warmup)
        engine = self._engine
        if isinstance(engine, GpuEngine):
            num_channels = Buffer.num_nvlink_channels or self._num_tuned_channels
            if engine.tuning.num_channels_per_peer != num_channels:
                engine.tuning = replace(engine.tuning, num_channels_per_peer=num_channels)
        return engine

    def _check_handle(self, handle: object, device: torch.device, num_tokens: int | str = "num_tokens") -> Handle:
        """Check a handle: of the kind that dispatch returns in this group."""
        if self.topology.num_hosts > 1:
            # The engine of such a group takes this kind.
            return cast(Handle, checks.check_network_handle(handle, self.topology, device, num_tokens))
        return checks.check_handle(handle, self.group_size, device, num_tokens)

    def _config(self, config: Config | None, recommended: Any) -> Config:
        if config is None:
            chosen: Config = recommended(self.group_size)
            return chosen
        if not isinstance(config, Config):
            raise TypeError(f"config must be a deep_ep.Config or None, got {type(config).__name__}")
        return config


def live_buffer(op_id: int) -> Buffer:
    """Return the buffer of a number.

    Raises:
        DestroyedError: If the program has dropped it.
    """
    buffer = _LIVE.get(op_id)
    if buffer is None:
        raise DestroyedError(
            f"the buffer with op_id={op_id} is gone, but an operator needs it",
            hint="keep a reference to the Buffer until backward has run",
        )
    return buffer


def _pair(x: Tensor, scales: Tensor | None) -> Rows:
    return x if scales is None else (x, scales)


def _choose_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be a CUDA device or the CPU, got {chosen}")
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen
