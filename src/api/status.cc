// SPDX-License-Identifier: Apache-2.0
// Entry point of status.h.
#include "moeccl/status.h"

#include "src/api/convert.h"
#include "src/exec/flight.h"

using namespace moeccl;

moecclResult_t moecclStatus(int pid, char* text, size_t bytes, size_t* needed) {
  return api::guarded(nullptr, [&] { return api::give_text(exec::flight_json(pid), text, bytes, needed); });
}
