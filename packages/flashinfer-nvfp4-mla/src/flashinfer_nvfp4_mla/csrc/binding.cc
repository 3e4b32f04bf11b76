// SPDX-License-Identifier: Apache-2.0
// The library's two functions, by tvm-ffi's C interface alone: one library for every version of Python.
#include <tvm/ffi/c_api.h>

#include <initializer_list>

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

bool is(const DLTensor* t, int code, int bits) {
  return t->dtype.code == code && t->dtype.bits == bits && t->dtype.lanes == 1;
}

bool type(const DLTensor* t, Type* found) {
  *found = is(t, kDLBfloat, 16) ? kBfloat16 : is(t, kDLFloat, 16) ? kFloat16 : is(t, kDLFloat, 32) ? kFloat32 : kFloat8;
  return *found != kFloat8 || is(t, kDLFloat8_e4m3fn, 8);
}

// Is there a tensor on the CPU of this shape (-1: any extent) whose last dimension is contiguous?
bool shaped(const DLTensor* t, std::initializer_list<int64_t> shape) {
  if (!t || t->device.device_type != kDLCPU || t->ndim != int(shape.size())) return false;
  const int64_t* extent = t->shape;
  for (int64_t wanted : shape) {
    if (wanted >= 0 && *extent != wanted) return false;
    ++extent;
  }
  return extent[-1] <= 1 || stride(t, t->ndim - 1) == 1;
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
// caller has checked values, which are not looked at here.
TVM_FFI_DLL_EXPORT int __tvm_ffi_decode(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  if (count != 11) return refuse("decode takes 11 arguments");
  const DLTensor *query = tensor(args[0]), *cache = tensor(args[1]), *indices = tensor(args[2]),
                 *lengths = tensor(args[3]), *out = tensor(args[6]), *lse = tensor(args[7]);
  Problem p = {};
  if (!shaped(query, {-1, -1, kDim}) || !type(query, &p.query_type) || p.query_type == kFloat32) {
    return refuse("query must be [tokens, heads, 576] of bfloat16, float16 or float8_e4m3fn, last dimension contiguous");
  }
  int64_t tokens = query->shape[0], heads = query->shape[1];
  if (!(shaped(cache, {-1, kRowBytes}) || shaped(cache, {-1, -1, kRowBytes})) || !is(cache, kDLUInt, 8)) {
    return refuse("cache must be [rows, 352] or [blocks, block_size, 352] of uint8, last dimension contiguous");
  }
  if (!shaped(indices, {tokens, -1}) || !is(indices, kDLInt, 32)) {
    return refuse("indices must be [tokens, keys] of int32, last dimension contiguous");
  }
  if (args[3].type_index != kTVMFFINone && !(shaped(lengths, {tokens}) && is(lengths, kDLInt, 32))) {
    return refuse("lengths must be None or [tokens] of int32, contiguous");
  }
  if (!shaped(out, {tokens, heads, kLatent}) || !type(out, &p.out_type) || p.out_type == kFloat8) {
    return refuse("out must be [tokens, heads, 512] of bfloat16, float16 or float32, last dimension contiguous");
  }
  if (args[7].type_index != kTVMFFINone && !(shaped(lse, {tokens, heads}) && is(lse, kDLFloat, 32) &&
                                             (tokens <= 1 || stride(lse, 0) == heads))) {
    return refuse("lse must be None or [tokens, heads] of float32, contiguous");
  }
  if (args[4].type_index != kTVMFFIFloat || args[5].type_index != kTVMFFIFloat) {
    return refuse("bmm1_scale and bmm2_scale must be floats");
  }
  int64_t isa = args[9].v_int64;
  if (args[9].type_index != kTVMFFIInt || isa < 0 || isa >= kIsas || !(supported() >> isa & 1)) {
    return refuse("isa must be the number of a path that this processor has");
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
  p.tokens = tokens;
  p.heads = int(heads);
  p.keys = indices->shape[1];
  if (!decode(p, Isa(isa), int(args[10].v_int64))) {
    TVMFFIErrorSetRaisedFromCStr("MemoryError", "no memory to work in");
    return -1;
  }
  result->type_index = kTVMFFINone;
  result->v_int64 = 0;
  return 0;
}

}  // extern "C"
