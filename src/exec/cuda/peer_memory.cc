// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/peer_memory.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "src/base/log.h"

namespace moeccl::exec {

struct PeerMemory::Circle {
  std::vector<std::shared_ptr<const Owned>> all;
};

Result<PeerMemory> PeerMemory::create(driver::cuda::Context context, const Bytes& bytes) {
  Owned made;
  if (bytes.object > 0) {
    auto object = driver::cuda::VirtualMemory::create(context, bytes.object);
    if (object.ok())
      made.object = std::move(*object);
    else
      log(LogLevel::kInfo, "device memory is shared by IPC handles, because descriptors failed: {}",
          object.status().message());
  }
  if (made.object.data() == nullptr) {
    MOECCL_ASSIGN_OR_RETURN(made.memory, driver::cuda::Memory::device(context, bytes.plain));
  }
  PeerMemory m;
  m.own_ = std::make_shared<const Owned>(std::move(made));
  return m;
}

std::byte* PeerMemory::data() const {
  if (own_ == nullptr) return nullptr;
  return object() != nullptr ? object()->data() : own_->memory.data();
}

size_t PeerMemory::bytes() const {
  if (own_ == nullptr) return 0;
  return object() != nullptr ? object()->mapped_bytes() : own_->memory.bytes();
}

const driver::cuda::VirtualMemory* PeerMemory::object() const {
  return own_ != nullptr && own_->object.data() != nullptr ? &own_->object : nullptr;
}

void PeerMemory::join(std::byte* head) {
  static auto* const mutex = new std::mutex;
  static auto* const circles = new std::map<std::byte*, std::weak_ptr<Circle>>;
  const std::lock_guard lock(*mutex);
  std::erase_if(*circles, [](const auto& c) { return c.second.expired(); });
  circle_ = (*circles)[head].lock();
  if (circle_ == nullptr) (*circles)[head] = circle_ = std::make_shared<Circle>();
  circle_->all.push_back(own_);
}

}  // namespace moeccl::exec
