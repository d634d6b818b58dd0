"""Runs the dispatcher files of real programs, unmodified, on one rank; the rest of each program is a stand-in.

`fetch` takes the files out of wheels from the package index. `run_client` routes random tokens through a client's own
class, lets expert e make `x * (1 + e / 4)` of each row, and compares outputs and gradients with a dense computation.
It fits fresh processes only: stand-ins take the names of the programs' modules.
"""

import dataclasses
import enum
import importlib.util
import os
import subprocess
import sys
import tempfile
import types
import warnings
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist

HIDDEN, NUM_TOKENS, NUM_EXPERTS, NUM_TOPK = 2048, 37, 8, 3
WHEELS = {
    "nemo-automodel==0.7.0": ["nemo_automodel/components/moe/megatron/fused_a2a.py"],
    "sglang==0.5.23": [f"sglang/srt/layers/moe/token_dispatcher/{name}.py" for name in ("base", "deepep")],
    "vllm-tpu==0.32.0": [  # its Python files are all of vLLM's
        "vllm/model_executor/layers/fused_moe/prepare_finalize/deepep_ht.py",
        "vllm/model_executor/layers/fused_moe/prepare_finalize/deepep_ll.py",
        "vllm/distributed/device_communicators/all2all.py",
    ],
    "lmdeploy==0.18.0": [f"lmdeploy/pytorch/backends/{name}token_dispatcher.py" for name in ("cuda/", "", "default/")],
}
CLIENTS = {
    "vllm_ht": "vllm-tpu==0.32.0",
    "vllm_ll": "vllm-tpu==0.32.0",
    "sglang": "sglang==0.5.23",
    "automodel": "nemo-automodel==0.7.0",
    "lmdeploy": "lmdeploy==0.18.0",
}


def fetch(wheel: str, folder: Path) -> None:
    """Put the files of a wheel below a folder, if they are not there.

    Raises:
        RuntimeError: If pip could not get it; says why.
    """
    names = WHEELS[wheel]
    if all((folder / name).exists() for name in names):
        return
    with tempfile.TemporaryDirectory() as downloads:
        options = ["-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", "-d", downloads]
        process = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, wheel],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if process.returncode != 0:
            raise RuntimeError(f"pip could not download {wheel}: {process.stderr.strip().splitlines()[-1:]}")
        (path,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(path) as archive:
            for name in names:
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))


def run_client(on, folder: str, client: str) -> list[str]:
    """Run one client; return what was compared, and how far apart it was."""
    global args, rank, world, cuda, dev, GROUP, CPU_GROUP, E, EL, K, H, T, LO
    warnings.simplefilter("ignore")
    args = types.SimpleNamespace(src=folder)
    rank, world, cuda, dev = on.rank, on.num_ranks, False, torch.device("cpu")
    # What the clients ask of a GPU is how many SMs it has, and which it is.
    torch.cuda.get_device_properties = lambda *a, **k: types.SimpleNamespace(multi_processor_count=132)
    torch.cuda.current_device = lambda: 0
    GROUP, CPU_GROUP = dist.group.WORLD, dist.new_group(backend="gloo")
    E, EL, K, H, T = NUM_EXPERTS, NUM_EXPERTS // world, NUM_TOPK, HIDDEN, NUM_TOKENS
    LO = rank * EL
    return globals()[f"case_{client}"]()


def data(seed=0):
    g = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(T, H, generator=g).bfloat16().to(dev)
    idx = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(T)]).to(dev)
    w = torch.softmax(torch.randn(T, K, generator=g), -1).to(dev)
    return x, idx, w


def scale(e):
    return 1 + 0.25 * e.float()


def reference(x, idx, w):
    return x.float() * (scale(idx) * w).sum(1, keepdim=True)


def check(name, got, want, tol=2e-2):
    err = ((got.float() - want.float()).abs().max() / want.float().abs().max()).item()
    assert err < tol, f"{name}: rel err {err:.3e}"
    return f"{name} {err:.1e}"


def mod(name, path=None, **attrs):
    m = types.ModuleType(name)
    m.__path__ = [path] if path else []
    m.__dict__.update(attrs)
    sys.modules[name] = m
    parent, _, leaf = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], leaf, m)
    return m


