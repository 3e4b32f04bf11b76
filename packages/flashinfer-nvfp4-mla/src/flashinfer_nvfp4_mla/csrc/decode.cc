// SPDX-License-Identifier: Apache-2.0
// Which paths there are, and the work shared out among threads.
#include "decode.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && !defined(NVFP4_MLA_EMULATE)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nvfp4_mla {
namespace {

#if defined(__x86_64__) && !defined(NVFP4_MLA_EMULATE)
bool amx_allowed() {
  // Linux hands out the tile registers on request, to the whole process: ARCH_REQ_XCOMP_PERM, feature 18.
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

unsigned find_isas() {
  unsigned found = 1u << kIsaPortable, a, b, c, d;
  auto all = [](unsigned word, unsigned bits) { return (word & bits) == bits; };
  if (!__get_cpuid(1, &a, &b, &c, &d) || !all(c, 1u << 12 | 1u << 27 | 1u << 29)) return found;  // FMA, OSXSAVE, F16C
  unsigned saved, rest;
  __asm__("xgetbv" : "=a"(saved), "=d"(rest) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !all(saved, 0x6) || !all(b, 1u << 5)) return found;
  if (kAvx2) found |= 1u << kIsaAvx2;
  // AVX512F, DQ, BW, VL
  if (!all(saved, 0xe6) || !all(b, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31)) return found;
  bool amx = all(saved, 3u << 17) && all(d, 1u << 22 | 1u << 24);  // AMX-BF16, AMX-TILE
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !all(a, 1u << 5)) return found;  // AVX512_BF16
  if (kAvx512Bf16) found |= 1u << kIsaAvx512Bf16;
  if (kAmx && amx && amx_allowed()) found |= 1u << kIsaAmx;
  return found;
}
#else
unsigned find_isas() {
  return 1u << kIsaPortable | (kAvx512Bf16 ? 1u << kIsaAvx512Bf16 : 0) | (kAmx ? 1u << kIsaAmx : 0);
}
#endif

// Grows and is kept from call to call, by thread.
struct Buffer {
  char* data = nullptr;
  size_t size = 0;

  char* get(size_t bytes, bool zeroed) {
    if (bytes > size) {
      free(data);
      bytes = (bytes + 4095) / 4096 * 4096;
      data = static_cast<char*>(aligned_alloc(4096, bytes));
      size = data ? bytes : 0;
      if (zeroed && data) memset(data, 0, bytes);
    }
    return data;
  }

  ~Buffer() { free(data); }
};

thread_local Buffer scratch, shared;

// libgomp's threads do not live on in a forked child, where a parallel region would wait for them for ever: whoever
// began them, hence this is watched from when the library is loaded.
bool forked = false;
const int watched = pthread_atfork(nullptr, nullptr, [] { forked = true; });

}  // namespace

unsigned supported() {
  static const unsigned isas = find_isas();
  return isas;
}

bool decode(const Problem& p, Isa isa, int threads) {
  const Path* const paths[kIsas] = {kPortable, kAvx2, kAvx512Bf16, kAmx};
  const Path& path = *paths[isa];
  if (forked || watched != 0 || threads < 1) threads = 1;

  // A part is a block of heads over a run of keys: runs are cut only where there are too few tokens for all threads, and
  // into fewer than 8 parts a thread: 2 MiB of partials.
  int most = p.heads < path.heads ? p.heads : path.heads;
  int64_t blocks = (p.heads + path.heads - 1) / path.heads, whole = p.tokens * blocks, splits = 1;
  if (threads > 1 && whole > 0 && whole < 4 * int64_t(threads)) {
    int64_t wanted = (4 * int64_t(threads) + whole - 1) / whole, longest = (p.keys + 127) / 128;
    splits = wanted < longest ? wanted : longest < 1 ? 1 : longest;
  }
  int64_t parts = whole * splits;
  // Threads without a part stay in the team: libgomp would end them, and torch would have to begin them again.
  if (parts <= 1) threads = 1;

  int padded = (most + 15) / 16 * 16;
  size_t one = sizeof(float) * size_t(padded) * (kLatent + 2);  // of a partial
  auto partial_at = [&](char* memory) {
    float* out = reinterpret_cast<float*>(memory);
    return Partial{out, out + padded * kLatent, out + padded * kLatent + padded};
  };
  char* partials = nullptr;
  if (splits > 1 && !(partials = shared.get(one * size_t(parts), false))) return false;

  bool failed = false;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < parts; ++i) {
      char* mine = scratch.get(path.scratch + one, true);
      if (!mine) {
#pragma omp atomic write
        failed = true;
        continue;
      }
      int64_t split = i % splits, block = i / splits % blocks, token = i / splits / blocks;
      int head = int(block) * path.heads;
      int64_t length = p.lengths ? p.lengths[token] : p.keys;
      length = length < 0 ? 0 : length > p.keys ? p.keys : length;
      Part part{token, head, p.heads - head < path.heads ? p.heads - head : path.heads, length * split / splits,
                length * (split + 1) / splits};
      Partial partial = partial_at(splits > 1 ? partials + one * size_t(i) : mine + path.scratch);
      path.attend(p, part, mine, partial);
      if (splits == 1) path.finish(p, token, head, part.heads, partial, 0, 1);
    }
    if (splits > 1 && !failed) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < p.tokens * p.heads; ++i) {
        int64_t token = i / p.heads, block = i % p.heads / path.heads, h = i % p.heads % path.heads;
        Partial first = partial_at(partials + one * size_t((token * blocks + block) * splits));
        first = {first.out + h * kLatent, first.top + h, first.sum + h};
        path.finish(p, token, int(i % p.heads), 1, first, int64_t(one / sizeof(float)), int(splits));
      }
    }
  }
  return !failed;
}

}  // namespace nvfp4_mla
