// SPDX-License-Identifier: Apache-2.0
// The intrinsics of the bfloat16 paths; with NVFP4_MLA_EMULATE functions of the tests that stand in for those of
// AVX-512 and AMX, so that these paths are tested where the processor has neither.
#pragma once
#ifdef NVFP4_MLA_EMULATE
#include <immintrin.h>

#include "emulated_intrinsics.h"
#else
#include <immintrin.h>
#endif
