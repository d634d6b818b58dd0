"""Number formats of low-latency mode: bf16 as bits, fp8 with scales, and sums of fewer than 32 bits.

Kernels move bf16 as 16-bit integers. Their conversions round to the nearest, ties to even, and are the same on a GPU
and in the interpreter, whose own casts truncate. `deep_ep.low_latency_reference.cast_to_fp8` defines the fp8 formats.

A sum travels as two planes: the high 16 bits of all channels, which alone are bf16, then `LOW_BITS` (0, 8 or 16) more
of each. Example with 8: 1.00390625 + 2**-20 has the float32 bits 0x3F808008, rounded to 24 bits 0x3F8080; the high
plane gets 0x3F80, the low plane 0x80.
"""

import triton
import triton.language as tl

MAX_FP8 = tl.constexpr(448.0)
INVERSE_MAX_FP8 = tl.constexpr(1.0 / 448.0)
MIN_AMAX = tl.constexpr(1e-4)


@triton.jit
def from_bf16_bits(bits):
    """Return the float32 values of 16-bit integers that hold bf16."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def round_to_bits(values, LOW_BITS: tl.constexpr):
    """Round float32 values to their first 16 + `LOW_BITS` bits; return those, as low bits of int32."""
    bits = values.to(tl.int32, bitcast=True)
    if LOW_BITS < 16:
        cut: tl.constexpr = 16 - LOW_BITS
        rounded = (bits + ((1 << (cut - 1)) - 1) + ((bits >> cut) & 1)) >> cut
        # Rounding could carry the bits of a NaN over into those of a number.
        bits = tl.where(values == values, rounded, 0x7FC00000 >> cut)
    return bits


@triton.jit
def from_planes(high, low, LOW_BITS: tl.constexpr):
    """Return the float32 values of two planes; `low` is ignored without low bits."""
    bits = high.to(tl.int32) << 16
    if LOW_BITS > 0:
        bits |= (low.to(tl.int32) & ((1 << LOW_BITS) - 1)) << (16 - LOW_BITS)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scales_of(values, ROUNDED: tl.constexpr):
    """Return scales and factors `[G]` of groups of channels, `[G, C]`."""
    amax = tl.maximum(tl.max(tl.abs(values), axis=1), MIN_AMAX)
    scale = amax * INVERSE_MAX_FP8
    if ROUNDED:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        return scale, ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 (only one branch is compiled)
        return scale, tl.div_rn(amax * 0.0 + MAX_FP8, amax)


@triton.jit
def to_fp8_bits(values, NATIVE: tl.constexpr):
    """Return the e4m3 bytes of float32 values, saturating; `NATIVE` where the GPU has an instruction for that."""
    if NATIVE:
        return values.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Adding 2**14 leaves a multiple of 2**-9, the step of numbers below 2**-6, in the last bits.
    small = (tl.abs(values) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(magnitude < (121 << 23), small, tl.minimum(normal, 0x7E))
    code = tl.where(values == values, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)
