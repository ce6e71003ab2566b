// SPDX-License-Identifier: Apache-2.0
// The codec tables that select_codec() chooses from.
#pragma once

#include "kernels/codec.h"

namespace moeccl::kernels {

const CodecTable& reference_codec();
const CodecTable& avx2_codec();
const CodecTable& avx512_codec();
const CodecTable& neon_codec();

}  // namespace moeccl::kernels
