// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/messages/kernel_messages.h"

#include <algorithm>
#include <cstring>

namespace moeccl::exec {

using namespace moeccl::cuda;

namespace {

MessageBuffer buffer_of(const Message& m) {
  return {reinterpret_cast<uint8_t*>(m.data), m.bytes | static_cast<uint64_t>(m.type) << kMessageTypeShift};
}

}  // namespace

bool KernelMessages::reaches(uint32_t peer) const { return std::find(here_.begin(), here_.end(), peer) != here_.end(); }

size_t KernelMessages::memory_bytes() const {
  size_t bytes = 0;
  for (const List& l : lists_) bytes += l.memory.bytes();
  return bytes;
}

// A rank's box and slots for a peer stand at the peer's place among the ranks of the host.
std::vector<MessagePair> KernelMessages::pairs(std::span<std::byte* const> areas) const {
  const size_t slots = kMessageWays * kMessageBuffers * slot_bytes_;
  const auto box = [](std::byte* area, size_t place) { return reinterpret_cast<MessageBox*>(area) + place; };
  const auto slots_of = [&](std::byte* area, size_t place) {
    return reinterpret_cast<uint8_t*>(area) + message_boxes_bytes(here_.size()) + place * slots;
  };
  std::vector<MessagePair> all(areas.size());
  const auto own = static_cast<size_t>(std::find(here_.begin(), here_.end(), fabric_.rank) - here_.begin());
  for (size_t place = 0; place < here_.size(); ++place) {
    std::byte *const mine = areas[fabric_.rank], *const theirs = areas[here_[place]];
    all[here_[place]] = {box(mine, place), slots_of(mine, place), box(theirs, own), slots_of(theirs, own)};
  }
  return all;
}

Result<uint32_t> KernelMessages::fill(std::span<const Message> messages, driver::cuda::Context context, uint64_t number,
                                      uint64_t n_ended, MessagesArgs& a) {
  if (messages.size() > kMostMessages) {
    return error(moecclUnsupported, "a group of {} messages on CUDA memory: at most {} are possible", messages.size(),
                 kMostMessages);
  }
  std::map<std::pair<uint32_t, bool>, std::vector<const Message*>> channels;  // by peer and direction
  for (const Message& m : messages) channels[{m.peer, m.is_send}].push_back(&m);
  std::vector<MessageBuffer> buffers;
  uint32_t n_works = 0;
  const auto add = [&](uint32_t peer, uint8_t flags, size_t first) {
    uint32_t ways = 1;
    for (size_t i = first; i < buffers.size(); ++i)
      ways = std::max(ways, message_ways(message_bytes(buffers[i]), slot_bytes_));
    n_works += ways;
    a.channels[a.n_channels++] = {static_cast<uint16_t>(peer), static_cast<uint16_t>(first),
                                  static_cast<uint16_t>(buffers.size() - first), flags, static_cast<uint8_t>(ways)};
  };
  for (const auto& [key, list] : channels) {
    const auto& [peer, is_send] = key;
    const size_t first = buffers.size();
    if (peer == fabric_.rank) {
      if (is_send) continue;
      const auto& sends = channels[{peer, true}];  // the group has checked that they pair up
      for (size_t i = 0; i < list.size(); ++i) {
        MOECCL_TRY(check_own(peer, *sends[i], *list[i]));
        buffers.push_back(buffer_of(*list[i]));
        buffers.push_back(buffer_of(*sends[i]));
      }
      add(peer, kMessageSelf, first);
      continue;
    }
    // Its memory may have gone, and a message that it has sent is here.
    if (is_send && has_left(fabric_, peer)) {
      return error(moecclRemoteError,
                   "rank {} has destroyed its communicator and will not receive {} bytes from rank {}", peer,
                   list.front()->bytes, fabric_.rank);
    }
    for (const Message* m : list) buffers.push_back(buffer_of(*m));
    const bool direct = fabric_.link(peer).view().same_process;
    add(peer, static_cast<uint8_t>((is_send ? kMessageSends : 0) | (direct ? kMessageDirect : 0)), first);
  }
  a.slot_bytes = slot_bytes_;
  if (buffers.size() <= kMessagesInside) {
    std::copy(buffers.begin(), buffers.end(), a.messages);
  } else {
    MOECCL_ASSIGN_OR_RETURN(a.more, keep(buffers, context, number, n_ended));
  }
  return n_works;
}

Status KernelMessages::prepare(driver::cuda::Context context) {
  constexpr size_t kLists = 2, kMessages = 4096;
  for (size_t i = 0; i < kLists; ++i) {
    MOECCL_ASSIGN_OR_RETURN(auto memory, driver::cuda::Memory::pinned(context, kMessages * sizeof(MessageBuffer)));
    lists_.push_back({std::move(memory)});
  }
  return {};
}

Result<const MessageBuffer*> KernelMessages::keep(std::span<const MessageBuffer> messages,
                                                  driver::cuda::Context context, uint64_t number, uint64_t n_ended) {
  auto list = std::find_if(lists_.begin(), lists_.end(), [&](const List& l) {
    return !l.captured && l.number <= n_ended && l.memory.bytes() >= messages.size_bytes();
  });
  if (list == lists_.end()) {
    MOECCL_ASSIGN_OR_RETURN(auto memory, driver::cuda::Memory::pinned(context, messages.size_bytes()));
    lists_.push_back({std::move(memory)});
    list = lists_.end() - 1;
  }
  list->number = number;
  list->captured = number == 0;
  std::memcpy(list->memory.data(), messages.data(), messages.size_bytes());
  return reinterpret_cast<const MessageBuffer*>(list->memory.data());
}

}  // namespace moeccl::exec
