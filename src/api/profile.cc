// SPDX-License-Identifier: Apache-2.0
// Entry points of profile.h.
#include "moeccl/profile.h"

#include "src/api/convert.h"
#include "src/calibrate/calibrate.h"

using namespace moeccl;
using api::with_comm;
using comm::Communicator;

moecclResult_t moecclCalibrate(moecclComm_t handle, double budget_ms, size_t max_bytes) {
  return api::collective(handle, [&](Communicator& c) -> Status {
    MOECCL_TRY(api::outside_groups("moecclCalibrate"));
    comm::CalibrateOptions options;
    if (!(budget_ms >= 0 && budget_ms <= 3.6e6))
      return error(moecclInvalidArgument, "budget_ms is {}: give 0 to 3600000", budget_ms);
    if (budget_ms > 0) options.budget_ms = budget_ms;
    if (max_bytes > 0) options.max_bytes = max_bytes;
    if (options.max_bytes < 1024 || options.max_bytes > (size_t{1} << 30))
      return error(moecclInvalidArgument, "max_bytes is {}: give 1024 to 1073741824", max_bytes);
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
