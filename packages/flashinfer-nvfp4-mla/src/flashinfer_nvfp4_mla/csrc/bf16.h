// SPDX-License-Identifier: Apache-2.0
// The paths that multiply pairs of bfloat16 and add up in fp32: AVX512-BF16 and AMX, which differ in the two products.
//
// 64 keys at a time are unpacked once for all heads: e2m1 times e4m3 is exact in bfloat16. The first product wants
// pairs of a key's values, the second pairs of keys, hence two copies. bfloat16 weights alone would cost 2e-3 of
// accuracy; they go in as two, upper part and rest. float16 queries are split the same way.
#pragma once
#include "common.h"
#include "unpack_avx2.h"

namespace nvfp4_mla {
namespace {

constexpr int kTile = 64;
constexpr int kStep = 32;  // keys of one AMX product: a tile is filled up to a multiple with rows of zeros
constexpr int kBf16Heads = 128, kGroups = kBf16Heads / kGroup;
// Strides that are an odd number of cache lines: columns do not fall on the same sets.
constexpr int kKeyStride = kDim + 32, kPairStride = kLatent + 16;

struct Bf16Scratch {
  alignas(64) uint32_t query[2][kGroups][kDim / 2][kGroup];  // [upper part, rest]; a pair of values
  uint16_t keys[kTile][kKeyStride];
  uint32_t pairs[kTile / 2][kPairStride];  // two keys' values of one number
  float scores[kGroups][kTile][kGroup];
  // [step][upper part, rest]; AVX512: [pair of keys][head], AMX: [head][pair of keys]
  uint32_t weights[kGroups][kTile / kStep][2][kGroup][kGroup];
};

// Chunks of 64 latent values: 32 even ones, then 32 odd ones; of the positional values 16 and 16 take turns.
constexpr int key_dim(int i) {
  return i < kLatent ? i / 64 * 64 + i % 32 * 2 + i / 32 % 2 : i / 32 * 32 + i % 2 * 16 + i % 32 / 2;
}

struct PairOrder {  // what interleaving two keys, 128 bits at a time, makes of that
  static constexpr int dim(int i) { return key_dim(i / 32 * 32 + i % 16 / 4 * 8 + i / 16 % 2 * 4 + i % 4); }
};

NVFP4_INLINE __m512i times(__m512i words, __m512 scale) {  // exact: the lower halves of the products are zero
  const __m512i high = _mm512_set1_epi32(-65536);
  __m512 even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)), scale);
  __m512 odd = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(words, high)), scale);
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
}

NVFP4_INLINE __m512 codes(const uint8_t* bytes) {  // times 2^-8
  return _mm512_cvtph_ps(halves_of(_mm_loadu_si128((const __m128i*)bytes)));
}

NVFP4_INLINE __m512i rope(const uint8_t* bytes) {
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(codes(bytes)), 16),
                         _mm512_and_si512(_mm512_castps_si512(codes(bytes + 16)), _mm512_set1_epi32(-65536)));
}

// The bfloat16 of each e2m1 code, twice.
alignas(64) constexpr uint16_t kValues[32] = {
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
    0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
    0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

// Lane i belongs to group i / 4 of a chunk; chunk j's groups have their scales at m * 8 + j.
alignas(64) constexpr int32_t kScales[16] = {0, 0, 0, 0, 8, 8, 8, 8, 16, 16, 16, 16, 24, 24, 24, 24};

NVFP4_INLINE void unpack_pair(const uint8_t* const* bytes, uint16_t (*keys)[kKeyStride], uint32_t* pairs) {
  const __m512i values = _mm512_load_si512(kValues), nibble = _mm512_set1_epi16(15), one = _mm512_set1_epi32(1);
  __m512i which = _mm512_load_si512(kScales);
  __m512 scale[2][2];
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < 2; ++i) scale[r][i] = codes(bytes[r] + 320 + 16 * i);
    for (int i = 0; i < 2; ++i) _mm512_storeu_si512(keys[r] + kLatent + 32 * i, rope(bytes[r] + 256 + 32 * i));
  }
  for (int chunk = 0; chunk < 8; ++chunk) {
    __m512i even[2], odd[2];
    for (int r = 0; r < 2; ++r) {
      __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(bytes[r] + 32 * chunk)));
      __m512 s = _mm512_permutex2var_ps(scale[r][0], which, scale[r][1]);
      even[r] = times(_mm512_permutexvar_epi16(_mm512_and_si512(words, nibble), values), s);
      odd[r] = times(_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), values), s);
      _mm512_storeu_si512(keys[r] + 64 * chunk, even[r]);
      _mm512_storeu_si512(keys[r] + 64 * chunk + 32, odd[r]);
    }
    _mm512_storeu_si512(pairs + 64 * chunk, _mm512_unpacklo_epi16(even[0], even[1]));
    _mm512_storeu_si512(pairs + 64 * chunk + 16, _mm512_unpackhi_epi16(even[0], even[1]));
    _mm512_storeu_si512(pairs + 64 * chunk + 32, _mm512_unpacklo_epi16(odd[0], odd[1]));
    _mm512_storeu_si512(pairs + 64 * chunk + 48, _mm512_unpackhi_epi16(odd[0], odd[1]));
    which = _mm512_add_epi32(which, one);
  }
}

