// SPDX-License-Identifier: Apache-2.0
// A check of every path of this processor against float64, without Python: what runs on an emulated processor.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <initializer_list>

#include "decode.h"

using namespace nvfp4_mla;

namespace {

constexpr int kTokens = 3, kRows = 400, kKeys = 150, kMost = 20;
uint8_t cache[kRows * kRowBytes];
uint16_t query[kTokens * kMost * kDim];
int32_t indices[kTokens * kKeys], lengths[kTokens] = {kKeys, 0, 70};
float out[kTokens * kMost * kLatent], lse[kTokens * kMost];
double values[kRows][kDim];

double float8(int code) {
  int exponent = code >> 3 & 15, mantissa = code & 7;
  double value = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
  return code & 128 ? -value : value;
}

void fill() {
  static const double kE2m1[] = {0, .5, 1, 1.5, 2, 3, 4, 6};
  for (int row = 0; row < kRows; ++row) {
    uint8_t* bytes = cache + row * kRowBytes;
    for (int i = 0; i < kRowBytes; ++i) bytes[i] = uint8_t(rand() >> 5);
    for (int i = 256; i < kRowBytes; ++i) bytes[i] = uint8_t((bytes[i] & 0x87) | rand() % 8 << 3);  // small, no NaN
    for (int d = 0; d < kLatent; ++d) {
      int code = bytes[d / 2] >> (d % 2 * 4) & 15, group = d / 16;
      values[row][d] = kE2m1[code & 7] * (code & 8 ? -1 : 1) * float8(bytes[320 + 8 * (group % 4) + group / 4]);
    }
    for (int d = 0; d < kRope; ++d) values[row][kLatent + d] = float8(bytes[256 + d]);
  }
  for (uint16_t& q : query) q = uint16_t((rand() & 0x807f) | (0x3d80 + (rand() & 0x180)));  // bfloat16, up to 0.25
  for (int32_t& id : indices) id = rand() % (kRows + 20) - 10;
}

double query_at(int token, int head, int heads, int d) {
  uint32_t bits = uint32_t(query[(token * heads + head) * kDim + d]) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

double worst(int heads) {
  double worst = 0;
  for (int i = 0; i < kTokens * heads; ++i) {
    int token = i / heads;
    double sum = 0, expected[kLatent] = {};
    for (int k = 0; k < lengths[token]; ++k) {
      int id = indices[token * kKeys + k];
      if (id < 0 || id >= kRows) continue;
      double score = 0;
      for (int d = 0; d < kDim; ++d) score += query_at(token, i % heads, heads, d) * values[id][d];
      double weight = exp(score / 24);
      sum += weight;
      for (int d = 0; d < kLatent; ++d) expected[d] += weight * values[id][d];
    }
    double error = 0, size = 0;
    for (int d = 0; d < kLatent; ++d) {
      double want = sum == 0 ? 0 : expected[d] / sum;
      error += pow(out[i * kLatent + d] - want, 2);
      size += want * want;
    }
    error = size == 0 ? error : sqrt(error / size);
    double off = sum == 0 ? (lse[i] == -INFINITY ? 0 : 1) : fabs(lse[i] - log(sum));
    if (!(error <= worst)) worst = error;
    if (!(off <= worst)) worst = off;
  }
  return worst;
}

}  // namespace

int main() {
  fill();
  bool failed = false;
  for (int isa = 0; isa < kIsas; ++isa) {
    if (!(supported() >> isa & 1)) continue;
    for (int heads : {1, 8, 16, 17, kMost}) {
      for (int threads : {1, 2}) {
        Problem p = {};
        p.query = query, p.query_token = heads * kDim, p.query_head = kDim, p.query_type = kBfloat16;
        p.cache = cache, p.rows = kRows, p.block_size = 1, p.block_stride = kRowBytes;
        p.indices = indices, p.index_token = kKeys, p.lengths = lengths;
        p.score_scale = 1 / 24., p.output_scale = 1;
        p.out = out, p.out_token = heads * kLatent, p.out_head = kLatent, p.out_type = kFloat32;
        p.lse = lse, p.tokens = kTokens, p.keys = kKeys, p.heads = heads;
        memset(out, 0xff, sizeof out);
        bool done = decode(p, Isa(isa), threads);
        double error = worst(heads);
        printf("path %d, %d heads, %d threads: %.1e\n", isa, heads, threads, error);
        failed |= !done || !(error <= 2e-5);
      }
    }
  }
  return failed;
}
