// SPDX-License-Identifier: Apache-2.0
// Handles that C callers hold. A handle is a number, not an address: the slot and the generation of what it names, so
// that a stale, doubled or foreign handle is found out instead of followed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "src/base/status.h"
#include "src/driver/fork_page.h"

namespace moeccl::api {

// T: what it names; H: the C handle type. Nothing here takes a lock, which a forked child could find locked for ever.
template <class T, class H, uint64_t kKind>
class HandleTable {
  struct Slot;
  static void unpin(Slot& slot) {
    if (slot.pins.fetch_sub(1) == 1) slot.pins.notify_all();
  }
  static void leave(Slot& slot) {
    if (slot.born != driver::process_number()) {
      slot.handle.store(0);  // the slot stays in use, which also keeps the object in the sight of leak checkers
      return;
    }
    slot.handle.store(0);
    for (uint32_t pins = slot.pins.load(); pins != 0; pins = slot.pins.load()) slot.pins.wait(pins);
    delete slot.object.exchange(nullptr, std::memory_order_relaxed);
    slot.used.store(false, std::memory_order_release);  // pairs with the acquire in add()
  }

 public:
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
    return error(moecclOutOfMemory, "{} handles are in use, which is the most: destroy some", kSlots);
  }

  // Null when the handle is not a live one. For the thread that uses the handle, which alone may destroy it.
  T* find(H handle) const {
    const auto value = reinterpret_cast<uint64_t>(handle);
    if ((value & (kLeaving | 0xff)) != kKind) return nullptr;
    const Slot& slot = slots_[value >> 8 & (kSlots - 1)];
    if (slot.handle.load(std::memory_order_acquire) != value) return nullptr;  // pairs with the release in add()
    return slot.object.load(std::memory_order_relaxed);
  }
  // Of a live handle: whether it was made before this process was forked. Its locks may be held for ever and its
  // threads are not here.
  bool inherited(H handle) const { return slot_of(handle).born != driver::process_number(); }

  // What ends with `kEnd` of the slot.
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
  // For any thread: the object stays until the pin goes. Empty when the handle is not a live one, or was made before
  // this process was forked.
  using Pin = Hold<unpin>;
  Pin pin(H handle) {
    const auto value = reinterpret_cast<uint64_t>(handle);
    if ((value & (kLeaving | 0xff)) != kKind) return {};
    Slot& slot = slot_of(handle);
    // Those who ask again and again for a dead one must not hold up the one who waits for pins.
    if ((slot.handle.load(std::memory_order_relaxed) & ~kLeaving) != value) return {};
    // Either this thread sees in the handle's word that the object goes, or leave() sees the pin: both are in the one
    // order of sequentially consistent operations.
    slot.pins.fetch_add(1);
    if ((slot.handle.load() & ~kLeaving) == value && slot.born == driver::process_number()) return Pin(slot);
    unpin(slot);
    return {};
  }

  // What was taken out of the table: its handle is dead for find(). Pins are still given until this goes, so that a
  // wait of the owner's can be ended by moecclCommAbort(); then they are waited for and the object is destroyed. One
  // that was made before this process was forked is left alone.
  using Taken = Hold<leave>;
  Taken take(H handle) {
    if (find(handle) == nullptr) return {};
    Slot& slot = slot_of(handle);
    auto value = reinterpret_cast<uint64_t>(handle);
    return slot.handle.compare_exchange_strong(value, value | kLeaving) ? Taken(slot) : Taken();
  }

 private:
  static constexpr uint64_t kLeaving = uint64_t{1} << 63;  // of the handle's word; generations do not come so far
  // A line each: threads that watch one communicator do not disturb the calls on another.
  struct alignas(64) Slot {
    std::atomic<uint64_t> handle{0};  // 0: none is live
    std::atomic<T*> object{nullptr};
    std::atomic<uint32_t> pins{0};
    std::atomic<bool> used{false};
    uint32_t born = 0;  // driver::process_number() then
    uint64_t generation = 0;
  };

  Slot& slot_of(H handle) { return slots_[reinterpret_cast<uint64_t>(handle) >> 8 & (kSlots - 1)]; }
  const Slot& slot_of(H handle) const { return slots_[reinterpret_cast<uint64_t>(handle) >> 8 & (kSlots - 1)]; }
  std::atomic<uint32_t> next_{0};
  Slot slots_[kSlots];
};

}  // namespace moeccl::api
