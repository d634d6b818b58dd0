"""Compiles kernels ahead of time, with no GPU: the command `deep-ep warm`, and what `setup.py` does on request."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from deep_ep import env, kernel_cache, tuned
from deep_ep.config import Config
from deep_ep.engines import gpu_plans, low_latency_plans
from deep_ep.engines.gpu_kernels import load_kernels
from deep_ep.engines.low_latency_plans import LowLatencyTuning
from deep_ep.errors import ConfigError
from deep_ep.screen import Screen
from deep_ep.shapes import ExchangeShape
from deep_ep.tuning import GpuTuning

T = TypeVar("T", GpuTuning, LowLatencyTuning)
DEFAULT_RANKS = (2, 4, 8)
DEFAULT_CAPABILITIES = (90,)
_LAYERS = ((7168, 8, 256), (4096, 8, 128), (2048, 8, 128))
DEFAULT_SHAPES = tuple(
    ExchangeShape(
        hidden=hidden,
        num_topk=num_topk,
        num_experts=num_experts,
        num_max_tokens_per_rank=128 if is_low_latency else 4096,
        is_low_latency=is_low_latency,
        use_fp8=use_fp8,
    )
    for hidden, num_topk, num_experts in _LAYERS
    for is_low_latency in (False, True)
    for use_fp8 in (False, True)
)
"""Layers of DeepSeek-V3, of Qwen3-235B and of Qwen3-30B."""
_FIELDS = {"hidden": "hidden", "topk": "num_topk", "experts": "num_experts", "tokens": "num_max_tokens_per_rank"}
_FLAGS = {"low-latency": "is_low_latency", "fp8": "use_fp8"}


def parse_capability(text: str) -> int:
    """Return what an architecture is called here: 90 for "9.0", "9.0a" or "sm_90".

    Raises:
        ConfigError: If the text is none.
    """
    digits = text.strip().removeprefix("sm_").removesuffix("+PTX").rstrip("af")
    major, dot, minor = digits.partition(".")
    if not dot:
        major, minor = digits[:-1], digits[-1:]
    if not (major.isdecimal() and minor.isdecimal() and len(minor) == 1 and int(major) >= 8):
        raise ConfigError(f"an architecture must be like 9.0, and at least 8.0, got {text!r}")
    return 10 * int(major) + int(minor)


def parse_shape(text: str) -> ExchangeShape:
    """Return a shape from text like "hidden=7168,topk=8,experts=256,tokens=128,low-latency,fp8".

    Raises:
        ConfigError: If a part is unknown, or one is missing.
    """
    fields: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if equals and name in _FIELDS and value.isdecimal():
            fields[_FIELDS[name]] = int(value)
        elif not equals and name in _FLAGS:
            fields[_FLAGS[name]] = True
        else:
            raise ConfigError(
                f"a shape must be like hidden=7168,topk=8,experts=256,tokens=128,low-latency,fp8, got {part!r} in it"
            )
    return ExchangeShape.of(fields)


def variants_of(shape: ExchangeShape, num_ranks: int, capability: int) -> list[gpu_plans.Variant]:
    """Return the kernels that calls of a shape launch on GPUs of a compute capability."""
    kernels, shape = load_kernels(), replace(shape, num_sms=shape.num_sms or Config().num_sms)
    if not shape.is_low_latency:
        return gpu_plans.variants_of(kernels, shape, num_ranks, _tuning(GpuTuning, num_ranks, capability))
    has_native_fp8 = low_latency_plans.has_native_fp8((capability // 10, capability % 10))
    tuning = _tuning(LowLatencyTuning, num_ranks, capability)
    return low_latency_plans.variants_of(kernels, shape, num_ranks, tuning, has_native_fp8=has_native_fp8)


def warm(
    shapes: Sequence[ExchangeShape],
    ranks: Sequence[int],
    capabilities: Sequence[int],
    folder: Path | None = None,
    num_jobs: int = 0,
    on_kernel: Callable[[], None] = lambda: None,
) -> int:
    """Compile all kernels that calls of some shapes launch, except those that are there.

    Args:
        shapes: The shapes.
        ranks: Sizes of groups.
        capabilities: What to compile for: 90 is compute capability 9.0.
        folder: Where to put them beside the cache, as a package that needs no cache has them.
        num_jobs: Processes that compile; 0 is one for each core.
        on_kernel: Is called for each kernel that is there.

    Returns:
        The number of kernels.
    """
    tasks = list(dict.fromkeys(_tasks(shapes, ranks, capabilities)))
    num_jobs = min(num_jobs or len(os.sched_getaffinity(0)), len(tasks))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    if num_jobs == 1:
        for task in tasks:
            _compile(task, folder)
            on_kernel()
        return len(tasks)
    with ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(_compile, task, folder) for task in tasks]:
            future.result()
            on_kernel()
    return len(tasks)


def _tasks(
    shapes: Sequence[ExchangeShape], ranks: Sequence[int], capabilities: Sequence[int]
) -> Iterator[tuple[ExchangeShape, int, int, int]]:
    """Go through the kernels, each as a shape, ranks, a capability and its place among the variants of those."""
    found = set()
    for capability in capabilities:
        for num_ranks in ranks:
            for shape in shapes:
                for place, variant in enumerate(variants_of(shape, num_ranks, capability)):
                    if (variant, capability) not in found:
                        found.add((variant, capability))
                        yield shape, num_ranks, capability, place


def _compile(task: tuple[ExchangeShape, int, int, int], folder: Path | None) -> None:
    shape, num_ranks, capability, place = task
    kernels, variant = load_kernels(), variants_of(shape, num_ranks, capability)[place]
    code = kernels.find(*variant, capability)
    if folder is not None:
        key = kernel_cache.key_of(kernels.name_of(variant.kernel), variant.constants, variant.num_warps, capability)
        kernel_cache.write_whole(folder / key, code.pack())


def _tuning(kind: type[T], num_ranks: int, capability: int) -> T:
    """Return the tuning that a buffer takes: that of this machine's GPU if it is of that capability."""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if 10 * major + minor == capability:
            return tuned.load(kind, torch.cuda.get_device_name(), num_ranks)
    return kind()


