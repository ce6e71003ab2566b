// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/failed_meetings.h"

#include <map>
#include <mutex>
#include <utility>

#include "src/base/clock.h"
#include "src/base/hash.h"
#include "src/bootstrap/handshake.h"
#include "src/driver/fork_page.h"

namespace moeccl::bootstrap {
namespace {

struct Failed {
  std::mutex mutex;
  std::map<std::pair<uint64_t, int>, Deadline> of_rank;  // by meeting and rank: when to forget
};

Failed& failed() {
  static constinit driver::PerProcess<Failed> all;
  return all.get();
}

}  // namespace

uint64_t meeting_number(const Key& key, uint32_t root_number) { return hash_combine(public_number(key), root_number); }

void FailedMeetings::add(uint64_t meeting, int rank, int64_t remember_ms) {
  const std::lock_guard lock(failed().mutex);
  std::erase_if(failed().of_rank, [](const auto& one) { return one.second.passed(); });
  failed().of_rank[{meeting, rank}] = Deadline::after_ms(remember_ms);
}

bool FailedMeetings::has(uint64_t meeting, int rank) {
  const std::lock_guard lock(failed().mutex);
  const auto found = failed().of_rank.find({meeting, rank});
  return found != failed().of_rank.end() && !found->second.passed();
}

}  // namespace moeccl::bootstrap
