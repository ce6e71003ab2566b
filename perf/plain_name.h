// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace perf {

// The name of the row of plain_perf.cc that this binary runs.
extern const char* const kPlainProgram;

}  // namespace perf
