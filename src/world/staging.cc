// SPDX-License-Identifier: Apache-2.0
#include "src/world/staging.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "src/base/env.h"
#include "src/base/wire.h"
#include "src/driver/file.h"
#include "src/driver/limits.h"
#include "src/driver/memory.h"
#include "src/exec/message.h"
#include "src/plan/profile_file.h"

namespace moeccl::comm {
namespace {

// The messages of all peers share 2 MiB, so that memory does not grow with the square of the ranks.
uint64_t usual_slot_bytes(uint32_t n_ranks) {
  return std::clamp<uint64_t>((2u << 20) / (n_ranks * transport::shm::kMessageSlots), 1024, 128 << 10) / 64 * 64;
}

}  // namespace

plan::Profile profile_of_variable(const plan::LevelTree& tree, std::string* text) {
  if (env().profile.empty()) return {};
  const Result<std::string> read = driver::read_file(env().profile);
  if (!read.ok()) return {};
  if (text != nullptr) *text = *read;
  Result<plan::Profile> profile = plan::read_profile(*read, env().profile);
  return profile.ok() && plan::profile_fits(*profile, tree).ok() ? std::move(*profile) : plan::Profile();
}

uint64_t room_for_staging(const Sharers& ranks) {
  // Slots of messages take half as much as the staging, and CUDA memory between hosts takes it once more. With a
  // quarter for the staging, the program and its other communicators keep some of what is left.
  constexpr uint64_t kParts = 4;
  uint64_t room = std::min<uint64_t>(driver::memory_left(), driver::free_addresses()) / ranks.on_host;
  if (ranks.several_processes) room = std::min(room, driver::file_bytes_limit());
  // The limit counts what a rank registers once for each of its NICs, of which most ranks have one or two.
  if (ranks.several_hosts && env().net != "tcp") room = std::min(room, driver::lockable_left() / ranks.in_process / 2);
  return room / kParts;
}

Result<LineAndRoom> agree_on_line(bootstrap::Session& session, const LineAndRoom& mine, Deadline deadline) {
  Writer out;
  out.u32(mine.line.level);
  out.u64(mine.line.bytes);
  out.u64(mine.room);
  MOECCL_ASSIGN_OR_RETURN(const auto all, session.all_gather(out.view(), deadline));
  LineAndRoom least = mine;
  for (uint32_t r = 0; r < all.size(); ++r) {
    Reader in(all[r]);
    const plan::LongLine line{in.u32(), in.u64()};
    least.room = std::min(least.room, in.u64());
    if (!in.done()) return error(moecclRemoteError, "rank {} sent no readable line", r);
    if (std::pair(line.bytes, line.level) < std::pair(least.line.bytes, least.line.level)) least.line = line;
  }
  return least;
}

transport::shm::SegmentShape segment_shape(uint32_t n_ranks, uint32_t rank, uint64_t staging_bytes,
                                           const plan::LongLine& line) {
  transport::shm::SegmentShape s;
  s.n_ranks = n_ranks;
  s.rank = rank;
  // Both halves must start on cache lines.
  s.staging_bytes = staging_bytes / 128 * 128;
  // A long line has room for as much as is under way in a round trip and, again, while ranks copy; but never more than
  // half as much as the staging, which the user may limit.
  const uint64_t on_line = std::min(2 * line.bytes, staging_bytes / 2) / (n_ranks * transport::shm::kMessageSlots);
  s.message_bytes = std::max(usual_slot_bytes(n_ranks), on_line) / 64 * 64;
  return s;
}

std::vector<uint64_t> message_bytes(const plan::LevelTree& tree, const plan::LongLine& line,
                                    const transport::shm::SegmentShape& shape) {
  // Long parts of a message suit a long line only: elsewhere, the receiver would copy later, and what it can read
  // directly would be copied twice.
  std::vector<uint64_t> bytes(shape.n_ranks);
  for (uint32_t r = 0; r < shape.n_ranks; ++r) {
    const bool on_line = line.bytes > 0 && tree.level_between(shape.rank, r) <= line.level;
    bytes[r] = (on_line ? shape.message_bytes : usual_slot_bytes(shape.n_ranks)) - sizeof(exec::MessageSlotHeader);
  }
  return bytes;
}

Status with_remedy_of_staging(Status failure, uint64_t staging_bytes) {
  constexpr std::string_view kName = "MOECCL_STAGING_BYTES";
  if (failure.code() != moecclOutOfMemory || failure.message().find(kName) != std::string::npos) return failure;
  const size_t room = driver::free_addresses();
  return error(moecclOutOfMemory, "{}: set {}, of which a rank has {} here, lower{}", failure.message(), kName,
               staging_bytes,
               room == SIZE_MAX ? std::string()
                                : format("; or raise the limit of this process's addresses (ulimit -v), of which {} "
                                         "are left",
                                         room));
}

}  // namespace moeccl::comm
