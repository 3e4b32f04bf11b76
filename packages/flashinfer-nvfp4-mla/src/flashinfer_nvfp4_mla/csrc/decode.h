// SPDX-License-Identifier: Apache-2.0
// The problem, and what one path (one instruction set) offers to solve a part of it. Plain pointers, no framework.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace nvfp4_mla {

constexpr int kRowBytes = 352;  // 256 of e2m1 pairs, 64 of e4m3 positional values, 32 of e4m3 scales
constexpr int kLatent = 512;
constexpr int kRope = 64;
constexpr int kDim = kLatent + kRope;

enum Type { kBfloat16, kFloat16, kFloat8, kFloat32 };  // kFloat8 is e4m3fn

struct Problem {
  const void* query;  // [tokens, heads, 576]; strides in elements, as everywhere but in the cache
  int64_t query_token, query_head;
  Type query_type;
  const uint8_t* cache;  // row `id` begins at block_stride * (id / block_size) + row_stride * (id % block_size)
  int64_t rows, block_size, row_stride, block_stride;
  const int32_t* indices;  // [tokens, keys]
  int64_t index_token;
  const int32_t* lengths;  // [tokens], or null: every entry counts
  double score_scale, output_scale;
  void* out;  // [tokens, heads, 512]
  int64_t out_token, out_head;
  Type out_type;
  float* lse;  // [tokens, heads], or null
  bool base2;
  int64_t tokens, keys;
  int heads;
};

// What is known after some of a token's keys: out = sum(weight * row), still to be divided by `sum`; weights are
// 2^(score - top). 512 values a head in the path's own order, and in units of 256: rows are unpacked times 2^-8.
struct Partial {
  float* out;
  float* top;
  float* sum;
};

// A run of heads of a token over a run of its list.
struct Part {
  int64_t token;
  int head, heads;
  int64_t begin, end;
};

struct Path {
  int heads;  // most heads of one part
  size_t scratch;  // bytes that `attend` works in, for `heads`
  // Fills `partial`. `scratch` is aligned to 64 bytes, and was zero when this thread first got it.
  void (*attend)(const Problem&, const Part&, char* scratch, Partial partial);
  // Merges `count` partials of the same heads, each `step` floats after the one before, and writes output and LSE.
  void (*finish)(const Problem&, int64_t token, int head, int heads, Partial first, int64_t step, int count);
};

// One per source file; null where the compiler or its target lacks the instructions.
extern const Path* const kPortable;
extern const Path* const kAvx2;
extern const Path* const kAvx512Bf16;
extern const Path* const kAmx;

enum Isa { kIsaPortable, kIsaAvx2, kIsaAvx512Bf16, kIsaAmx, kIsas };

// Bit i is set when this library and this processor have path i.
unsigned supported();

// Solve on up to `threads` threads. False: no memory for the work, and what was written is of no use.
bool decode(const Problem& problem, Isa isa, int threads);

}  // namespace nvfp4_mla
