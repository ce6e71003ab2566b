// SPDX-License-Identifier: Apache-2.0
#include "plugins/timeline/timeline.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "src/base/clock.h"
#include "src/base/format.h"
#include "src/driver/file.h"

namespace moeccl::timeline {
namespace {

// A handle: the operation's number from 1, and whether it is the operation's own event or a kernel's.
constexpr uint64_t kKernelBit = 1;
void* handle_of(uint64_t number, uint64_t bit) { return reinterpret_cast<void*>(number << 1 | bit); }
uint64_t value_of(void* handle) { return reinterpret_cast<uint64_t>(handle); }

// The news of an event at `kernel_ns` has just come.
void compare_clocks(Rank& rank, int64_t kernel_ns) {
  rank.host_minus_kernel_ns = std::min(rank.host_minus_kernel_ns, unix_ns() - kernel_ns);
}

}  // namespace

std::shared_ptr<Rank> Timeline::join(Rank rank) {
  auto made = std::make_shared<Rank>(std::move(rank));
  const std::lock_guard lock(mutex_);
  if (first_ranks_.empty()) first_group_ = made->group;
  if (made->group == first_group_) first_ranks_.push_back(made->rank);
  ++members_;
  return made;
}

std::string Timeline::leave() {
  {
    const std::lock_guard lock(mutex_);
    if (--members_ > 0) return "";
  }
  return write();
}

Operation* Timeline::find(void* handle) {
  const uint64_t number = value_of(handle) >> 1;
  if (number == 0 || number > count_ || number + operations_.size() <= count_) return nullptr;
  return &operations_[(number - 1) % operations_.size()];
}

void* Timeline::begin(const std::shared_ptr<Rank>& rank, bool is_message, const profiler::abi::Descriptor& event) {
  Operation o{.rank = rank, .began_ns = unix_ns(), .is_message = is_message};
  if (is_message) {
    const auto& p2p = event.p2p;
    o.func = p2p.func, o.type = p2p.datatype, o.count = p2p.count, o.with = p2p.peer, o.n_channels = p2p.nChannels;
  } else {
    const auto& coll = event.coll;
    o.func = coll.func, o.type = coll.datatype, o.count = coll.count, o.with = coll.root;
    o.n_channels = coll.nChannels, o.sequence = coll.seqNumber, o.algorithm = coll.algo, o.protocol = coll.proto;
  }
  const std::lock_guard lock(mutex_);
  operations_[count_ % operations_.size()] = std::move(o);
  changed_ = true;
  return handle_of(++count_, 0);
}

void* Timeline::begin_kernel(void* parent, const profiler::abi::KernelCh& event) {
  const auto at = static_cast<int64_t>(event.pTimer);
  const std::lock_guard lock(mutex_);
  Operation* const o = find(parent);
  if (o == nullptr || at == 0) return nullptr;
  compare_clocks(*o->rank, at);
  if (o->kernel_began_ns == 0 || at < o->kernel_began_ns) o->kernel_began_ns = at;
  return handle_of(value_of(parent) >> 1, kKernelBit);
}

void Timeline::end_kernel(void* kernel, int64_t kernel_ns) {
  const std::lock_guard lock(mutex_);
  Operation* const o = find(kernel);
  if (o == nullptr) return;
  compare_clocks(*o->rank, kernel_ns);
  o->kernel_ended_ns = std::max(o->kernel_ended_ns, kernel_ns);
}

void Timeline::end(void* event) {
  if ((value_of(event) & kKernelBit) != 0) return;
  const std::lock_guard lock(mutex_);
  if (Operation* const o = find(event); o != nullptr) o->ended_ns = unix_ns();
}

std::string Timeline::write() {
  const std::lock_guard lock(mutex_);
  if (!changed_) return "";
  changed_ = false;
  const uint64_t kept = std::min<uint64_t>(count_, operations_.size());
  std::vector<const Operation*> newest;
  newest.reserve(kept);
  for (uint64_t i = count_ - kept; i < count_; ++i) newest.push_back(&operations_[i % operations_.size()]);
  std::sort(first_ranks_.begin(), first_ranks_.end());
  std::string process = first_ranks_.size() == 1 ? "rank" : "ranks";
  for (const int r : first_ranks_) process += format(" {}", r);
  if (!is_made_) {
    Result<std::string> made = driver::make_file(path_);
    if (!made.ok()) return format("no file can be made: {}", made.status().message());
    path_ = std::move(*made), is_made_ = true;
  }
  std::FILE* const file = std::fopen(path_.c_str(), "we");
  if (file == nullptr) return format("{} cannot be written: {}", path_, std::strerror(errno));
  write_trace(newest, process, count_ - kept, file);
  const bool whole = std::ferror(file) == 0;
  if (std::fclose(file) != 0 || !whole) return format("{} cannot be written whole: {}", path_, std::strerror(errno));
  return "";
}

}  // namespace moeccl::timeline
