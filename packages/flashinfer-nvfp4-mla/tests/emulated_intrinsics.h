// SPDX-License-Identifier: Apache-2.0
// EMULATED, for tests alone: the intrinsics of AVX-512 and AMX that the kernel uses, element by element as Intel's
// manual defines them. It shows that a path computes the right thing, and nothing about its speed.
#pragma once
#include <stdint.h>
#include <string.h>

namespace emulated {

#define EMULATED static inline __attribute__((always_inline, unused))

typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(64)));
typedef int64_t I64 __attribute__((vector_size(64)));

template <class T>
EMULATED T load(const void* from) {
  T value;
  memcpy(&value, from, sizeof value);
  return value;
}

// What the processor would fault on, except in AMX, which takes any address.
template <class T>
EMULATED T* aligned(T* address) {
  if (reinterpret_cast<uintptr_t>(address) % 64) __builtin_trap();
  return address;
}

EMULATED void store(void* to, __m512i value) { memcpy(to, &value, 64); }
EMULATED void store(void* to, __m512 value) { memcpy(to, &value, 64); }
EMULATED I32 set1_epi32(int32_t x) { return I32{} + x; }
EMULATED U16 set1_epi16(int16_t x) { return U16{} + uint16_t(x); }

EMULATED U16 cvtepu8_epi16(__m256i bytes) {
  uint8_t from[32];
  memcpy(from, &bytes, 32);
  U16 to;
  for (int i = 0; i < 32; ++i) to[i] = from[i];
  return to;
}

EMULATED F32 cvtph_ps(__m256i halves) {
  __m256 part[2];
  for (int i = 0; i < 2; ++i) part[i] = _mm256_cvtph_ps(load<__m128i>((const char*)&halves + 16 * i));
  return load<F32>(part);
}

EMULATED U16 permutexvar_epi16(U16 index, U16 a) {
  U16 to;
  for (int i = 0; i < 32; ++i) to[i] = a[index[i] & 31];
  return to;
}

EMULATED F32 permutex2var_ps(F32 a, I32 index, F32 b) {
  F32 to;
  for (int i = 0; i < 16; ++i) to[i] = index[i] & 16 ? b[index[i] & 15] : a[index[i] & 15];
  return to;
}

template <class T, int Lane, int First>  // Lane: elements in 128 bits; First: where the taken half of a lane begins
EMULATED T unpack(T a, T b) {
  T to;
  constexpr int count = 64 / sizeof(a[0]);
  for (int i = 0; i < count; ++i) {
    int from = i / Lane * Lane + First + i % Lane / 2;
    to[i] = i % 2 ? b[from] : a[from];
  }
  return to;
}

EMULATED I64 shuffle_i32x4(I64 a, I64 b, int control) {
  I64 to;
  for (int lane = 0; lane < 4; ++lane) {
    int from = control >> (2 * lane) & 3;
    for (int i = 0; i < 2; ++i) to[2 * lane + i] = lane < 2 ? a[2 * from + i] : b[2 * from + i];
  }
  return to;
}

EMULATED F32 dpbf16_ps(F32 sum, U32 a, U32 b) {
  const U32 high = U32{} + 0xffff0000;
  sum += (F32)(a & high) * (F32)(b & high);
  return sum + (F32)(a << 16) * (F32)(b << 16);
}

struct Tile {
  uint32_t row[16][16];
};
static thread_local Tile tiles[8];

EMULATED void check_config(const void* config) {
  // As GCC's intrinsic does it: an instruction that reads 64 bytes, of which the compiler is told about 8.
  uint8_t bytes[64];
  __asm__ volatile(
      "vmovups %1, %%ymm0\n\tvmovups %%ymm0, %0\n\tvmovups 32+%1, %%ymm0\n\tvmovups %%ymm0, 32+%0"
      : "=m"(bytes)
      : "m"(*static_cast<const void* const*>(config))
      : "xmm0");
  uint16_t width;
  if (bytes[0] != 1 || bytes[1] != 0) __builtin_trap();
  for (int i = 0; i < 8; ++i) {
    memcpy(&width, bytes + 16 + 2 * i, 2);
    if (width != 64 || bytes[48 + i] != 16) __builtin_trap();
  }
}

EMULATED void tile_load(int tile, const void* from, size_t stride) {
  for (int i = 0; i < 16; ++i) memcpy(tiles[tile].row[i], static_cast<const char*>(from) + i * stride, 64);
}

EMULATED void tile_store(int tile, void* to, size_t stride) {
  for (int i = 0; i < 16; ++i) memcpy(static_cast<char*>(to) + i * stride, tiles[tile].row[i], 64);
}

