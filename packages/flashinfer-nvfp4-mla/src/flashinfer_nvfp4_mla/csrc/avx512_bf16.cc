// SPDX-License-Identifier: Apache-2.0
// AVX512F, DQ, BW, VL and BF16.
#include "decode.h"
#if defined(__x86_64__) && (__GNUC__ >= 10 || defined(__clang__))
#ifdef NVFP4_MLA_EMULATE
#pragma GCC target("avx2,fma,f16c")
#elif defined(__clang__)
#pragma clang attribute \
    push(__attribute__((target("avx2,fma,f16c,avx512f,avx512dq,avx512bw,avx512vl,avx512bf16"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512dq,avx512bw,avx512vl,avx512bf16")
#endif
#include "intrinsics.h"
#define NVFP4_LANES 16
#include "bf16.h"

namespace nvfp4_mla {
namespace {

struct Avx512 {
  static void begin() {}
  static void end() {}
  static void arrange(uint32_t (*)[kGroup][kGroup]) {}

  NVFP4_INLINE static __m512bh pair(const void* from) {
    int32_t bits;
    memcpy(&bits, from, 4);
    return (__m512bh)_mm512_set1_epi32(bits);
  }

  static void scores(Bf16Scratch& s, int group, int keys, int parts) {
    constexpr int kKeys = 16;
    for (int k0 = 0; k0 < keys; k0 += kKeys) {
      __m512 sum[kKeys];
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) sum[k] = _mm512_setzero_ps();
      for (int part = 0; part < parts; ++part) {
        const uint16_t* row = s.keys[k0];
        for (int d = 0; d < kDim / 2; ++d, row += 2) {
          __m512bh q = (__m512bh)_mm512_load_si512(s.query[part][group][d]);
#pragma GCC unroll 16
          for (int k = 0; k < kKeys; ++k) sum[k] = _mm512_dpbf16_ps(sum[k], q, pair(row + k * kKeyStride));
        }
      }
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) _mm512_storeu_ps(s.scores[group][k0 + k], sum[k]);
    }
  }

  template <int Heads>
  NVFP4_INLINE static void block(Bf16Scratch& s, int group, int head, int keys, int d, bool first, float* out) {
    __m512 sum[Heads][4];
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        sum[h][v] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(out + h * kLatent + v * 16);
      }
    }
    for (int k0 = 0; k0 < keys; k0 += kStep) {
      const uint32_t* w = s.weights[group][k0 / kStep][0][0] + head;
      const uint32_t* row = s.pairs[k0 / 2] + d;
      for (int k = 0; k < kStep / 2; ++k, w += kGroup, row += kPairStride) {
        __m512bh x[4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) x[v] = (__m512bh)_mm512_load_si512(row + v * 16);
#pragma GCC unroll 4
        for (int h = 0; h < Heads; ++h) {
          __m512bh upper = pair(w + h), rest = pair(w + kGroup * kGroup + h);
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v) sum[h][v] = _mm512_dpbf16_ps(sum[h][v], upper, x[v]);
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v) sum[h][v] = _mm512_dpbf16_ps(sum[h][v], rest, x[v]);
        }
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) _mm512_storeu_ps(out + h * kLatent + v * 16, sum[h][v]);
    }
  }

  static void outputs(Bf16Scratch& s, int group, int keys, int heads, bool first, float* out) {
    for (int d = 0; d < kLatent; d += 64) {
      int h = 0;
      for (; h + 4 <= heads; h += 4) block<4>(s, group, h, keys, d, first, out + h * kLatent + d);
      for (; h < heads; ++h) block<1>(s, group, h, keys, d, first, out + h * kLatent + d);
    }
  }
};

const Path kPath = bf16_path<Avx512>();

}  // namespace
const Path* const kAvx512Bf16 = &kPath;
}  // namespace nvfp4_mla
#ifdef __clang__
#pragma clang attribute pop
#endif
#else
const nvfp4_mla::Path* const nvfp4_mla::kAvx512Bf16 = nullptr;
#endif
