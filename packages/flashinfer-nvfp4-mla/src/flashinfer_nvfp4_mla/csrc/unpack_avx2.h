// SPDX-License-Identifier: Apache-2.0
// What the x86 paths share of unpacking a row.
#pragma once

namespace nvfp4_mla {
namespace {

// 16 e4m3fn codes as fp16, times 2^-8 (exact, subnormals too); NaN stays NaN.
inline __attribute__((always_inline)) __m256i halves_of(__m128i codes) {
  __m128i nan = _mm_cmpeq_epi8(_mm_and_si128(codes, _mm_set1_epi8(0x7f)), _mm_set1_epi8(0x7f));
  __m256i words = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16(-16385));
  return _mm256_or_si256(words, _mm256_and_si256(_mm256_cvtepi8_epi16(nan), _mm256_set1_epi16(0x7fff)));
}

}  // namespace
}  // namespace nvfp4_mla