def choose_capabilities(texts: Sequence[str]) -> list[int]:
    """Return what to compile for: what is named, or TORCH_CUDA_ARCH_LIST, or this machine's GPU, or 9.0."""
    named = list(texts) or env.TORCH_CUDA_ARCH_LIST.get().replace(";", " ").split()
    if named:
        return [parse_capability(text) for text in named]
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return [10 * major + minor]
    return list(DEFAULT_CAPABILITIES)


@click.command()
@click.option("--arch", "arches", multiple=True, help="Compute capability, like 9.0; may be given often.")
@click.option("--ranks", multiple=True, type=click.IntRange(min=1), help="Size of a group; may be given often.")
@click.option(
    "--shape",
    "--shapes",
    "texts",
    multiple=True,
    help="Like hidden=7168,topk=8,experts=256,tokens=128,low-latency,fp8; may be given often.",
)
@click.option("--output", type=click.Path(path_type=Path), help="A folder to put the kernels into, beside the cache.")
@click.option("--jobs", "num_jobs", type=click.IntRange(min=0), default=0, help="Processes; 0 is one for each core.")
def command(
    arches: tuple[str, ...], ranks: tuple[int, ...], texts: tuple[str, ...], output: Path | None, num_jobs: int
) -> None:
    """Compile kernels ahead of time; needs no GPU.

    They go to DEEP_EP_CACHE_DIR, where buffers find them. Without --shape those of layers of known models are compiled,
    and those that programs on this machine have used; without --arch for TORCH_CUDA_ARCH_LIST, or this machine's GPU,
    or 9.0; without --ranks for 2, 4 and 8.
    """
    screen, capabilities = Screen(), choose_capabilities(arches)
    shapes = [parse_shape(text) for text in texts]
    if not texts:
        shapes = [*DEFAULT_SHAPES, *_seen()]
    sizes = ranks or DEFAULT_RANKS
    num_kernels = len(set(_tasks(shapes, sizes, capabilities)))
    with screen.progress("kernels", num_kernels) as advance:
        warm(shapes, sizes, capabilities, output, num_jobs, advance)
    names = ", ".join(f"{capability // 10}.{capability % 10}" for capability in capabilities)
    screen.line(f"{num_kernels} kernels are there for {names}.")


def _seen() -> Iterator[ExchangeShape]:
    for fields in kernel_cache.seen():
        try:
            yield ExchangeShape.of(fields)
        except ConfigError:
            continue  # of another version
