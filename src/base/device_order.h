// SPDX-License-Identifier: Apache-2.0
// Loads and stores of words that a CPU shares with a device: a NIC that writes to memory, or a GPU.
//
// An acquire orders what CPUs have stored. On aarch64 a device may be outside of that domain, so a barrier of the wider
// domain follows. On x86-64 the processor orders loads and stores of devices too.
#pragma once

#include <atomic>

namespace moeccl {

// Everything that the device stored before the words that were loaded is visible afterwards.
inline void from_device() {
#if defined(__aarch64__)
  asm volatile("dmb oshld" ::: "memory");
#else
  std::atomic_signal_fence(std::memory_order_acquire);
#endif
}

// Everything that was stored before is visible to a device that sees a later store.
inline void to_device() {
#if defined(__aarch64__)
  asm volatile("dmb oshst" ::: "memory");
#else
  std::atomic_signal_fence(std::memory_order_release);
#endif
}

// An acquire load. `word` is a std::atomic or a std::atomic_ref; another CPU may write it as well.
template <class Word>
auto load_from_device(const Word& word) {
  const auto value = word.load(std::memory_order_acquire);
  from_device();
  return value;
}

// A release store.
template <class Word, class Value>
void store_to_device(Word&& word, Value value) {
  to_device();
  word.store(value, std::memory_order_release);
}

}  // namespace moeccl
