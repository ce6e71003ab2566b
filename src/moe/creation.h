// SPDX-License-Identifier: Apache-2.0
// The exchange before ranks do something together: whether each can take part, and the fields that must agree.
#pragma once

#include <cstddef>
#include <cstdint>

#include <string>
#include <vector>

#include "moeccl/types.h"
#include "src/base/status.h"
#include "src/comm/communicator.h"
#include "src/comm/split.h"

namespace moeccl::comm {

// Returns this rank's error for a failure of another rank, such as "rank 3 could not update its routing
// (moecclTimeout): see its own error".
inline Status failed_there(uint32_t rank, const std::string& what, int32_t code) {
  return error(moecclRemoteError, "rank {} {} ({}): see its own error", rank, what,
               moecclGetErrorString(static_cast<moecclResult_t>(code)));
}

// Collects every rank's answer, whose `code` says whether that rank can go on. All ranks leave with the same verdict.
// The exchange is all_gather(mine, bytes, all).
template <class Answer, class AllGather>
Result<std::vector<Answer>> gather_answers(uint32_t n_ranks, AllGather&& all_gather, const Answer& mine,
                                           const Status& own, const std::string& what) {
  std::vector<Answer> all(n_ranks);
  MOECCL_TRY(all_gather(&mine, sizeof(mine), all.data()));
  MOECCL_TRY(own);
  for (uint32_t r = 0; r < n_ranks; ++r)
    if (all[r].code != moecclSuccess) return failed_there(r, what, all[r].code);
  return all;
}

template <class Answer>
Result<std::vector<Answer>> answers_of(Communicator& comm, const Answer& mine, const Status& own,
                                       const std::string& what) {
  const auto all_gather = [&](const void* from, size_t n, void* to) { return all_gather_bytes(comm, from, n, to); };
  return gather_answers(comm.n_ranks(), all_gather, mine, own, what);
}

template <size_t N>
struct AgreedFields {
  double fields[N] = {};
  int32_t code = moecclSuccess;
  int32_t padding = 0;
};

// An answer has `fields`, one for each name.
template <size_t N, class Answer>
Status compare(const char* function, const char* const (&names)[N], const std::vector<Answer>& all) {
  for (uint32_t r = 1; r < all.size(); ++r)
    for (size_t i = 0; i < N; ++i)
      if (all[r].fields[i] != all[0].fields[i])
        return error(moecclMismatch, "ranks disagree on the config's {} in {}: rank 0 gives {}, rank {} gives {}",
                     names[i], function, all[0].fields[i], r, all[r].fields[i]);
  return {};
}

}  // namespace moeccl::comm