EMULATED void tile_dpbf16(int c, int a, int b) {
  for (int m = 0; m < 16; ++m) {
    F32 sum = load<F32>(tiles[c].row[m]);
    for (int k = 0; k < 16; ++k) sum = dpbf16_ps(sum, U32{} + tiles[a].row[m][k], load<U32>(tiles[b].row[k]));
    memcpy(tiles[c].row[m], &sum, 64);
  }
}

}  // namespace emulated

#define _mm512_load_si512(p) ((__m512i)emulated::load<emulated::I64>(emulated::aligned(p)))
#define _mm512_loadu_ps(p) ((__m512)emulated::load<emulated::F32>(p))
#define _mm512_storeu_si512(p, a) emulated::store(p, (__m512i)(a))
#define _mm512_store_si512(p, a) emulated::store(emulated::aligned(p), (__m512i)(a))
#define _mm512_storeu_ps(p, a) emulated::store(p, (__m512)(a))
#define _mm512_setzero_ps() ((__m512)emulated::F32{})
#define _mm512_set1_epi32(x) ((__m512i)emulated::set1_epi32(x))
#define _mm512_set1_epi16(x) ((__m512i)emulated::set1_epi16(x))
#define _mm512_castsi512_ps(a) ((__m512)(a))
#define _mm512_castps_si512(a) ((__m512i)(a))
#define _mm512_and_si512(a, b) ((__m512i)((emulated::I64)(a) & (emulated::I64)(b)))
#define _mm512_or_si512(a, b) ((__m512i)((emulated::I64)(a) | (emulated::I64)(b)))
#define _mm512_add_epi32(a, b) ((__m512i)((emulated::I32)(a) + (emulated::I32)(b)))
#define _mm512_slli_epi32(a, n) ((__m512i)((emulated::U32)(a) << (n)))
#define _mm512_srli_epi32(a, n) ((__m512i)((emulated::U32)(a) >> (n)))
#define _mm512_srli_epi16(a, n) ((__m512i)((emulated::U16)(a) >> (n)))
#define _mm512_mul_ps(a, b) ((__m512)((emulated::F32)(a) * (emulated::F32)(b)))
#define _mm512_cvtepu8_epi16(a) ((__m512i)emulated::cvtepu8_epi16(a))
#define _mm512_cvtph_ps(a) ((__m512)emulated::cvtph_ps(a))
#define _mm512_permutexvar_epi16(i, a) ((__m512i)emulated::permutexvar_epi16((emulated::U16)(i), (emulated::U16)(a)))
#define _mm512_permutex2var_ps(a, i, b) \
  ((__m512)emulated::permutex2var_ps((emulated::F32)(a), (emulated::I32)(i), (emulated::F32)(b)))
#define EMULATED_UNPACK(type, lane, first, a, b) \
  ((__m512i)emulated::unpack<emulated::type, lane, first>((emulated::type)(a), (emulated::type)(b)))
#define _mm512_unpacklo_epi16(a, b) EMULATED_UNPACK(U16, 8, 0, a, b)
#define _mm512_unpackhi_epi16(a, b) EMULATED_UNPACK(U16, 8, 4, a, b)
#define _mm512_unpacklo_epi32(a, b) EMULATED_UNPACK(I32, 4, 0, a, b)
#define _mm512_unpackhi_epi32(a, b) EMULATED_UNPACK(I32, 4, 2, a, b)
#define _mm512_unpacklo_epi64(a, b) EMULATED_UNPACK(I64, 2, 0, a, b)
#define _mm512_unpackhi_epi64(a, b) EMULATED_UNPACK(I64, 2, 1, a, b)
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4(a, b, n) ((__m512i)emulated::shuffle_i32x4((emulated::I64)(a), (emulated::I64)(b), n))
#define _mm512_dpbf16_ps(s, a, b) \
  ((__m512)emulated::dpbf16_ps((emulated::F32)(s), (emulated::U32)(a), (emulated::U32)(b)))
#define _tile_loadconfig(config) emulated::check_config(config)
#define _tile_release() ((void)0)
#undef _tile_zero
#define _tile_zero(tile) memset(&emulated::tiles[tile], 0, sizeof(emulated::Tile))
#undef _tile_loadd
#define _tile_loadd(tile, p, stride) emulated::tile_load(tile, p, stride)
#undef _tile_stored
#define _tile_stored(tile, p, stride) emulated::tile_store(tile, p, stride)
#undef _tile_dpbf16ps
#define _tile_dpbf16ps(c, a, b) emulated::tile_dpbf16(c, a, b)
