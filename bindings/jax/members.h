// SPDX-License-Identifier: Apache-2.0
// The communicators and layers that compiled programs name by number. A number is never used twice in a process, so a
// program that outlives its communicator gets an error. It counts from 1 in the order of creation, so a program from
// JAX's compilation cache names the same one in the next run.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "bindings/jax/call.h"

namespace moeccl::jax {

// A communicator. XLA may run programs on several threads; `busy` lets one at a time use it.
struct Member {
  explicit Member(moecclComm_t handle) : comm(handle) {}
  std::mutex busy;
  bool closed = false;  // under `busy`: a call may have found this before it was closed
  const moecclComm_t comm;
};

template <typename Thing>
class Numbered {
 public:
  int64_t add(std::shared_ptr<Thing> thing) {
    const std::lock_guard lock(mutex_);
    things_.emplace(++last_, std::move(thing));
    return last_;
  }
  std::shared_ptr<Thing> remove(int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto node = things_.extract(number);
    return node.empty() ? nullptr : node.mapped();
  }
  std::shared_ptr<Thing> find(int64_t number) const {
    const std::lock_guard lock(mutex_);
    const auto at = things_.find(number);
    return at == things_.end() ? nullptr : at->second;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<Thing>> things_;
  int64_t last_ = 0;
};

Numbered<Member>& members();
// The call's communicator, by its attribute "comm", locked for the call.
Outcome member_of(const Call& call, std::shared_ptr<Member>* member, std::unique_lock<std::mutex>* lock);
// The failure of a program that outlived what it names. thing: such as "layer 3"; kind: what the program needs anew.
Failure closed(const std::string& thing, const std::string& kind);

}  // namespace moeccl::jax
