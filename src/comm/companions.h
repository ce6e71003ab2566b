// SPDX-License-Identifier: Apache-2.0
// Communicators that the library makes for itself from a caller's one. The caller has no handle of them, so an abort or
// a revocation of the caller's communicator must end them too.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace moeccl::comm {

class Communicator;

class Companions {
 public:
  // A companion's place in the list of its parent, which may end first. It must go before the companion does.
  class Place {
   public:
    Place(std::shared_ptr<Companions> list, Communicator& companion) : list_(std::move(list)), companion_(&companion) {
      const std::lock_guard lock(list_->mutex_);
      list_->all_.push_back(companion_);
    }
    ~Place() {
      const std::lock_guard lock(list_->mutex_);
      std::erase(list_->all_, companion_);
    }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

   private:
    std::shared_ptr<Companions> list_;
    Communicator* companion_;
  };

  // Calls end(companion) for all of them. Any thread.
  template <class End>
  void for_each(End&& end) {
    const std::lock_guard lock(mutex_);
    for (Communicator* c : all_) end(*c);
  }

 private:
  std::mutex mutex_;
  std::vector<Communicator*> all_;
};

}  // namespace moeccl::comm
