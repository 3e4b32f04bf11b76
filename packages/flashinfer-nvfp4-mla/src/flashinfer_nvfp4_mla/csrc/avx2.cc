// SPDX-License-Identifier: Apache-2.0
// AVX2, FMA and F16C.
#ifdef __x86_64__
#ifdef __clang__
#pragma clang attribute \
    push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>

#define NVFP4_LANES 8
#include "fp32.h"
#include "unpack_avx2.h"

namespace nvfp4_mla {
namespace {

struct Avx2 {
  // A chunk of 64 latent values comes out as eight vectors: even values of groups 0 and 2 (low and high half), odd
  // values of these, then the same of groups 1 and 3; a vector holds every second of its kind.
  static constexpr int dim(int i) {
    if (i >= kLatent) return i;
    int vector = i / 8 % 8, half = i / 4 % 2, at = i % 4;
    return i / 64 * 64 + half * 32 + vector / 4 * 16 + at * 4 + vector % 2 * 2 + vector / 2 % 2;
  }

  NVFP4_INLINE static void row(const uint8_t* bytes, float* values) {
    // The upper and the lower byte of each e2m1 value as a bfloat16.
    const __m256i upper = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -128, -65, -65, -65, -64, -64, -64, -64));
    const __m256i lower = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64));
    const __m256i nibble = _mm256_set1_epi8(15), high = _mm256_set1_epi32(-65536);
    __m256 scale[4];  // scale[m], lane j: group 4 * j + m
    for (int i = 0; i < 2; ++i) {
      __m256i halves = halves_of(_mm_loadu_si128((const __m128i*)(bytes + 320 + 16 * i)));
      scale[2 * i] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
      scale[2 * i + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    }
    for (int half = 0; half < 2; ++half) {
      __m256 first = half ? _mm256_permute2f128_ps(scale[0], scale[2], 0x31)
                          : _mm256_permute2f128_ps(scale[0], scale[2], 0x20);
      __m256 second = half ? _mm256_permute2f128_ps(scale[1], scale[3], 0x31)
                           : _mm256_permute2f128_ps(scale[1], scale[3], 0x20);
#define NVFP4_CHUNK(j)                                                                                      \
  {                                                                                                         \
    __m256i packed = _mm256_loadu_si256((const __m256i*)(bytes + (half * 4 + j) * 32));                     \
    __m256i even = _mm256_and_si256(packed, nibble), odd = _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble); \
    __m256i eu = _mm256_shuffle_epi8(upper, even), el = _mm256_shuffle_epi8(lower, even);                   \
    __m256i ou = _mm256_shuffle_epi8(upper, odd), ol = _mm256_shuffle_epi8(lower, odd);                     \
    __m256 s = _mm256_permute_ps(first, j * 0x55);                                                          \
    float* to = values + (half * 4 + j) * 64;                                                               \
    store(to, _mm256_unpacklo_epi8(el, eu), s, high);                                                       \
    store(to + 16, _mm256_unpacklo_epi8(ol, ou), s, high);                                                  \
    s = _mm256_permute_ps(second, j * 0x55);                                                                \
    store(to + 32, _mm256_unpackhi_epi8(el, eu), s, high);                                                  \
    store(to + 48, _mm256_unpackhi_epi8(ol, ou), s, high);                                                  \
  }
      NVFP4_CHUNK(0)
      NVFP4_CHUNK(1)
      NVFP4_CHUNK(2)
      NVFP4_CHUNK(3)
#undef NVFP4_CHUNK
    }
    for (int i = 0; i < 4; ++i) {
      __m256i halves = halves_of(_mm_loadu_si128((const __m128i*)(bytes + 256 + 16 * i)));
      _mm256_storeu_ps(values + kLatent + 16 * i, _mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
      _mm256_storeu_ps(values + kLatent + 16 * i + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
    }
  }

 private:
  NVFP4_INLINE static void store(float* to, __m256i words, __m256 scale, __m256i high) {
    _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)), scale));
    _mm256_storeu_ps(to + 8, _mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(words, high)), scale));
  }
};

const Path kPath = fp32_path<Avx2>();

}  // namespace
const Path* const kAvx2 = &kPath;
}  // namespace nvfp4_mla
#ifdef __clang__
#pragma clang attribute pop
#endif
#else
#include "decode.h"
const nvfp4_mla::Path* const nvfp4_mla::kAvx2 = nullptr;
#endif
