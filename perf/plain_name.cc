// SPDX-License-Identifier: Apache-2.0
// The row of plain_perf.cc that a binary has: the one source that is compiled for each of them.
#include "perf/plain_name.h"

const char* const perf::kPlainProgram = PERF_PROGRAM;
