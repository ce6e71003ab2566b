// SPDX-License-Identifier: Apache-2.0
// Memory that the ranks of one process share while they connect: each other's segments, and one mapping of each foreign
// segment and heap.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "src/base/fd.h"
#include "src/driver/fork_page.h"
#include "src/driver/memory.h"
#include "src/driver/process.h"
#include "transport/shm/segment.h"

namespace moeccl::comm {

class ProcessTable {
 public:
  using Segment = transport::shm::Segment;
  static ProcessTable& get() {
    // Never destroyed, because stream threads use its mappings while the program ends.
    static constinit driver::PerProcess<ProcessTable> tables;
    return tables.get();
  }

  // A segment is identified by a communicator, or by the key of one side of it, and a rank.
  void put(uint64_t communicator, uint32_t rank, const std::shared_ptr<Segment>& segment) {
    const std::lock_guard lock(mutex_);
    segments_[{communicator, rank}] = segment;
  }
  std::shared_ptr<Segment> find(uint64_t communicator, uint32_t rank) {
    const std::lock_guard lock(mutex_);
    return known(segments_, std::pair(communicator, rank));
  }
  void remove(uint64_t communicator, uint32_t rank) {
    const std::lock_guard lock(mutex_);
    segments_.erase({communicator, rank});
  }
  // Maps another process's heap once for all communicators with it. The mapping ends with the last of them, because it
  // keeps the memory of a process that has died.
  Result<std::shared_ptr<driver::Mapping>> heap(uint64_t process, Fd fd, size_t bytes) {
    const std::lock_guard lock(mutex_);
    std::erase_if(heaps_, [](const auto& entry) { return entry.second.expired(); });
    if (auto mapped = known(heaps_, process)) return mapped;
    MOECCL_ASSIGN_OR_RETURN(driver::Mapping mapping, driver::map_segment(fd, bytes));
    driver::leave_out_of_cores(mapping);
    auto made = std::make_shared<driver::Mapping>(std::move(mapping));
    heaps_[process] = made;
    return made;
  }
  std::shared_ptr<driver::Mapping> find_heap(uint64_t process) {
    const std::lock_guard lock(mutex_);
    return known(heaps_, process);
  }
  // Opens one watch for all communicators and all ranks of this process.
  Result<std::shared_ptr<const driver::ProcessWatch>> watch(uint64_t process, int pid, Fd line) {
    const std::lock_guard lock(mutex_);
    std::erase_if(watches_, [](const auto& entry) { return entry.second.expired(); });
    if (auto watch = known(watches_, process)) return watch;
    MOECCL_ASSIGN_OR_RETURN(auto made, driver::ProcessWatch::open(pid, std::move(line)));
    watches_[process] = made;
    return made;
  }
  std::shared_ptr<const driver::ProcessWatch> find_watch(uint64_t process) {
    const std::lock_guard lock(mutex_);
    return known(watches_, process);
  }
  // Records a communicator that will never be complete; called by the first rank of this process that knows. Ids are
  // not reused.
  void give_up(uint64_t communicator, const Status& why) {
    constexpr size_t kGivenUp = 64;
    const std::lock_guard lock(mutex_);
    given_up_.emplace_back(communicator, why);
    if (given_up_.size() > kGivenUp) given_up_.pop_front();
  }
  Status given_up(uint64_t communicator) {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, why] : given_up_)
      if (id == communicator) return Status(why);
    return {};
  }

 private:
  template <class Key, class T>
  static std::shared_ptr<T> known(const std::map<Key, std::weak_ptr<T>>& map, const Key& key) {
    const auto it = map.find(key);
    return it == map.end() ? nullptr : it->second.lock();
  }

  std::mutex mutex_;
  std::map<std::pair<uint64_t, uint32_t>, std::weak_ptr<Segment>> segments_;
  std::map<uint64_t, std::weak_ptr<driver::Mapping>> heaps_;
  std::map<uint64_t, std::weak_ptr<const driver::ProcessWatch>> watches_;
  std::deque<std::pair<uint64_t, Status>> given_up_;
};

}  // namespace moeccl::comm
