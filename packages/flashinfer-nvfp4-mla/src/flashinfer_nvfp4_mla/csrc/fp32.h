// SPDX-License-Identifier: Apache-2.0
// The paths that multiply in fp32: AVX2 eight values at a time, every other processor four.
//
// 48 keys at a time are unpacked once for all heads. Scores are a product [keys, 576] x [576, heads], a row of the
// result holding 16 heads, so that the softmax never looks across lanes; outputs a product [heads, keys] x [keys, 512].
#pragma once
#include "common.h"

namespace nvfp4_mla {
namespace {

constexpr int kTile = 48;  // a multiple of 3, 6 and 12, the keys of one block of registers
constexpr int kStride = kDim + 16;  // an odd number of cache lines: columns do not fall on the same sets
constexpr int kFp32Heads = 64;
// The 512 values as vectors: most of them by threes, an even rest by twos.
constexpr int kVectors = kLatent / kLanes, kThrees = kVectors % 3 == 1 ? kVectors - 4 : kVectors - 2;
static_assert(kThrees % 3 == 0 && (kVectors - kThrees) % 2 == 0, "512 values by threes and twos");

template <int Keys, int Vectors>
NVFP4_INLINE void score_block(const float* rows, const float* query, float* scores) {
  Floats sum[Keys][Vectors] = {};
  for (int d = 0; d < kDim; ++d) {
    Floats q[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) q[v] = *(const Floats*)(query + d * kGroup + v * kLanes);
#pragma GCC unroll 12
    for (int k = 0; k < Keys; ++k) {
      float x = rows[k * kStride + d];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sum[k][v] += q[v] * x;
    }
  }
#pragma GCC unroll 12
  for (int k = 0; k < Keys; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) *(Floats*)(scores + k * kGroup + v * kLanes) = sum[k][v];
  }
}

// Twelve sums of one vector each, however many of them lie side by side. Returns how many keys that was.
template <int Most>
NVFP4_INLINE int score_vectors(int vectors, const float* rows, const float* query, float* scores) {
  if constexpr (Most > 1) {
    if (vectors <= Most / 2) return score_vectors<Most / 2>(vectors, rows, query, scores);
  }
  score_block<12 / Most, Most>(rows, query, scores);
  return 12 / Most;
}

template <int Heads, int Vectors>
NVFP4_INLINE void output_block(const float* rows, const float* weights, int keys, bool first, float* out) {
  Floats sum[Heads][Vectors];
#pragma GCC unroll 4
  for (int h = 0; h < Heads; ++h) {
#pragma GCC unroll 3
    for (int v = 0; v < Vectors; ++v) sum[h][v] = first ? Floats{} : *(Floats*)(out + h * kLatent + v * kLanes);
  }
  for (int k = 0; k < keys; ++k) {
    Floats x[Vectors];
#pragma GCC unroll 3
    for (int v = 0; v < Vectors; ++v) x[v] = *(const Floats*)(rows + k * kStride + v * kLanes);
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
      float w = weights[k * kGroup + h];
#pragma GCC unroll 3
      for (int v = 0; v < Vectors; ++v) sum[h][v] += x[v] * w;
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < Heads; ++h) {
#pragma GCC unroll 3
    for (int v = 0; v < Vectors; ++v) *(Floats*)(out + h * kLatent + v * kLanes) = sum[h][v];
  }
}

template <int Vectors>
NVFP4_INLINE void output_heads(const float* rows, const float* weights, int keys, int heads, bool first, float* out) {
  // `weights` is [groups][kTile][16].
  int h = 0;
  for (; h + 4 <= heads; h += 4) {
    const float* w = weights + h / kGroup * (kTile * kGroup) + h % kGroup;
    output_block<4, Vectors>(rows, w, keys, first, out + h * kLatent);
  }
  const float* w = weights + h / kGroup * (kTile * kGroup) + h % kGroup;
  if (heads - h == 3) output_block<3, Vectors>(rows, w, keys, first, out + h * kLatent);
  if (heads - h == 2) output_block<2, Vectors>(rows, w, keys, first, out + h * kLatent);
  if (heads - h == 1) output_block<1, Vectors>(rows, w, keys, first, out + h * kLatent);
}

struct Fp32Scratch {
  alignas(64) float query[kFp32Heads / kGroup][kDim][kGroup];
  float rows[kTile][kStride];
  float weights[kFp32Heads / kGroup][kTile][kGroup];
};

template <class Unpack>  // Unpack::row(bytes, values): times 2^-8, value i being number Unpack::dim(i) of the row
void attend(const Problem& p, const Part& part, char* memory, Partial partial) {
  Fp32Scratch& s = *reinterpret_cast<Fp32Scratch*>(memory);
  Rows list(p, part);
  const uint8_t* rows[2][kTile];
  int count = list.next(rows[0], kTile);
  for (int k = 0; k < count; ++k) prefetch(rows[0][k]);
  for (int h = 0; h < part.heads; ++h) {
    float query[kDim];
    load_query(p, part.token, part.head + h, query);
    for (int d = 0; d < kDim; ++d) s.query[h / kGroup][d][h % kGroup] = query[Unpack::dim(d)];
  }
  // Lanes of heads that are not there hold an earlier part's query: their results are never read.
  int lanes = round_up(part.heads, kLanes);
  for (int h = 0; h < lanes; ++h) partial.top[h] = kSentinel, partial.sum[h] = 0;
  float scale = score_scale(p);
  bool first = true;
  for (int turn = 0; count; turn ^= 1) {
    int following = list.next(rows[turn ^ 1], kTile), asked = 0;
    // The next tile's rows are asked for all along this one: a burst of requests would wait for itself.
    auto ask = [&](int more) {
      for (; asked < following && more; ++asked, --more) prefetch(rows[turn ^ 1][asked]);
    };
    for (int k = 0; k < count; ++k) Unpack::row(rows[turn][k], s.rows[k]);
    for (int h = 0; h < part.heads; h += kGroup) {
      int g = h / kGroup, width = lanes - h < kGroup ? lanes - h : kGroup;
      // Rows past `count` are those of an earlier tile: their scores are never read.
      for (int k = 0; k < count;) {
        k += score_vectors<kGroup / kLanes>(width / kLanes, s.rows[k], s.query[g][0], s.weights[g][k]);
        ask(3);
      }
      float factor[kGroup];
      unsigned changed =
          weigh(s.weights[g][0], count, width, scale, partial.top + h, partial.sum + h, factor);
      if (part.heads - h < kGroup) changed &= (1u << (part.heads - h)) - 1;
      if (changed && !first) rescale(partial.out + h * kLatent, changed, factor);
    }
    int d = 0;
    for (; d < kThrees * kLanes; d += 3 * kLanes, ask(2)) {
      output_heads<3>(s.rows[0] + d, s.weights[0][0], count, part.heads, first, partial.out + d);
    }
    for (; d < kLatent; d += 2 * kLanes) {
      output_heads<2>(s.rows[0] + d, s.weights[0][0], count, part.heads, first, partial.out + d);
    }
    ask(kTile);
    first = false;
    count = following;
  }
}

template <class Unpack>
constexpr Path fp32_path() {
  return {kFp32Heads, sizeof(Fp32Scratch), attend<Unpack>, finish<Unpack>};
}

}  // namespace
}  // namespace nvfp4_mla
