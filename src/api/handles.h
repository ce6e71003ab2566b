// SPDX-License-Identifier: Apache-2.0
// Handles that C callers hold. A handle is a number, not an address. It consists of the slot and the generation of its
// object, so that a stale, duplicate or foreign handle is detected instead of dereferenced.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "src/base/status.h"
#include "src/driver/fork_page.h"

namespace moeccl::api {

// Destroys the object of a handle. A type whose objects may outlive their handles has its own.
template <class T>
void dispose(T* object) {
  delete object;
}

// T is the type of the object and H the C handle type. Takes no lock, because a forked child could find it locked
// forever.
template <class T, class H, uint64_t kKind>
class HandleTable {
  struct Slot;
  static void unpin(Slot& slot) {
    if (slot.pins.fetch_sub(1) == 1) slot.pins.notify_all();
  }
  static void leave(Slot& slot) {
    if (slot.born != driver::process_number()) {
      slot.handle.store(0);  // the slot stays in use, so that leak checkers still see the object
      return;
    }
    slot.handle.store(0);
    for (uint32_t pins = slot.pins.load(); pins != 0; pins = slot.pins.load()) slot.pins.wait(pins);
    dispose(slot.object.exchange(nullptr, std::memory_order_relaxed));
    slot.used.store(false, std::memory_order_release);  // pairs with the acquire in add()
  }

 public:
  using Object = T;
  using Handle = H;
  static constexpr uint32_t kSlots = 1u << 14;

  static HandleTable& get() {
    static constinit HandleTable table;
    return table;
  }

  Result<H> add(std::unique_ptr<T> object) {
    const uint32_t first = next_.load(std::memory_order_relaxed);
    for (uint32_t tried = 0; tried < kSlots; ++tried) {
      const uint32_t i = (first + tried) % kSlots;
      Slot& slot = slots_[i];
      if (slot.used.exchange(true, std::memory_order_acquire)) continue;  // pairs with the release in leave()
      next_.store(i + 1, std::memory_order_relaxed);
      slot.born = driver::process_number();
      const uint64_t value = ++slot.generation << 24 | static_cast<uint64_t>(i) << 8 | kKind;
      slot.object.store(object.release(), std::memory_order_relaxed);
      slot.handle.store(value, std::memory_order_release);  // pairs with the acquire in find()
      return reinterpret_cast<H>(value);
    }
    return error(moecclOutOfMemory, "{} handles are in use, which is the maximum: destroy some", kSlots);
  }

  // Returns null if the handle is not live. For the thread that uses the handle; only that thread may destroy it.
  T* find(H handle) const {
    const auto value = reinterpret_cast<uint64_t>(handle);
    if ((value & (kLeaving | 0xff)) != kKind) return nullptr;
    const Slot& slot = slots_[value >> 8 & (kSlots - 1)];
    if (slot.handle.load(std::memory_order_acquire) != value) return nullptr;  // pairs with the release in add()
    return slot.object.load(std::memory_order_relaxed);
  }
  // Returns true if a live handle was made before this process was forked. Its object's locks may be held forever, and
  // the object's threads do not exist here.
  bool inherited(H handle) const { return slot_of(handle).born != driver::process_number(); }

  // A hold on a slot. Its destructor calls kEnd on the slot.
  template <void (*kEnd)(Slot&)>
  class Hold {
   public:
    Hold() = default;
    explicit Hold(Slot& slot) : slot_(&slot) {}
    Hold(Hold&& other) noexcept : slot_(std::exchange(other.slot_, nullptr)) {}
    Hold& operator=(Hold&&) = delete;
    ~Hold() {
      if (slot_ != nullptr) kEnd(*slot_);
    }
    explicit operator bool() const { return slot_ != nullptr; }
    T* get() const { return slot_ != nullptr ? slot_->object.load(std::memory_order_relaxed) : nullptr; }
    bool inherited() const { return slot_->born != driver::process_number(); }

   private:
    Slot* slot_ = nullptr;
  };
  // For any thread: the object stays until the pin is released. The pin is empty if the handle is not live, or was made
  // before this process was forked.
  using Pin = Hold<unpin>;
  Pin pin(H handle) {
    const auto value = reinterpret_cast<uint64_t>(handle);
    if ((value & (kLeaving | 0xff)) != kKind) return {};
    Slot& slot = slot_of(handle);
    // Threads that keep asking for a dead object must not hold up the thread that waits for the pins.
    if ((slot.handle.load(std::memory_order_relaxed) & ~kLeaving) != value) return {};
    // Either this thread sees in the handle's word that the object is going, or leave() sees the pin, because both
    // accesses are in the single order of sequentially consistent operations.
    slot.pins.fetch_add(1);
    if ((slot.handle.load() & ~kLeaving) == value && slot.born == driver::process_number()) return Pin(slot);
    unpin(slot);
    return {};
  }

  // An object that was taken out of the table. Its handle is dead for find(). Pins are still given until this goes, so
  // that moecclCommAbort() can end a wait of the owner; then this waits for the pins and destroys the object. An object
  // that was made before this process was forked is left alone.
  using Taken = Hold<leave>;
  Taken take(H handle) {
    if (find(handle) == nullptr) return {};
    Slot& slot = slot_of(handle);
    auto value = reinterpret_cast<uint64_t>(handle);
    return slot.handle.compare_exchange_strong(value, value | kLeaving) ? Taken(slot) : Taken();
  }

 private:
  static constexpr uint64_t kLeaving = uint64_t{1} << 63;  // in the handle's word; generations never get that high
  // Each slot has its own cache line, so that threads that watch one communicator do not disturb calls on another.
  struct alignas(64) Slot {
    std::atomic<uint64_t> handle{0};  // 0 if no handle is live
    std::atomic<T*> object{nullptr};
    std::atomic<uint32_t> pins{0};
    std::atomic<bool> used{false};
    uint32_t born = 0;  // driver::process_number() at that time
    uint64_t generation = 0;
  };

  Slot& slot_of(H handle) { return slots_[reinterpret_cast<uint64_t>(handle) >> 8 & (kSlots - 1)]; }
  const Slot& slot_of(H handle) const { return slots_[reinterpret_cast<uint64_t>(handle) >> 8 & (kSlots - 1)]; }
  std::atomic<uint32_t> next_{0};
  Slot slots_[kSlots];
};

}  // namespace moeccl::api
