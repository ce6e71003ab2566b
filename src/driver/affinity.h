// SPDX-License-Identifier: Apache-2.0
// The processors that a thread may use.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace moeccl::driver {

class Affinity {
 public:
  // The kernel refuses a set that is shorter than its own, and cpu_set_t has room for only 1024 processors. Linux can
  // be built for 8192 (CONFIG_MAXSMP).
  static constexpr int kMostCpus = 8192;

  // Returns the calling thread's; nothing if the kernel does not say.
  static std::optional<Affinity> of_this_thread();
  static Affinity only(int cpu);
  static Affinity all();

  const auto& words() const { return words_; }  // processor 64 * i + j is bit j of words()[i]
  bool holds(int cpu) const { return (words_[static_cast<size_t>(cpu) / 64] >> (cpu % 64) & 1) != 0; }
  uint32_t count() const;
  // Binds the calling thread to this set. Returns false if the kernel refuses, because none of them may be used.
  bool bind() const;

 private:
  std::array<uint64_t, kMostCpus / 64> words_{};
};

}  // namespace moeccl::driver
