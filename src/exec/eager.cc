// SPDX-License-Identifier: Apache-2.0
#include "src/exec/eager.h"

#include <algorithm>
#include <cstring>

namespace moeccl::exec {
namespace {

// The place of one rank's data in an AllToAllv's outbox. Peers check what they read here.
struct BlockPlace {
  uint16_t offset;   // bytes from the start of the data; kNotHere: the data did not fit
  uint16_t count;    // elements
  uint32_t expects;  // elements expected from that rank; kMany: that many or more, which no rank sends eagerly
};
constexpr uint16_t kNotHere = 0xffff;
constexpr uint32_t kMany = ~0u;
// Staging, which is written past the cache, is faster for larger blocks (2 ranks, 8 KiB: 2.5 us, here 6.3).
constexpr uint64_t kMostBlockBytes = 4 << 10;
static_assert(transport::kOutboxBytes < kNotHere && kMostBlockBytes < kNotHere);

}  // namespace

uint64_t eager_bytes(moecclOp_t op, uint32_t n_ranks, uint64_t block_bytes) {
  return plan::in_blocks(op, n_ranks) * block_bytes;
}

uint64_t eager_table_bytes(uint32_t n_ranks) { return n_ranks * sizeof(BlockPlace); }

bool runs_eagerly(moecclOp_t op, std::string_view algorithm, uint32_t n_ranks, uint64_t block_bytes) {
  if (n_ranks < 2 || !plan::facts(op).eager) return false;
  if (plan::facts(op).private_sizes) return eager_table_bytes(n_ranks) <= transport::kOutboxBytes / 2;
  return algorithm == "oneshot" && block_bytes <= transport::kEagerBytes &&
         eager_bytes(op, n_ranks, block_bytes) <= transport::kEagerBytes;
}

Eager::Eager(Fabric& fabric, const Operation& op)
    : AgreedTask(fabric, op, true), block_bytes_(op.signature.count * op.element_bytes) {}

bool Eager::gives() const { return !plan::root_gives(op_.signature.op) || fabric().rank == op_.signature.root; }

bool Eager::takes_all() const {
  return plan::root_takes(op_.signature.op) ? fabric().rank == op_.signature.root : !plan::root_gives(op_.signature.op);
}

Progress Eager::poll() {
  Fabric& f = fabric();
  if (rest_) {
    const Progress p = rest_->poll();
    return p == Progress::kFailed ? fail(rest_->status()) : p;
  }
  if (!given_) {
    if (sequence_ == 0) {
      take_number();
      if (is_timed()) note_begin();
    }
    if (const Progress p = enter(); p != Progress::kMoved) {
      note_begin();
      return p;
    }
    // Peers wait for this data, so everything else that others may want to know is written while it travels.
    give();
    given_ = true;
    note_begin();
    f.recorder.chose(record_, op_.choice.algorithm);
    publish();
    // If one rank's data does not fit here, all ranks use the plan: nothing that the others say could change that.
    // Sizes are compared at each peer's first signal.
    if (!all_fit_) {
      rest_.emplace(*this, op_);
      return Progress::kMoved;
    }
  }
  if (takes_all()) {
    for (; next_ < f.n_ranks; ++next_) {
      if (next_ == f.rank) continue;
      if (const Progress p = look(next_); p != Progress::kMoved) return p;
    }
  } else if (!gives()) {
    if (const Progress p = look(op_.signature.root); p != Progress::kMoved) return p;
  }
  if (!all_fit_) {
    // The plan needs the entries of all ranks, and a rank publishes only after it has given its data. look() has marked
    // each peer as entered, so later signals no longer compare sizes; that is done here.
    for (; published_ < f.n_ranks; ++published_) {
      if (published_ == f.rank) continue;
      if (!has_published(published_)) {
        waiting_peer_ = published_;
        return Progress::kBlocked;
      }
      if (Status s = check_blocks(published_); !s.ok()) return fail(std::move(s));
    }
    rest_.emplace(*this, op_);
    return Progress::kMoved;
  }
  take();
  fitted_ = is_v();
  return end(wire_bytes_);
}

void Eager::give() {
  if (!gives()) return;
  Fabric& f = fabric();
  if (is_v()) return give_blocks();
  transport::Outbox& box = *f.own->outbox(sequence_);
  const uint64_t bytes = eager_bytes(op_.signature.op, f.n_ranks, block_bytes_);
  if (op_.scaled) {
    f.kernels->scale_copy[op_.signature.type](box.data, op_.input, bytes / op_.element_bytes, op_.scale);
  } else if (bytes > 0) {
    std::memcpy(box.data, op_.input, bytes);
  }
  // Release: pairs with the acquire in look(); the data is visible there.
  box.word.store(static_cast<uint64_t>(tag_) << 32 | static_cast<uint32_t>(sequence_), std::memory_order_release);
}

Progress Eager::look(uint32_t peer) {
  Fabric& f = fabric();
  // Acquire: pairs with the release in give().
  const uint64_t word = f.outbox(peer, sequence_)->word.load(std::memory_order_acquire);
  if (static_cast<uint32_t>(word) != static_cast<uint32_t>(sequence_)) {
    waiting_peer_ = peer;
    return Progress::kBlocked;
  }
  if (const auto tag = static_cast<uint32_t>(word >> 32); tag != tag_) {
    if (!has_published(peer)) return Progress::kBlocked;  // it is about to publish: the difference can be named then
    if (Status s = check_tag(peer, tag); !s.ok()) return fail(std::move(s));
  }
  f.entered[peer] = sequence_;
  return is_v() ? look_at_block(peer) : Progress::kMoved;
}

void Eager::give_blocks() {
  Fabric& f = fabric();
  transport::Outbox& box = *f.own->outbox(sequence_);
  const auto tell = [&box](uint32_t rank, BlockPlace place) {
    std::memcpy(box.data + rank * sizeof(place), &place, sizeof(place));
  };
  constexpr BlockPlace kNone{kNotHere, 0, 0};  // also for the own block, which is not sent
  uint64_t offset = eager_table_bytes(f.n_ranks);
  for (uint32_t r = 0; r < f.n_ranks; ++r) {
    if (r == f.rank) {
      tell(r, kNone);
      continue;
    }
    const uint64_t count = op_.send_counts[r], bytes = std::min<uint64_t>(count, kMany) * op_.element_bytes;
    const uint64_t expected = std::min<uint64_t>(op_.recv_counts[r], kMany) * op_.element_bytes;
    all_fit_ = std::max(bytes, expected) <= kMostBlockBytes && offset + bytes <= transport::kOutboxBytes;
    if (!all_fit_) break;
    tell(r, {static_cast<uint16_t>(offset), static_cast<uint16_t>(count),
             static_cast<uint32_t>(std::min<uint64_t>(op_.recv_counts[r], kMany))});
    const auto* from = static_cast<const std::byte*>(op_.input) + op_.send_displs[r] * op_.element_bytes;
    if (bytes > 0) std::memcpy(box.data + offset, from, bytes);
    offset += bytes;
  }
  if (!all_fit_) {
    for (uint32_t r = 0; r < f.n_ranks; ++r) tell(r, kNone);
  }
  // Release: pairs with the acquire in look().
  box.word.store(static_cast<uint64_t>(tag_) << 32 | static_cast<uint32_t>(sequence_), std::memory_order_release);
}

Progress Eager::look_at_block(uint32_t peer) {
  Fabric& f = fabric();
  BlockPlace place;
  std::memcpy(&place, data_of(peer) + f.rank * sizeof(place), sizeof(place));
  if (place.offset == kNotHere) {
    all_fit_ = false;
    return Progress::kMoved;
  }
  const uint64_t we_send = std::min<uint64_t>(op_.send_counts[peer], kMany);
  if (place.count != op_.recv_counts[peer] || place.expects != we_send) {
    if (!has_published(peer)) return Progress::kBlocked;
    Status s = check_blocks(peer);  // provides the message; both come from the same counts
    return fail(s.ok() ? error(moecclRemoteError, "rank {} announces a block that differs from its entry", peer)
                       : std::move(s));
  }
  const uint64_t bytes = uint64_t{place.count} * op_.element_bytes;
  if (place.offset > transport::kOutboxBytes || bytes > transport::kOutboxBytes - place.offset) {
    return fail(error(moecclRemoteError, "rank {} announces {} bytes at {} of an outbox of {}", peer, bytes,
                      place.offset, transport::kOutboxBytes));
  }
  return Progress::kMoved;
}

void Eager::take_blocks() {
  Fabric& f = fabric();
  auto* out = static_cast<std::byte*>(op_.output);
  wire_bytes_ = 0;
  for (uint32_t r = 0; r < f.n_ranks; ++r) {
    const uint64_t bytes = op_.recv_counts[r] * op_.element_bytes;
    if (bytes == 0) continue;
    std::byte* const to = out + op_.recv_displs[r] * op_.element_bytes;
    if (r == f.rank) {
      std::memcpy(to, static_cast<const std::byte*>(op_.input) + op_.send_displs[r] * op_.element_bytes, bytes);
      continue;
    }
    BlockPlace place;
    std::memcpy(&place, data_of(r) + f.rank * sizeof(place), sizeof(place));
    // Read and limited again, because a peer that breaks the rules may have changed it meanwhile.
    const uint64_t offset = std::min<uint64_t>(place.offset, transport::kOutboxBytes - bytes);
    std::memcpy(to, data_of(r) + offset, bytes);
    wire_bytes_ += bytes;
  }
}

void Eager::take() {
  Fabric& f = fabric();
  if (is_v()) return take_blocks();
  if (takes_all() || !gives()) wire_bytes_ = (takes_all() ? f.n_ranks - 1 : 1) * block_bytes_;
  if (block_bytes_ == 0) return;
  auto* out = static_cast<std::byte*>(op_.output);
  const uint64_t own_block = f.rank * block_bytes_;
  const auto copy = [&](uint32_t block, uint32_t from, uint64_t offset) {
    std::byte* to = out + block * block_bytes_;
    const std::byte* src = given_by(from, offset);
    if (to != src) std::memcpy(to, src, block_bytes_);
  };
  switch (op_.signature.op) {
    case moecclOpBroadcast:
      return copy(0, op_.signature.root, 0);
    case moecclOpScatter:
      return copy(0, op_.signature.root, own_block);
    case moecclOpGather:
    case moecclOpAllGather:
      if (!takes_all()) return;
      for (uint32_t r = 0; r < f.n_ranks; ++r) copy(r, r, 0);
      return;
    case moecclOpAllToAll:
      for (uint32_t r = 0; r < f.n_ranks; ++r) copy(r, r, own_block);
      return;
    default: {
      if (!takes_all()) return;
      const uint64_t offset = op_.signature.op == moecclOpReduceScatter ? own_block : 0;
      std::vector<const void*>& srcs = f.execution.srcs;
      srcs.resize(f.n_ranks);
      for (uint32_t r = 0; r < f.n_ranks; ++r) srcs[r] = given_by(r, offset);
      kernels::ReduceArgs args;
      args.dst = out;
      args.srcs = srcs.data();
      args.count = op_.signature.count;
      args.n_srcs = f.n_ranks;
      args.divisor = op_.divisor;
      f.kernels->reduce[op_.signature.type][static_cast<size_t>(op_.reduce)](args);
    }
  }
}

Status run_eager(Fabric& fabric, const Operation& op) {
  Eager task(fabric, op);
  // A peer that runs on another core answers within a few polls.
  constexpr uint32_t kPolls = 20;
  for (uint32_t i = 0; i < kPolls && !fabric.crowded && fabric.engine == nullptr; ++i) {
    const Progress p = poll_contained(task);
    if (p == Progress::kDone) return {};
    if (p == Progress::kFailed) return give_up(task, task.status());
  }
  return drive(task);
}

std::string Eager::describe() const {
  if (rest_) return rest_->describe();
  const std::string where = sequence_ == 0 || entered_ ? "" : ", at its start";
  return format("{} #{} (count {}, plan {}{}, waiting for rank {})", op_name(op_.signature.op), sequence_,
                op_.signature.count, op_.choice.algorithm, where, waiting_peer_);
}

void Eager::let_go() {
  if (rest_) return rest_->let_go();
  fabric().recorder.end(record_, true);
}

void Eager::abandon() {
  if (rest_) rest_->abandon();
}

}  // namespace moeccl::exec
