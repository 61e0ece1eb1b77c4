// The arithmetic of one block of cells, the same bits on a host and on a GPU.
//
// Everything here is IEEE float32 with each rounding spelled out: no contraction, no
// fast math, no library exp. Compile host code with -ffp-contract=off and hardware FMA
// (without it fmaf is a slow library call of the same bits); denormals are kept.
//
// How attention adds up, for one query row and one kv head:
//   score    of a cell: kLanes sums, lane e over elements 8j+e in order of j by FMA,
//   then
//            a tree over the lanes (LaneSum)
//   block    kBlock cells by cell index: the largest score m; weights 2^(score - m);
//            their sum by a tree (TreeSum); values by kChains chains, chain w over
//            cells c = w mod kChains in order by FMA, then a tree over the chains
//            (ChainSum)
//   group    kGroup blocks folded in index order (FoldScale); total: groups likewise
// A masked cell has weight 0 and value 0; a wholly masked block is left out.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define KVJAX_HD __host__ __device__ __forceinline__
#else
#define KVJAX_HD inline __attribute__((always_inline))
#endif

namespace kvjax {

constexpr int kBlock = 128;
constexpr int kGroup = 8;
constexpr int kLanes = 8;
constexpr int kChains = 4;
constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kEmpty = -INFINITY;  // the largest score of nothing

#if defined(__CUDA_ARCH__)
KVJAX_HD float Fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
KVJAX_HD float Mul(float a, float b) { return __fmul_rn(a, b); }
KVJAX_HD float Add(float a, float b) { return __fadd_rn(a, b); }
KVJAX_HD float Div(float a, float b) { return __fdiv_rn(a, b); }
KVJAX_HD uint32_t Bits(float x) { return __float_as_uint(x); }
KVJAX_HD float FromBits(uint32_t x) { return __uint_as_float(x); }
#else
KVJAX_HD float Fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
KVJAX_HD float Mul(float a, float b) { return a * b; }
KVJAX_HD float Add(float a, float b) { return a + b; }
KVJAX_HD float Div(float a, float b) { return a / b; }
KVJAX_HD uint32_t Bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
KVJAX_HD float FromBits(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}
#endif

KVJAX_HD float Max(float a, float b) { return a > b ? a : b; }

KVJAX_HD float FromBf16(uint16_t x) { return FromBits(uint32_t(x) << 16); }

// Rounds to nearest even, as XLA does; NaN stays a (quiet) NaN.
KVJAX_HD uint16_t ToBf16(float x) {
  const uint32_t u = Bits(x);
  if (x != x) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// 2^x for x <= 0, within 0.7 ulp; 0 below -126, NaN for NaN. A minimax polynomial of
// degree 6 on [-1/2, 1/2] (Remez by weighted least squares), exact at 0.
KVJAX_HD float Exp2(float x) {
  const float y = x < -126.0f ? -126.0f : x;
  const float shifted = Add(y, 12582912.0f);  // 1.5 * 2^23: rounds y to an integer
  const float f = Add(y, -Add(shifted, -12582912.0f));
  float p = 0x1.41fbbcp-13f;
  p = Fma(p, f, 0x1.5f3e54p-10f);
  p = Fma(p, f, 0x1.3b2d4cp-7f);
  p = Fma(p, f, 0x1.c6aee8p-5f);
  p = Fma(p, f, 0x1.ebfbdcp-3f);
  p = Fma(p, f, 0x1.62e430p-1f);
  p = Fma(p, f, 1.0f);
  const uint32_t exponent = (Bits(shifted) - 0x4b400000u) << 23;
  const float result = FromBits(Bits(p) + exponent);
  return x < -126.0f ? 0.0f : (x == x ? result : x);
}

// tanh by Exp2: (1 - 2^-2ax) / (1 + 2^-2ax), a = log2(e).
KVJAX_HD float Tanh(float x) {
  const float size = x < 0.0f ? -x : x;
  const float t = Exp2(Mul(size, -2.0f * kLog2e));
  const float r = Div(Add(1.0f, -t), Add(1.0f, t));
  return x < 0.0f ? -r : r;
}

// What a query is multiplied by before its dot products, and what becomes of those: the
// scores are in units of log2, so that weights are powers of 2.
KVJAX_HD float QueryScale(float scale, float soft_cap) {
  return soft_cap > 0.0f ? scale : Mul(scale, kLog2e);
}
KVJAX_HD float Score(float dot, float soft_cap) {
  if (!(soft_cap > 0.0f)) return dot;
  return Mul(Mul(soft_cap, Tanh(Div(dot, soft_cap))), kLog2e);
}

KVJAX_HD float LaneSum(const float (&a)[kLanes]) {
  const float b0 = Add(a[0], a[4]), b1 = Add(a[1], a[5]);
  const float b2 = Add(a[2], a[6]), b3 = Add(a[3], a[7]);
  return Add(Add(b0, b2), Add(b1, b3));
}

KVJAX_HD float ChainSum(float a0, float a1, float a2, float a3) {
  return Add(Add(a0, a1), Add(a2, a3));
}

// Folding (m, sum, values) of a block or group into a state (M, ...): the new largest
// score and what each side is scaled by. The caller leaves out an empty side (kEmpty).
struct FoldScale {
  float largest, state, item;
};
KVJAX_HD FoldScale Folding(float state_m, float item_m) {
  const float m = Max(state_m, item_m);
  return {m, Exp2(Add(state_m, -m)), Exp2(Add(item_m, -m))};
}
KVJAX_HD float Folded(float state, float item, FoldScale s) {
  return Fma(item, s.item, Mul(state, s.state));
}

}  // namespace kvjax
