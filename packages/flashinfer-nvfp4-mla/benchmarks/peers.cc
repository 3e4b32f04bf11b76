// SPDX-License-Identifier: Apache-2.0
// What the bench compares with: the rows touched and nothing else, and the rows unpacked to bfloat16. x86 with AVX2.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

namespace {

constexpr int kRow = 352, kLatent = 512, kRope = 64, kGroups = 32;

float e4m3(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float value = exponent ? __builtin_ldexpf(8.0f + mantissa, exponent - 10) : __builtin_ldexpf(mantissa, -9);
  return code & 128 ? -value : value;
}

struct Table {
  float values[256];
  Table() {
    for (int code = 0; code < 256; ++code) values[code] = e4m3(code);
  }
};
const Table kE4m3;

void Prefetch(const uint8_t* row) {
  for (int at = 0; at < kRow; at += 64) _mm_prefetch(reinterpret_cast<const char*>(row + at), _MM_HINT_T0);
}

// Loads each 32 bytes of each row. Returns what depends on all of them, so that nothing is left out.
int64_t Touch(tvm::ffi::TensorView cache, tvm::ffi::TensorView ids) {
  const auto* rows = static_cast<const uint8_t*>(cache.data_ptr());
  const auto* id = static_cast<const int32_t*>(ids.data_ptr());
  const int64_t count = ids.numel();
  __m256i sum = _mm256_setzero_si256();
  for (int64_t i = 0; i < count; ++i) {
    if (i + 16 < count) Prefetch(rows + static_cast<int64_t>(id[i + 16]) * kRow);
    const uint8_t* row = rows + static_cast<int64_t>(id[i]) * kRow;
    for (int at = 0; at < kRow; at += 32) {
      sum = _mm256_xor_si256(sum, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + at)));
    }
  }
  int64_t found[4];
  std::memcpy(found, &sum, sizeof found);
  return found[0] ^ found[1] ^ found[2] ^ found[3];
}

__m128i ToBf16(__m256 low, __m256 high, __m128i* second) {
  const __m256i packed = _mm256_permute4x64_epi64(
      _mm256_packus_epi32(_mm256_srli_epi32(_mm256_castps_si256(low), 16),
                          _mm256_srli_epi32(_mm256_castps_si256(high), 16)),
      0xD8);
  *second = _mm256_extracti128_si256(packed, 1);
  return _mm256_castsi256_si128(packed);
}

__m256 Latents(__m128i nibbles, __m256 scale) {
  const __m256 lut = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256i code = _mm256_cvtepu8_epi32(nibbles);
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(8)), 28);
  const __m256 value = _mm256_permutevar8x32_ps(lut, code);  // looks at three bits
  return _mm256_mul_ps(_mm256_xor_ps(value, _mm256_castsi256_ps(sign)), scale);
}

// Writes each row as 576 bfloat16 values, which is exact.
void Unpack(tvm::ffi::TensorView cache, tvm::ffi::TensorView ids, tvm::ffi::TensorView out) {
  const auto* rows = static_cast<const uint8_t*>(cache.data_ptr());
  const auto* id = static_cast<const int32_t*>(ids.data_ptr());
  auto* to = static_cast<uint16_t*>(out.data_ptr());
  const int64_t count = ids.numel();
  for (int64_t i = 0; i < count; ++i, to += kLatent + kRope) {
    if (i + 16 < count) Prefetch(rows + static_cast<int64_t>(id[i + 16]) * kRow);
    const uint8_t* row = rows + static_cast<int64_t>(id[i]) * kRow;
    for (int group = 0; group < kGroups; ++group) {
      const __m256 scale = _mm256_set1_ps(kE4m3.values[row[320 + 8 * (group & 3) + (group >> 2)]]);
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + 8 * group));
      const __m128i mask = _mm_set1_epi8(15);
      const __m128i nibbles =
          _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
      __m128i second;
      const __m128i first =
          ToBf16(Latents(nibbles, scale), Latents(_mm_srli_si128(nibbles, 8), scale), &second);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * group), first);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * group + 8), second);
    }
    for (int at = 0; at < kRope; ++at) {
      uint32_t bits;
      std::memcpy(&bits, &kE4m3.values[row[256 + at]], sizeof bits);
      to[kLatent + at] = static_cast<uint16_t>(bits >> 16);
    }
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(touch, Touch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unpack, Unpack);
