// SPDX-License-Identifier: Apache-2.0
// Scratch memory of a solver: pieces cut one after another from one block. Without a block the arena only measures, so
// that the code that lays out the memory also computes how much it needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include "src/base/status.h"

namespace moeccl::solve {

// Returns the number in an enum that a C caller may have set to any value.
template <class E>
int raw(const E& value) {
  static_assert(sizeof(E) == sizeof(int));
  int number;
  std::memcpy(&number, &value, sizeof(number));
  return number;
}

class Arena {
 public:
  Arena() = default;  // measures
  Arena(void* base, size_t bytes) : base_(static_cast<std::byte*>(base)), bytes_(bytes) {}

  // Returns n uninitialized elements, aligned to 64 bytes.
  template <class T>
  T* take(size_t n) {
    static_assert(std::is_trivially_copyable_v<T>);
    used_ = (used_ + kAlign - 1) / kAlign * kAlign;
    T* at = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += n * sizeof(T);
    return at;
  }
  size_t used() const { return used_ + kAlign; }  // the block itself may begin anywhere
  // Scratch that is no longer needed: what is laid out after a mark may be laid out again.
  size_t mark() const { return used_; }
  void release(size_t mark) { used_ = mark; }

  static constexpr size_t kAlign = 64;

 private:
  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
  size_t used_ = 0;
};

// The caller's workspace, or memory of its own if there is none.
class Workspace {
 public:
  // Fails when the caller's workspace is too small; the error names the function that returns the size.
  static Result<Workspace> make(void* given, size_t given_bytes, size_t needed, const char* query) {
    Workspace w;
    if (given == nullptr) {
      w.own_ = std::make_unique_for_overwrite<std::byte[]>(needed);
      given = w.own_.get();
    } else if (given_bytes < needed) {
      return error(moecclInvalidArgument, "workspace_bytes is {}: {} says {} (or give workspace NULL)", given_bytes,
                   query, needed);
    }
    const auto address = reinterpret_cast<uintptr_t>(given);
    const size_t skip = (Arena::kAlign - address % Arena::kAlign) % Arena::kAlign;
    w.arena_ = Arena(static_cast<std::byte*>(given) + skip, needed - skip);
    return w;
  }
  Arena& arena() { return arena_; }

 private:
  std::unique_ptr<std::byte[]> own_;
  Arena arena_;
};

}  // namespace moeccl::solve
