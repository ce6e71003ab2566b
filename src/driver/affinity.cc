// SPDX-License-Identifier: Apache-2.0
#include "src/driver/affinity.h"

#include <sched.h>

#include <bit>

namespace moeccl::driver {

std::optional<Affinity> Affinity::of_this_thread() {
  Affinity set;
  if (sched_getaffinity(0, sizeof(set.words_), reinterpret_cast<cpu_set_t*>(set.words_.data())) != 0) return {};
  return set;
}

Affinity Affinity::only(int cpu) {
  Affinity set;
  set.words_[static_cast<size_t>(cpu) / 64] = uint64_t{1} << (cpu % 64);
  return set;
}

Affinity Affinity::all() {
  Affinity set;
  set.words_.fill(~uint64_t{0});
  return set;
}

uint32_t Affinity::count() const {
  uint32_t n = 0;
  for (const uint64_t word : words_) n += static_cast<uint32_t>(std::popcount(word));
  return n;
}

bool Affinity::bind() const {
  return sched_setaffinity(0, sizeof(words_), reinterpret_cast<const cpu_set_t*>(words_.data())) == 0;
}

}  // namespace moeccl::driver
