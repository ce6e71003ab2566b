#include "src/world/process_table.h"

#include "src/driver/fork_page.h"

namespace moeccl::comm {

using transport::shm::Segment;

ProcessTable& ProcessTable::get() {
  // Stream threads follow its mappings while the program ends.
  static constinit driver::PerProcess<ProcessTable> tables;
  return tables.get();
}

void ProcessTable::put(uint64_t communicator, uint32_t rank, const std::shared_ptr<Segment>& segment) {
  const std::lock_guard lock(mutex_);
  segments_[{communicator, rank}] = segment;
}

std::shared_ptr<Segment> ProcessTable::find(uint64_t communicator, uint32_t rank) {
  const std::lock_guard lock(mutex_);
  const auto it = segments_.find({communicator, rank});
  return it == segments_.end() ? nullptr : it->second.lock();
}

void ProcessTable::remove(uint64_t communicator, uint32_t rank) {
  const std::lock_guard lock(mutex_);
  segments_.erase({communicator, rank});
}

Result<std::byte*> ProcessTable::heap(uint64_t process, Fd fd, size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto it = heaps_.find(process);
  if (it != heaps_.end()) return it->second.data();
  MOECCL_ASSIGN_OR_RETURN(driver::Mapping mapping, driver::map_segment(fd, bytes));
  std::byte* base = mapping.data();
  heaps_.emplace(process, std::move(mapping));
  return base;
}

std::byte* ProcessTable::find_heap(uint64_t process) {
  const std::lock_guard lock(mutex_);
  const auto it = heaps_.find(process);
  return it == heaps_.end() ? nullptr : it->second.data();
}

Result<std::shared_ptr<const driver::ProcessWatch>> ProcessTable::watch(uint64_t process, int pid, Fd line) {
  const std::lock_guard lock(mutex_);
  std::erase_if(watches_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<const driver::ProcessWatch>& known = watches_[process];
  if (auto watch = known.lock()) return watch;
  MOECCL_ASSIGN_OR_RETURN(auto made, driver::ProcessWatch::open(pid, std::move(line)));
  known = made;
  return made;
}

std::shared_ptr<const driver::ProcessWatch> ProcessTable::find_watch(uint64_t process) {
  const std::lock_guard lock(mutex_);
  const auto it = watches_.find(process);
  return it == watches_.end() ? nullptr : it->second.lock();
}

void ProcessTable::give_up(uint64_t communicator, const Status& why) {
  constexpr size_t kGivenUp = 64;
  const std::lock_guard lock(mutex_);
  given_up_.emplace_back(communicator, why);
  if (given_up_.size() > kGivenUp) given_up_.pop_front();
}

Status ProcessTable::given_up(uint64_t communicator) {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, why] : given_up_)
    if (id == communicator) return Status(why);
  return {};
}

}  // namespace moeccl::comm