// Two keys' weights of 16 heads as pairs: rounded to bfloat16, and what that left.
NVFP4_INLINE void split_weights(const float* scores, uint32_t* upper, uint32_t* rest) {
  typedef uint32_t Words __attribute__((vector_size(4 * kGroup), aligned(4), may_alias));  // NaN may overflow
  Words out[2] = {};
  for (int i = 0; i < 2; ++i) {
    Floats w = *(const Floats*)(scores + i * kGroup);
    Words high = ((Words)w + 0x8000) & 0xffff0000;
    Words low = ((Words)(w - (Floats)high) + 0x8000) & 0xffff0000;
    out[0] |= i ? high : high >> 16;
    out[1] |= i ? low : low >> 16;
  }
  *(Words*)upper = out[0];
  *(Words*)rest = out[1];
}

void pack_query(const Problem& p, const Part& part, Bf16Scratch& s, int parts) {
  for (int h = 0; h < part.heads; ++h) {
    float query[kDim];
    load_query(p, part.token, part.head + h, query);
    uint16_t* to[2];
    for (int i = 0; i < 2; ++i) to[i] = (uint16_t*)&s.query[i][h / kGroup][0][h % kGroup];
    for (int d = 0; d < kDim; ++d) {
      float value = query[key_dim(d)];
      uint16_t upper = to_bfloat16(value);
      int at = d / 2 * (2 * kGroup) + d % 2;
      to[0][at] = upper;
      if (parts > 1) to[1][at] = to_bfloat16(value - from_bfloat16(upper));
    }
  }
}

// What a Product has to offer. begin and end: around the work on one part. scores: [keys][16] of one group of heads.
// arrange: what it wants done with one step's split weights. outputs: of one group. `keys` is a multiple of kStep.
template <class Product>
void attend(const Problem& p, const Part& part, char* memory, Partial partial) {
  static const uint8_t zeros[kRowBytes] = {};
  Bf16Scratch& s = *reinterpret_cast<Bf16Scratch*>(memory);
  Rows list(p, part);
  const uint8_t* rows[2][kTile];
  int count = list.next(rows[0], kTile);
  for (int k = 0; k < count; ++k) prefetch(rows[0][k]);
  int parts = p.query_type == kFloat16 ? 2 : 1;
  if (count) pack_query(p, part, s, parts);
  // Lanes of heads that are not there hold an earlier part's query: their results are never read.
  for (int h = 0; h < round_up(part.heads, kGroup); ++h) partial.top[h] = kSentinel, partial.sum[h] = 0;
  float scale = score_scale(p);
  bool first = true;
  Product::begin();
  for (int turn = 0; count; turn ^= 1) {
    int following = list.next(rows[turn ^ 1], kTile), asked = 0;
    // The next tile's rows are asked for all along this one: a burst of requests would wait for itself.
    auto ask = [&](int more) {
      for (; asked < following && more; ++asked, --more) prefetch(rows[turn ^ 1][asked]);
    };
    int filled = round_up(count, kStep), share = kTile / 2 * kGroup / round_up(part.heads, kGroup) / 2;
    for (int k = count; k < filled; ++k) rows[turn][k] = zeros;
    for (int k = 0; k < filled; k += 2) {
      unpack_pair(rows[turn] + k, s.keys + k, s.pairs[k / 2]);
      ask(1);
    }
    for (int h = 0; h < part.heads; h += kGroup) {
      int g = h / kGroup;
      Product::scores(s, g, filled, parts);
      ask(share);
      float* scores = s.scores[g][0];
      float factor[kGroup];
      unsigned changed = weigh(scores, count, kGroup, scale, partial.top + h, partial.sum + h, factor);
      if (part.heads - h < kGroup) changed &= (1u << (part.heads - h)) - 1;
      if (changed && !first) rescale(partial.out + h * kLatent, changed, factor);
      memset(scores + count * kGroup, 0, sizeof(float) * size_t(filled - count) * kGroup);
      for (int k = 0; k < filled; k += 2) {
        uint32_t(*w)[kGroup][kGroup] = s.weights[g][k / kStep];
        split_weights(scores + k * kGroup, w[0][k % kStep / 2], w[1][k % kStep / 2]);
      }
      for (int k = 0; k < filled; k += kStep) Product::arrange(s.weights[g][k / kStep]);
      int left = part.heads - h;
      Product::outputs(s, g, filled, left < kGroup ? left : kGroup, first, partial.out + h * kLatent);
      ask(share);
    }
    ask(kTile);
    first = false;
    count = following;
  }
  Product::end();
}

template <class Product>
constexpr Path bf16_path() {
  return {kBf16Heads, sizeof(Bf16Scratch), attend<Product>, finish<PairOrder>};
}

}  // namespace
}  // namespace nvfp4_mla
