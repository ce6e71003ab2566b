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
#include "src/plan/profile_file.h"

namespace moeccl::comm {

plan::Profile profile_of_variable(const plan::LevelTree& tree) {
  if (env().profile.empty()) return {};
  const Result<std::string> text = driver::read_file(env().profile);
  if (!text.ok()) return {};
  Result<plan::Profile> profile = plan::read_profile(*text, env().profile);
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
