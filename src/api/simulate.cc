// SPDX-License-Identifier: Apache-2.0
// Entry point of simulate.h.
#include "moeccl/simulate.h"

#include "src/api/convert.h"
#include "src/base/adopt.h"
#include "src/calibrate/simulate.h"

using namespace moeccl;

moecclResult_t moecclSimulate(const moecclSimulateConfig_t* config, char* text, size_t text_bytes, size_t* needed) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(const moecclSimulateConfig_t mine, adopt(config, "config"));
    const auto i = static_cast<int>(mine.op);
    if (i < 0 || i >= MOECCL_NUM_OPS) return error(moecclInvalidArgument, "op is {}: give a moecclOp_t", i);
    return api::give_text(comm::simulate(mine), text, text_bytes, needed);
  });
}