def packages(dotted):
    parts, cur = dotted.split("."), ""
    for p in parts:
        cur = f"{cur}.{p}" if cur else p
        if cur not in sys.modules:
            mod(cur, os.path.join(args.src, *cur.split(".")))


def load(name):
    path = os.path.join(args.src, *name.split(".")) + ".py"
    spec = importlib.util.spec_from_file_location(name, path)
    m = importlib.util.module_from_spec(spec)
    sys.modules[name] = m
    spec.loader.exec_module(m)
    parent, _, leaf = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], leaf, m)
    return m


class Any_:  # attribute sink
    def __getattr__(self, n):
        return Any_()

    def __call__(self, *a, **k):
        return None


def stub_vllm():
    if "vllm" in sys.modules:
        return
    packages("vllm.model_executor.layers.fused_moe.prepare_finalize")
    packages("vllm.distributed.device_communicators")
    packages("vllm.utils")
    packages("vllm.v1.worker")

    class Fmt(enum.Enum):
        Standard = "standard"
        BatchedExperts = "batched"

    @dataclasses.dataclass
    class Meta:
        expert_num_tokens: object
        expert_num_tokens_cpu: object
        psum_recv_per_rank: object = None
        rank_expert_offset: object = None

        @staticmethod
        def make_from_list(lst, device):
            t = torch.tensor(lst, dtype=torch.int32)
            return Meta(t.to(device), t)

    class Base:
        def __init__(self):
            pass

    class Contig:
        def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input):
            return fused_expert_output

    class Delegate(Contig):
        pass

    fm = "vllm.model_executor.layers.fused_moe."
    mod(
        fm + "modular_kernel",
        FusedMoEPrepareAndFinalizeModular=Base,
        FusedMoEActivationFormat=Fmt,
        ExpertTokensMetadata=Meta,
        PrepareResultType=tuple,
        ReceiverType=object,
        TopKWeightAndReduce=object,
        FusedMoEExperts=object,
    )
    mod(fm + "config", FusedMoEQuantConfig=object)
    mod(fm + "topk_weight_and_reduce", TopKWeightAndReduceContiguous=Contig, TopKWeightAndReduceDelegate=Delegate)
    mod(
        fm + "utils",
        moe_kernel_quantize_input=lambda a, *x, **k: (a, None),
        normalize_batched_scales_shape=lambda s, n: s,
    )
    sys.modules["vllm"].envs = mod(
        "vllm.envs",
        VLLM_DEEPEPLL_NVFP4_DISPATCH=False,
        VLLM_DEEPEP_BUFFER_SIZE_MB=64,
        VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE=False,
        VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL=False,
        VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE=True,
        VLLM_DEEPEP_V2_PREFER_OVERLAP=False,
        VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION=False,
    )
    mod("vllm.logger", init_logger=lambda n: Any_())
    mod("vllm.platforms", current_platform=types.SimpleNamespace(is_rocm=lambda: False))
    mod("vllm.utils.math_utils", round_up=lambda a, b: (a + b - 1) // b * b, cdiv=lambda a, b: -(-a // b))
    ub = dict(dbo_current_ubatch_id=lambda: 0, dbo_enabled=lambda: False, dbo_get_previous_event=lambda f: None)
    for n in (
        "dbo_switch_to_comm",
        "dbo_switch_to_compute",
        "dbo_switch_to_compute_sync",
        "dbo_maybe_run_recv_hook",
        "dbo_yield_and_switch_from_comm_to_compute",
        "dbo_yield_and_switch_from_compute_to_comm",
    ):
        ub[n] = lambda *a: None
    mod("vllm.v1.worker.ubatching", **ub)
    mod("vllm.forward_context", get_forward_context=lambda: types.SimpleNamespace(dp_metadata=None))
    packages("vllm.model_executor.layers.quantization.utils")
    mod("vllm.model_executor.layers.quantization.utils.mxfp8_utils", MXFP8_BLOCK_SIZE=32, swizzle_mxfp8_scale=None)
    try:
        import triton

        tl = triton.language
    except ImportError:
        triton, tl = types.SimpleNamespace(jit=lambda f: f), types.SimpleNamespace(constexpr=int)
    mod("vllm.triton_utils", tl=tl, triton=triton)
    # manager (all2all.py)
    mod(
        "vllm.config",
        get_current_vllm_config=lambda: types.SimpleNamespace(
            parallel_config=types.SimpleNamespace(enable_fault_tolerance=False)
        ),
    )
    D = sys.modules["vllm.distributed"]
    D.get_dp_group = D.get_ep_group = D.get_pcp_group = None
    mod("vllm.distributed.utils", StatelessProcessGroup=object)
    mod("vllm.utils.flashinfer", __getattr__=lambda n: lambda *a, **k: False)
    mod("vllm.utils.func_utils", supports_kw=lambda *a: False)
    mod("vllm.utils.import_utils", __getattr__=lambda n: lambda *a, **k: True)

    class Cache:
        _cache, _lock = {}, __import__("threading").RLock()

        def get_or_create(self, kw, fn):
            key = tuple(sorted((k, v) for k, v in kw.items()))
            if key not in self._cache:
                self._cache[key] = fn(**kw)
            return self._cache[key]

    class Mgr:
        def __init__(self, cpu_group, tcp_store_group=None):
            self.cpu_group, self.rank, self.world_size, self.internode = cpu_group, rank, world, False

    mod("vllm.distributed.device_communicators.base_device_communicator", All2AllManagerBase=Mgr, Cache=Cache)


QC = types.SimpleNamespace(
    is_block_quantized=False,
    quant_dtype=None,
    a1_scale=None,
    a1_gscale=None,
    a2_scale=None,
    block_shape=None,
    per_act_token_quant=False,
    is_scale_swizzled=False,
)


def experts_by_ids(x, gids, w):
    """rows of x, global expert ids [N, K'] (ids outside this rank are ignored), weights -> weighted sum"""
    mine = (gids >= LO) & (gids < LO + EL)
    return (x.float() * (torch.where(mine, scale(gids) * w, 0.0)).sum(1, keepdim=True)).to(x.dtype)


def case_vllm_ht():
    stub_vllm()
    from vllm.distributed.device_communicators import base_device_communicator  # noqa: F401

    A = load("vllm.distributed.device_communicators.all2all")
    m = load("vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht")
    mgr = A.DeepEPHTAll2AllManager(CPU_GROUP)
    pf = m.DeepEPHTPrepareAndFinalize(mgr.get_handle({}), world, world, LO)
    x, idx, w = data()
    res = []
    for do_async in (True, False):
        ex, _, meta, eid, ew = pf.prepare(x, w, idx, E, None, False, QC)
        assert int(meta.expert_num_tokens.sum()) == int(((eid >= LO) & (eid < LO + EL)).sum())
        y = experts_by_ids(ex, eid, ew)
        out = torch.empty_like(x)
        red = sys.modules["vllm.model_executor.layers.fused_moe.topk_weight_and_reduce"].TopKWeightAndReduceContiguous()
        if do_async:
            pf.finalize_async(out, y, w, idx, False, red)()
        else:
            pf.finalize(out, y, w, idx, False, red)
        res.append(check("out", out, reference(x, idx, w)))
    mgr.set_num_sms(20)
    mgr.destroy()
    return res


def case_vllm_ll():
    stub_vllm()
    A = load("vllm.distributed.device_communicators.all2all")
    m = load("vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll")
    mgr = A.DeepEPLLAll2AllManager(CPU_GROUP)
    M, res = 64, []
    buf = mgr.get_handle(
        dict(
            max_num_tokens_per_dp_rank=M,
            token_hidden_size=H,
            num_ep_ranks=world,
            num_global_experts=E,
            num_local_experts=EL,
        )
    )
    red = sys.modules["vllm.model_executor.layers.fused_moe.topk_weight_and_reduce"].TopKWeightAndReduceDelegate()
    for fp8 in (False, True):
        pf = m.DeepEPLLPrepareAndFinalize(buf, M, world, use_fp8_dispatch=fp8)
        x, idx, w = data(3)
        ex, sc, meta, _, _ = pf.prepare(x, w, idx, E, None, False, QC)
        assert ex.shape == (EL, world * M, H), ex.shape
        y = (ex.float() * scale(torch.arange(LO, LO + EL, device=dev))[:, None, None]).bfloat16()
        out = torch.empty_like(x)
        pf.finalize(out, y, w, idx, False, red)
        res.append(check(f"out(fp8={fp8})", out, reference(x, idx, w), 6e-2 if fp8 else 2e-2))
    return res


def stub_sglang():
    if "sglang" in sys.modules:
        return
    packages("sglang.srt.layers.moe.token_dispatcher")
    packages("sglang.kernels.ops.quantization")
    packages("sglang.srt.eplb")

    class Mode(enum.Enum):
        NORMAL, LOW_LATENCY, AUTO = "normal", "low_latency", "auto"
        enable_normal = lambda s: s is not Mode.LOW_LATENCY
        enable_low_latency = lambda s: s is not Mode.NORMAL
        is_normal = lambda s: s is Mode.NORMAL
        is_low_latency = lambda s: s is Mode.LOW_LATENCY
        resolve = lambda s, ext: s if s is not Mode.AUTO else (Mode.NORMAL if ext else Mode.LOW_LATENCY)

    class Dt(enum.Enum):
        BF16, FP8, INT8, NVFP4, MXFP4, MXFP8 = "bf16", "fp8", "int8", "nvfp4", "mxfp4", "mxfp8"

    class Env:
        vals = dict(
            SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=128,
            SGLANG_ZBAL_LOCAL_MEM_SIZE=0,
            SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE=False,
            SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK=128,
            SGLANG_DEEPEP_V2_NUM_SMS=0,
            SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND=None,
        )

        def __getattr__(self, n):
            return types.SimpleNamespace(get=lambda: Env.vals[n])

    state = types.SimpleNamespace(extend=True, bufs=types.SimpleNamespace(buffers={}))
    mod("sglang.srt.environ", envs=Env())
    mod("sglang.srt.eplb.expert_distribution", get_global_expert_distribution_recorder=lambda: Any_())
    mod(
        "sglang.srt.layers.deep_gemm_wrapper",
        ENABLE_JIT_DEEPGEMM=True,
        DEEPGEMM_BLACKWELL=False,
        DEEPGEMM_SCALE_UE8M0=False,
    )
    mod("sglang.srt.layers.dp_attention", get_is_extend_in_batch=lambda: state.extend)
    mod("sglang.srt.layers.moe.topk", TopKOutput=object)
    mod(
        "sglang.srt.layers.moe.utils",
        DeepEPMode=Mode,
        DispatcherOutputDtype=Dt,
        get_deepep_config=lambda: "",
        get_deepep_output_dtype=lambda s: state.dtype,
        is_tbo_enabled=lambda: False,
        DeepEPv2Fp8ScaleFormat=object,
        get_deepep_v2_fp8_scale_format=lambda: types.SimpleNamespace(ue8m0=False, tma_aligned=False),
    )
    mod(
        "sglang.srt.runtime_context",
        get_parallel=lambda: types.SimpleNamespace(attn_dp_size=world, attn_cp_size=1, tp_size=world, tp_group=None),
        get_resources=lambda: state.bufs,
        get_exec=lambda: types.SimpleNamespace(moe=types.SimpleNamespace(deepep_v2_mode="direct")),
    )
    mod(
        "sglang.srt.utils",
        get_bool_env_var=lambda *a: False,
        get_cuda_version=lambda: (13, 0),
        is_blackwell=lambda: False,
        is_flashinfer_available=lambda: False,
        is_hip=lambda: False,
        is_npu=lambda: False,
        load_json_config=__import__("json").loads,
    )

    def quant(x, g, **k):
        y = x.float().view(x.shape[0], -1, g)
        s = y.abs().amax(-1).clamp(1e-4) / 448.0
        return (y / s[..., None]).to(torch.float8_e4m3fn).view(x.shape), s

    mod("sglang.kernels.ops.quantization.fp8_kernel", sglang_per_token_group_quant_fp8=quant)
    state.Mode, state.Dt, state.dtype = Mode, Dt, Dt.BF16
    sys.modules["sglang"].state = state
    load("sglang.srt.layers.moe.token_dispatcher.base")


def case_sglang():
    stub_sglang()
    st = sys.modules["sglang"].state
    m = load("sglang.srt.layers.moe.token_dispatcher.deepep")
    if not cuda:
        torch.get_device_module = lambda *a: torch.cuda
    res = []
    d = m.DeepEPDispatcher(
        GROUP, K, False, E, EL, H, torch.bfloat16, st.Mode.AUTO, async_finish=True, return_recv_hook=True
    )
    for ext, fp8 in ((True, False), (False, False), (False, True), (True, True)):
        st.extend, st.dtype = ext, st.Dt.FP8 if fp8 else st.Dt.BF16
        d.set_quant_config({})
        x, idx, w = data(5)
        o = d.dispatch(x, types.SimpleNamespace(topk_weights=w, topk_ids=idx.int()))
        hs = o.hidden_states
        if ext:
            if o.hidden_states_scale is not None:
                hs = (hs.float().view(hs.shape[0], -1, 128) * o.hidden_states_scale[..., None]).view(hs.shape)
            y = experts_by_ids(hs, torch.where(o.topk_ids >= 0, o.topk_ids + LO, -1), o.topk_weights).bfloat16()
            assert isinstance(o.num_recv_tokens_per_expert, list)
            out = d.combine(m.DeepEPNormalCombineInput(y, o.topk_ids, o.topk_weights))
        else:
            if o.hidden_states_scale is not None:
                hs = (hs.float().view(*hs.shape[:2], -1, 128) * o.hidden_states_scale[..., None]).view(hs.shape)
            y = (hs.float() * scale(torch.arange(LO, LO + EL, device=dev))[:, None, None]).bfloat16()
            out = d.combine(m.DeepEPLLCombineInput(y, o.topk_ids, o.topk_weights))
        res.append(check(f"out(extend={ext},fp8={fp8})", out, reference(x, idx, w), 6e-2 if fp8 else 2e-2))
    return res


def case_automodel():
    packages("nemo_automodel.components.moe.megatron")
    m = load("nemo_automodel.components.moe.megatron.fused_a2a")
    assert m.HAVE_DEEP_EP
    x, idx, w = data(8)
    x, w = x.requires_grad_(), w.requires_grad_()
    rx, ri, rw, counts, h = m.fused_dispatch(x, idx, w, E, GROUP, async_finish=True, allocate_on_comm_stream=True)
    y = (rx.float() * torch.where(ri >= 0, scale(ri + LO) * rw, 0.0).sum(1, keepdim=True)).bfloat16()
    out, _ = m.fused_combine(y, GROUP, h, async_finish=True, allocate_on_comm_stream=True)
    res = [check("out", out.detach(), reference(x.detach(), idx, w.detach()))]
    out.float().sum().backward()
    res.append(check("dx", x.grad, (scale(idx) * w.detach()).sum(1, keepdim=True).expand(-1, H)))
    res.append(check("dw", w.grad, scale(idx) * x.detach().float().sum(1, keepdim=True), 5e-2))
    m.free_buffer()
    return res


def case_lmdeploy():
    packages("lmdeploy.pytorch.backends.cuda")
    packages("lmdeploy.pytorch.backends.default")
    mod("lmdeploy.pytorch.envs", deep_ep_buffer_num_sms=20, env_to_int=lambda n, d: int(os.getenv(n, d)))
    load("lmdeploy.pytorch.backends.token_dispatcher")
    load("lmdeploy.pytorch.backends.default.token_dispatcher")
    m = load("lmdeploy.pytorch.backends.cuda.token_dispatcher")
    x, idx, w = data(10)
    n = m.DeepEPTokenDispatcherNormal(GROUP, E, EL, H, torch.bfloat16, expert_alignment=1)
    rx, ri, rw, counts = n.dispatch(x, idx.int(), w)
    y = experts_by_ids(rx, torch.where(ri >= 0, ri + LO, -1), rw)
    res = [check("normal", n.combine(y), reference(x, idx, w))]
    m.DeepEPBuffer.set_deepep_mode(m.DeepEPMode.NORMAL)
    m.DeepEPBuffer.set_deepep_mode(m.DeepEPMode.LOW_LATENCY)
    ll = m.DeepEPTokenDispatcherLowLatency(GROUP, E, EL, H, torch.bfloat16)
    recv, ti, tw, cnt, em = ll.dispatch(x, idx.int(), w, E)
    q, s = (t.value for t in recv)
    hs = (q.float().view(*q.shape[:2], -1, 128) * s[..., None]).view(q.shape)
    y = (hs * scale(torch.arange(LO, LO + EL, device=dev))[:, None, None]).bfloat16()
    res.append(check("low_latency(fp8)", ll.combine(y, ti, tw), reference(x, idx, w), 6e-2))
    return res
