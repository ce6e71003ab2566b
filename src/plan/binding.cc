// SPDX-License-Identifier: Apache-2.0
#include "src/plan/binding.h"

namespace moeccl::plan {

uint64_t governing_length(const Binding& b, const Program& program, const Step& step) {
  const auto own_block = [&](const Ref& ref) { return ref.rank == program.rank && ref.buffer != Buffer::kStaging; };
  if (own_block(step.dst)) return block_length(b, step.dst);
  for (uint32_t i = 0; i < step.n_srcs; ++i) {
    const Ref& src = program.srcs[step.first_src + i];
    if (own_block(src)) return block_length(b, src);
  }
  return b.count;
}

}  // namespace moeccl::plan
