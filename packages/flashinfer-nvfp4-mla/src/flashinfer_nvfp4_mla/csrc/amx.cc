// SPDX-License-Identifier: Apache-2.0
// AMX-BF16, with AVX512F, DQ, BW and VL around it.
#include "decode.h"
#if defined(__x86_64__) && (__GNUC__ >= 11 || defined(__clang__))
#ifdef NVFP4_MLA_EMULATE
#pragma GCC target("avx2,fma,f16c")
#elif defined(__clang__)
#pragma clang attribute \
    push(__attribute__((target("avx2,fma,f16c,avx512f,avx512dq,avx512bw,avx512vl,amx-tile,amx-bf16"))), \
         apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512dq,avx512bw,avx512vl,amx-tile,amx-bf16")
#endif
#include "intrinsics.h"
#define NVFP4_LANES 16
#include "bf16.h"

namespace nvfp4_mla {
namespace {

// GCC's tile loads do not say that they read memory: what was stored before has to be in place.
#define NVFP4_STORED() __asm__ volatile("" ::: "memory")

struct Amx {
  static void begin() {
    struct {
      uint8_t palette, start_row, reserved[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } shape = {};
    static_assert(sizeof shape == 64, "the layout that LDTILECFG reads");
    shape.palette = 1;
    for (int i = 0; i < 8; ++i) shape.bytes[i] = 64, shape.rows[i] = 16;
    __asm__ volatile("" : "+m"(shape));  // GCC's says that it reads the first 8 bytes: other stores would be left out
    _tile_loadconfig(&shape);
  }

  static void end() { _tile_release(); }

  // [pair of keys][head] becomes [head][pair of keys].
  static void arrange(uint32_t (*weights)[kGroup][kGroup]) {
    for (int part = 0; part < 2; ++part) {
      uint32_t(*w)[kGroup] = weights[part];
      __m512i a[16], b[16];
      for (int i = 0; i < 16; ++i) a[i] = _mm512_load_si512(w[i]);
      for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
      }
      for (int i = 0; i < 16; i += 4) {  // a[i + j]: column j of each 4 x 4 block of rows i to i + 3
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
      }
      for (int j = 0; j < 4; ++j) {
        __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), high = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        __m512i low2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        __m512i high2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        b[j] = _mm512_shuffle_i32x4(low, low2, 0x88);
        b[8 + j] = _mm512_shuffle_i32x4(low, low2, 0xdd);
        b[4 + j] = _mm512_shuffle_i32x4(high, high2, 0x88);
        b[12 + j] = _mm512_shuffle_i32x4(high, high2, 0xdd);
      }
      for (int i = 0; i < 16; ++i) _mm512_store_si512(w[i], b[i]);
    }
  }

  static __attribute__((noinline)) void scores(Bf16Scratch& s, int group, int keys, int parts) {
    NVFP4_STORED();
    for (int k = 0; k < keys; k += 32) {
      _tile_zero(0);
      _tile_zero(1);
      for (int part = 0; part < parts; ++part) {
        for (int d = 0; d < kDim; d += 32) {
          _tile_loadd(4, s.query[part][group][d / 2], 64);
          _tile_loadd(2, s.keys[k] + d, sizeof s.keys[0]);
          _tile_dpbf16ps(0, 2, 4);
          _tile_loadd(3, s.keys[k + 16] + d, sizeof s.keys[0]);
          _tile_dpbf16ps(1, 3, 4);
        }
      }
      _tile_stored(0, s.scores[group][k], 64);
      _tile_stored(1, s.scores[group][k + 16], 64);
    }
    NVFP4_STORED();
  }

  // Of all 16 heads: `out` has room for a whole group.
  static __attribute__((noinline)) void outputs(Bf16Scratch& s, int group, int keys, int, bool first, float* out) {
    NVFP4_STORED();
    for (int d = 0; d < kLatent; d += 32) {
      if (first) {
        _tile_zero(0);
        _tile_zero(1);
      } else {
        _tile_loadd(0, out + d, kLatent * 4);
        _tile_loadd(1, out + d + 16, kLatent * 4);
      }
      for (int k = 0; k < keys; k += kStep) {
        _tile_loadd(2, s.pairs[k / 2] + d, sizeof s.pairs[0]);
        _tile_loadd(3, s.pairs[k / 2] + d + 16, sizeof s.pairs[0]);
        _tile_loadd(4, s.weights[group][k / kStep][0], 64);
        _tile_loadd(5, s.weights[group][k / kStep][1], 64);
        _tile_dpbf16ps(0, 4, 2);
        _tile_dpbf16ps(1, 4, 3);
        _tile_dpbf16ps(0, 5, 2);
        _tile_dpbf16ps(1, 5, 3);
      }
      _tile_stored(0, out + d, kLatent * 4);
      _tile_stored(1, out + d + 16, kLatent * 4);
    }
    NVFP4_STORED();
  }
};

const Path kPath = bf16_path<Amx>();

}  // namespace
const Path* const kAmx = &kPath;
}  // namespace nvfp4_mla
#ifdef __clang__
#pragma clang attribute pop
#endif
#else
const nvfp4_mla::Path* const nvfp4_mla::kAmx = nullptr;
#endif
