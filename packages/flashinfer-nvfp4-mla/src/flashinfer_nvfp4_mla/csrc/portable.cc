// SPDX-License-Identifier: Apache-2.0
// No intrinsics: what runs on every processor, and is vectorised by the compiler.
#define NVFP4_LANES 4
#include "fp32.h"

namespace nvfp4_mla {
namespace {

struct Portable {
  static constexpr int dim(int i) { return i; }

  static void row(const uint8_t* bytes, float* values) {
    static constexpr float kValue[16] = {0,    0x1p-9f,  0x2p-9f,  0x3p-9f,  0x4p-9f,  0x6p-9f,  0x8p-9f,  0xcp-9f,
                                         -0.f, -0x1p-9f, -0x2p-9f, -0x3p-9f, -0x4p-9f, -0x6p-9f, -0x8p-9f, -0xcp-9f};
    for (int group = 0; group < kLatent / 16; ++group) {
      float scale = kFloat8Table.value[bytes[320 + 8 * (group & 3) + (group >> 2)]];
      for (int i = 0; i < 8; ++i) {
        uint8_t pair = bytes[group * 8 + i];
        values[group * 16 + 2 * i] = kValue[pair & 15] * scale;
        values[group * 16 + 2 * i + 1] = kValue[pair >> 4] * scale;
      }
    }
    for (int i = 0; i < kRope; ++i) values[kLatent + i] = kFloat8Table.value[bytes[256 + i]] * 0x1p-8f;
  }
};

const Path kPath = fp32_path<Portable>();

}  // namespace
const Path* const kPortable = &kPath;
}  // namespace nvfp4_mla
