// Handles that C callers hold. A handle is a number, not an address: the slot and the generation of what it names, so
// that a stale, doubled or foreign handle is found out instead of followed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "src/base/status.h"

namespace moeccl::api {

// T: what it names; H: the C handle type. Looking up takes no lock.
template <class T, class H, uint64_t kKind>
class HandleTable {
 public:
  static constexpr uint32_t kSlots = 1u << 14;

  static HandleTable& get() {
    static HandleTable table;
    return table;
  }

  Result<H> add(std::unique_ptr<T> object) {
    const std::lock_guard lock(mutex_);
    for (uint32_t tried = 0; tried < kSlots; ++tried) {
      const uint32_t i = (next_ + tried) % kSlots;
      if (slots_[i].object.load(std::memory_order_relaxed) != nullptr) continue;
      next_ = i + 1;
      const uint64_t generation = slots_[i].generation.load(std::memory_order_relaxed) + 1;
      slots_[i].generation.store(generation, std::memory_order_relaxed);
      slots_[i].object.store(object.release(), std::memory_order_release);
      return reinterpret_cast<H>(generation << 24 | static_cast<uint64_t>(i) << 8 | kKind);
    }
    return error(moecclOutOfMemory, "{} handles are in use, which is the most: destroy some", kSlots);
  }

  // Null when the handle is not a live one.
  T* find(H handle) const {
    const auto value = reinterpret_cast<uint64_t>(handle);
    if ((value & 0xff) != kKind) return nullptr;
    const auto i = static_cast<uint32_t>(value >> 8 & 0xffff);
    if (i >= kSlots) return nullptr;
    T* object = slots_[i].object.load(std::memory_order_acquire);
    return slots_[i].generation.load(std::memory_order_relaxed) == value >> 24 ? object : nullptr;
  }

  // Takes the object out; the handle is dead from now on.
  std::unique_ptr<T> take(H handle) {
    const std::lock_guard lock(mutex_);
    T* object = find(handle);
    if (object == nullptr) return nullptr;
    slots_[reinterpret_cast<uint64_t>(handle) >> 8 & 0xffff].object.store(nullptr, std::memory_order_release);
    return std::unique_ptr<T>(object);
  }

 private:
  struct Slot {
    std::atomic<T*> object{nullptr};
    std::atomic<uint64_t> generation{0};
  };
  std::mutex mutex_;
  uint32_t next_ = 0;
  Slot slots_[kSlots];
};

}  // namespace moeccl::api
