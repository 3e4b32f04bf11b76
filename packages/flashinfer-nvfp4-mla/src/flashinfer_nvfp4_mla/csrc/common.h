// SPDX-License-Identifier: Apache-2.0
// What every path shares. Included after the file has chosen its instruction set, hence all of it is `static`: no two
// files may share a compiled function.
#pragma once
#include <string.h>

#include "decode.h"

namespace nvfp4_mla {
namespace {

#define NVFP4_INLINE inline __attribute__((always_inline))

constexpr int kLanes = NVFP4_LANES;  // of the vectors below, chosen by the file of the path: 4, 8 or 16
typedef float Floats __attribute__((vector_size(4 * NVFP4_LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * NVFP4_LANES), aligned(4), may_alias));

constexpr int kGroup = 16;  // heads whose scores lie side by side
constexpr float kSentinel = -1e30f;  // "no key yet": finite, so that differences are never NaN
constexpr float kLazy = 8;  // weights may reach 2^8 before the sums are rescaled

constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

NVFP4_INLINE float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

NVFP4_INLINE uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

NVFP4_INLINE float from_bfloat16(uint16_t bits) { return as_float(uint32_t(bits) << 16); }

NVFP4_INLINE uint16_t to_bfloat16(float value) {
  uint32_t bits = as_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Integer arithmetic alone: the same whether the thread flushes denormals or not.
NVFP4_INLINE float from_float16(uint16_t bits) {
  uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return as_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x400) {
    float value = float(int(magnitude)) * 0x1p-24f;
    return sign ? -value : value;
  }
  return as_float(sign | ((magnitude << 13) + (112u << 23)));
}

NVFP4_INLINE uint16_t to_float16(float value) {
  uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and up
  if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 rounds to a multiple of 2^-24
    return uint16_t(sign | (as_bits(as_float(magnitude) + 0.5f) - 0x3f000000));
  }
  return uint16_t(sign | (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13);
}

constexpr float float8(int bits) {
  if ((bits & 0x7f) == 0x7f) return __builtin_nanf("");
  int exponent = bits >> 3 & 15;
  float value = (exponent ? 8 + (bits & 7) : bits & 7) * 0x1p-9f;
  for (int i = 1; i < exponent; ++i) value *= 2;
  return bits & 0x80 ? -value : value;
}

struct Float8Table {
  float value[256];
  constexpr Float8Table() : value() {
    for (int i = 0; i < 256; ++i) value[i] = float8(i);
  }
};
constexpr Float8Table kFloat8Table;

NVFP4_INLINE void load_query(const Problem& p, int64_t token, int head, float* to) {
  int64_t offset = token * p.query_token + head * p.query_head;
  if (p.query_type == kBfloat16) {
    const uint16_t* from = static_cast<const uint16_t*>(p.query) + offset;
    for (int d = 0; d < kDim; ++d) to[d] = from_bfloat16(from[d]);
  } else if (p.query_type == kFloat16) {
    const uint16_t* from = static_cast<const uint16_t*>(p.query) + offset;
    for (int d = 0; d < kDim; ++d) to[d] = from_float16(from[d]);
  } else {
    const uint8_t* from = static_cast<const uint8_t*>(p.query) + offset;
    for (int d = 0; d < kDim; ++d) to[d] = kFloat8Table.value[from[d]];
  }
}

// The rows of a part, some at a time: empty slots never come out, and ids become addresses once.
class Rows {
 public:
  Rows(const Problem& p, const Part& part)
      : p_(p), list_(p.indices + part.token * p.index_token), at_(part.begin), end_(part.end) {
    // n / block_size == n * reciprocal >> 64 for every n < 2^32; a block of one row needs no division.
    blocks_ = p.block_size > 1;
    reciprocal_ = blocks_ ? UINT64_MAX / uint64_t(p.block_size) + 1 : 0;
    step_ = blocks_ ? p.row_stride : p.block_stride;
    jump_ = p.block_stride - p.block_size * p.row_stride;
  }

  int next(const uint8_t** rows, int most) {
    int count = 0;
    for (; at_ < end_ && count < most; ++at_) {
      uint64_t id = uint64_t(int64_t(list_[at_]));
      if (id >= uint64_t(p_.rows)) continue;
      int64_t offset = int64_t(id) * step_;
      if (blocks_) offset += int64_t(static_cast<unsigned __int128>(id) * reciprocal_ >> 64) * jump_;
      rows[count++] = p_.cache + offset;
    }
    return count;
  }

