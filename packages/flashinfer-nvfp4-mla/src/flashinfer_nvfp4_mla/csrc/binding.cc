// SPDX-License-Identifier: Apache-2.0
// The library's two functions, by tvm-ffi's C interface alone: one library for every version of Python.
#include <tvm/ffi/c_api.h>

#include "decode.h"

namespace {

using namespace nvfp4_mla;

int refuse(const char* message) {
  TVMFFIErrorSetRaisedFromCStr("ValueError", message);
  return -1;
}

const DLTensor* tensor(const TVMFFIAny& value) {
  if (value.type_index == kTVMFFITensor) return TVMFFITensorGetDLTensorPtr(value.v_obj);
  if (value.type_index == kTVMFFIDLTensorPtr) return static_cast<const DLTensor*>(value.v_ptr);
  return nullptr;
}

template <class T>
T* data(const DLTensor* t) {
  return reinterpret_cast<T*>(static_cast<char*>(t->data) + t->byte_offset);
}

int64_t stride(const DLTensor* t, int dim) {
  if (t->strides) return t->strides[dim];
  int64_t step = 1;
  for (int i = t->ndim - 1; i > dim; --i) step *= t->shape[i];
  return step;
}

bool type(const DLTensor* t, Type* found) {
  switch (t->dtype.code) {
    case kDLBfloat: *found = kBfloat16; return true;
    case kDLFloat: *found = t->dtype.bits == 16 ? kFloat16 : kFloat32; return true;
    case kDLFloat8_e4m3fn: *found = kFloat8; return true;
    default: return false;
  }
}

}  // namespace

extern "C" {

// () -> int: bit i is set when path i (portable, avx2, avx512_bf16, amx) is in the library and the processor has it.
TVM_FFI_DLL_EXPORT int __tvm_ffi_supported(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = supported();
  return 0;
}

// (query, cache, indices, lengths | None, bmm1_scale, bmm2_scale, out, lse | None, base2, isa, threads) -> None; the
// caller has checked shapes and types, and that the path is supported.
TVM_FFI_DLL_EXPORT int __tvm_ffi_decode(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  if (count != 11) return refuse("decode takes 11 arguments");
  const DLTensor *query = tensor(args[0]), *cache = tensor(args[1]), *indices = tensor(args[2]),
                 *lengths = tensor(args[3]), *out = tensor(args[6]), *lse = tensor(args[7]);
  Problem p = {};
  if (!query || !cache || !indices || !out || query->ndim != 3 || out->ndim != 3 || indices->ndim != 2 ||
      (cache->ndim != 2 && cache->ndim != 3) || !type(query, &p.query_type) || !type(out, &p.out_type)) {
    return refuse("decode takes (query, cache, indices, lengths, scale, scale, out, lse, base2, isa, threads)");
  }
  p.query = data<const void*>(query);
  p.query_token = stride(query, 0);
  p.query_head = stride(query, 1);
  p.cache = data<const uint8_t>(cache);
  p.block_stride = stride(cache, 0);
  p.block_size = cache->ndim == 3 ? cache->shape[1] : 1;
  p.row_stride = cache->ndim == 3 ? stride(cache, 1) : 0;
  p.rows = cache->shape[0] * p.block_size;
  p.indices = data<const int32_t>(indices);
  p.index_token = stride(indices, 0);
  p.lengths = lengths ? data<const int32_t>(lengths) : nullptr;
  p.score_scale = args[4].v_float64;
  p.output_scale = args[5].v_float64;
  p.out = data<void*>(out);
  p.out_token = stride(out, 0);
  p.out_head = stride(out, 1);
  p.lse = lse ? data<float>(lse) : nullptr;
  p.base2 = args[8].v_int64 != 0;
  p.tokens = query->shape[0];
  p.heads = int(query->shape[1]);
  p.keys = indices->shape[1];
  if (!decode(p, Isa(args[9].v_int64), int(args[10].v_int64))) {
    TVMFFIErrorSetRaisedFromCStr("MemoryError", "no memory to work in");
    return -1;
  }
  result->type_index = kTVMFFINone;
  result->v_int64 = 0;
  return 0;
}

}  // extern "C"
