// SPDX-License-Identifier: Apache-2.0
// What ranks that do something together tell each other: whether they can, and the fields that must be the same.
#pragma once

#include <cstddef>
#include <cstdint>

#include <string>
#include <vector>

#include "moeccl/types.h"
#include "src/base/status.h"

namespace moeccl::comm {

// What a rank says of another one's failure: "rank 3 could not update its routing (moecclTimeout): see its own error".
inline Status failed_there(uint32_t rank, const std::string& what, int32_t code) {
  return error(moecclRemoteError, "rank {} {} ({}): see its own error", rank, what,
               moecclGetErrorString(static_cast<moecclResult_t>(code)));
}

// Every rank's answer, whose `code` says whether it can go on; all leave together. all_gather(mine, bytes, all).
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

template <size_t N>
struct AgreedFields {
  double fields[N] = {};
  int32_t code = moecclSuccess;
  int32_t padding = 0;
};

template <size_t N>
Status compare(const char* function, const char* const (&names)[N], const std::vector<AgreedFields<N>>& all) {
  for (uint32_t r = 1; r < all.size(); ++r)
    for (size_t i = 0; i < N; ++i)
      if (all[r].fields[i] != all[0].fields[i])
        return error(moecclMismatch, "ranks disagree on the config's {} in {}: rank 0 gives {}, rank {} gives {}",
                     names[i], function, all[0].fields[i], r, all[r].fields[i]);
  return {};
}

}  // namespace moeccl::comm