 private:
  const Problem& p_;
  const int32_t* list_;
  int64_t at_, end_;
  bool blocks_;
  uint64_t reciprocal_;
  int64_t step_, jump_;
};

NVFP4_INLINE void prefetch(const uint8_t* row) {
  for (int i = 0; i < kRowBytes; i += 64) __builtin_prefetch(row + i);
}

// 2^x; relative error below 3e-7 for -126 <= x <= 127, 2^-126 or so below; NaN stays NaN.
NVFP4_INLINE Floats exp2(Floats x) {
  x = x < -126.f ? Floats{} - 126.f : x;
  Floats shifted = x + 12582912.f;  // 1.5 * 2^23: the nearest integer is now in the low bits
  Floats f = x - (shifted - 12582912.f);
  // Minimax polynomial of 2^f on [-0.5, 0.5], the constant term being 1.
  Floats y = f * 1.53533e-4f + 1.33989e-3f;
  y = y * f + 9.6184373e-3f;
  y = y * f + 5.5503324e-2f;
  y = y * f + 2.4022648e-1f;
  y = y * f + 6.9314718e-1f;
  y = y * f + 1.f;
  return (Floats)((Ints)y + ((Ints)shifted << 23));
}

// One group of heads: scores [keys][16] become weights in place, for the first `width` heads (a multiple of kLanes).
// Returns the heads (bits) whose sums so far have to be multiplied by `factor`.
NVFP4_INLINE unsigned weigh(float* scores, int keys, int width, float scale, float* top, float* sum, float* factor) {
  unsigned changed = 0;
  for (int v = 0; v < width; v += kLanes) {
    Floats most = Floats{} + kSentinel;
    for (int k = 0; k < keys; ++k) {
      Floats* s = (Floats*)(scores + k * kGroup + v);
      Floats x = *s * scale;
      *s = x;
      most = x > most ? x : most;
    }
    Floats base = *(Floats*)(top + v);
    Ints grown = most > base + kLazy;
    Floats total = *(Floats*)(sum + v);
    for (int i = 0; i < kLanes; ++i) changed |= unsigned(grown[i] & 1) << (v + i);
    if (changed >> v) {
      Floats risen = grown ? most : base;
      Floats f = exp2(base - risen);
      *(Floats*)(factor + v) = f;
      *(Floats*)(top + v) = risen;
      base = risen;
      total *= f;
    }
    for (int k = 0; k < keys; ++k) {
      Floats* s = (Floats*)(scores + k * kGroup + v);
      Floats x = exp2(*s - base);
      *s = x;
      total += x;
    }
    *(Floats*)(sum + v) = total;
  }
  return changed;
}

NVFP4_INLINE void rescale(float* out, unsigned heads, const float* factor) {
  for (int h = 0; heads >> h; ++h) {
    if (!(heads >> h & 1)) continue;
    Floats* o = (Floats*)(out + h * kLatent);
    for (int d = 0; d < kLatent / kLanes; ++d) o[d] *= factor[h];
  }
}

NVFP4_INLINE float score_scale(const Problem& p) {
  return float(p.score_scale * 1.4426950408889634 * 256);  // to base 2, and rows are unpacked times 2^-8
}

template <class Order>  // Order::dim(i): which latent value stands at position i
void finish(const Problem& p, int64_t token, int head, int heads, Partial first, int64_t step, int count) {
  float row[kLatent], ordered[kLatent];
  for (int h = 0; h < heads; ++h) {
    float top = kSentinel;
    for (int i = 0; i < count; ++i) top = first.top[i * step + h] > top ? first.top[i * step + h] : top;
    float sum = 0;
    memset(row, 0, sizeof row);
    for (int i = 0; i < count; ++i) {
      float part = first.sum[i * step + h];
      if (part == 0) continue;  // no keys: `out` was never written
      float weight = exp2(Floats{} + (first.top[i * step + h] - top))[0];
      sum += weight * part;
      const float* from = first.out + i * step + h * kLatent;
      for (int d = 0; d < kLatent; ++d) row[d] += weight * from[d];
    }
    float scale = sum == 0 ? 0.f : float(p.output_scale * 256 / sum);
    for (int d = 0; d < kLatent; ++d) ordered[Order::dim(d)] = row[d] * scale;
    int64_t offset = token * p.out_token + (head + h) * p.out_head;
    if (p.out_type == kFloat32) {
      memcpy(static_cast<float*>(p.out) + offset, ordered, sizeof ordered);
    } else if (p.out_type == kBfloat16) {
      uint16_t* to = static_cast<uint16_t*>(p.out) + offset;
      for (int d = 0; d < kLatent; ++d) to[d] = to_bfloat16(ordered[d]);
    } else {
      uint16_t* to = static_cast<uint16_t*>(p.out) + offset;
      for (int d = 0; d < kLatent; ++d) to[d] = to_float16(ordered[d]);
    }
    if (p.lse) {
      float lse = sum == 0 ? -__builtin_inff() : top + __builtin_log2f(sum);
      p.lse[token * p.heads + head + h] = p.base2 ? lse : lse * 0.6931471805599453f;
    }
  }
}

}  // namespace
}  // namespace nvfp4_mla
