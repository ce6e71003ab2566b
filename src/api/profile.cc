// SPDX-License-Identifier: Apache-2.0
// Entry points of profile.h.
#include "moeccl/profile.h"

#include "src/api/convert.h"
#include "src/calibrate/calibrate.h"
#include "src/moe/creation.h"

using namespace moeccl;
using api::with_comm;
using comm::Communicator;

namespace {

Status check(double budget_ms, size_t max_bytes) {
  if (!(budget_ms >= 0 && budget_ms <= 3.6e6))
    return error(moecclInvalidArgument, "budget_ms is {}: give 0 to 3600000", budget_ms);
  if (max_bytes < 1024 || max_bytes > (size_t{1} << 30))
    return error(moecclInvalidArgument, "max_bytes is {}: give 1024 to 1073741824", max_bytes);
  return {};
}

// What ranks tell each other before they measure: one that may not would let the others wait until the timeout.
struct Asked {
  double budget_ms = 0;
  uint64_t max_bytes = 0;
  int32_t code = moecclSuccess;
  int32_t padding = 0;
};

Status agree(Communicator& comm, const comm::CalibrateOptions& options, const Status& own) {
  const Asked mine{options.budget_ms, options.max_bytes, own.code()};
  MOECCL_ASSIGN_OR_RETURN(const auto all, comm::answers_of(comm, mine, own, "fails in moecclCalibrate"));
  for (size_t r = 1; r < all.size(); ++r)
    if (all[r].budget_ms != all[0].budget_ms || all[r].max_bytes != all[0].max_bytes)
      return error(moecclMismatch,
                   "ranks disagree in moecclCalibrate: rank 0 gives budget_ms {} and max_bytes {}, rank {} gives {} "
                   "and {}",
                   all[0].budget_ms, all[0].max_bytes, r, all[r].budget_ms, all[r].max_bytes);
  return {};
}

}  // namespace

moecclResult_t moecclCalibrate(moecclComm_t handle, double budget_ms, size_t max_bytes) {
  return api::collective(handle, [&](Communicator& c) -> Status {
    MOECCL_TRY(api::outside_groups("moecclCalibrate"));
    comm::CalibrateOptions options;
    if (budget_ms > 0) options.budget_ms = budget_ms;
    if (max_bytes > 0) options.max_bytes = max_bytes;
    MOECCL_TRY(agree(c, options, check(budget_ms, options.max_bytes)));
    MOECCL_ASSIGN_OR_RETURN(const plan::Profile profile, comm::calibrate(c, options));
    return comm::use_profile(c, profile, {});
  });
}

moecclResult_t moecclProfileLoad(moecclComm_t handle, const char* path) {
  return api::collective(handle, [&](Communicator& c) -> Status {
    MOECCL_TRY(api::outside_groups("moecclProfileLoad"));
    if (path == nullptr) return api::null_argument("path", "a profile file");
    return comm::load_profile(c, path);
  });
}

moecclResult_t moecclProfileSave(moecclComm_t handle, const char* path) {
  return with_comm<api::kLocal>(handle, [&](Communicator& c) -> Status {
    if (path != nullptr && *path == '\0')
      return error(moecclInvalidArgument, "path is empty: give the name of a file, or NULL for the cache");
    return path == nullptr ? comm::save_profile_in_cache(c) : comm::save_profile(c, path);
  });
}
