// What the ranks of one process share while they connect: each other's segments, and one mapping of each foreign
// segment and heap.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "src/base/fd.h"
#include "src/driver/memory.h"
#include "src/driver/process.h"
#include "transport/shm/segment.h"

namespace moeccl::comm {

class ProcessTable {
 public:
  static ProcessTable& get();

  // Segments by communicator (or what a part of one is known by) and rank.
  void put(uint64_t communicator, uint32_t rank, const std::shared_ptr<transport::shm::Segment>& segment);
  std::shared_ptr<transport::shm::Segment> find(uint64_t communicator, uint32_t rank);
  void remove(uint64_t communicator, uint32_t rank);
  // Foreign heaps stay mapped while the process lives: addresses only, and every new communicator uses them again.
  Result<std::byte*> heap(uint64_t process, Fd fd, size_t bytes);
  std::byte* find_heap(uint64_t process);
  // One for all communicators and all ranks of this process.
  Result<std::shared_ptr<const driver::ProcessWatch>> watch(uint64_t process, int pid, Fd line);
  std::shared_ptr<const driver::ProcessWatch> find_watch(uint64_t process);
  // A communicator that will not come about, by the first rank of this process that knows. An id is used once.
  void give_up(uint64_t communicator, const Status& why);
  Status given_up(uint64_t communicator);

 private:
  std::mutex mutex_;
  std::map<std::pair<uint64_t, uint32_t>, std::weak_ptr<transport::shm::Segment>> segments_;
  std::map<uint64_t, driver::Mapping> heaps_;
  std::map<uint64_t, std::weak_ptr<const driver::ProcessWatch>> watches_;
  std::deque<std::pair<uint64_t, Status>> given_up_;
};

}  // namespace moeccl::comm
