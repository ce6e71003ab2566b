// SPDX-License-Identifier: Apache-2.0
// This machine as hwloc sees it, in hwloc's XML. The library is opened on demand, and only through functions with plain
// types, so that neither building nor running needs it.
#pragma once

#include <string>

#include "src/base/status.h"

namespace moeccl::driver {

struct HwlocExport {
  std::string version;  // "2.9.0"
  std::string xml;
};

// `library` is a path to use instead of libhwloc.so.15. Returns Unsupported when there is no such library or it is
// older than 2.0. Takes about 10 ms on a small machine. hwloc's own GPU plugins are disabled, because they would start
// CUDA.
Result<HwlocExport> export_hwloc(const std::string& library = "");

}  // namespace moeccl::driver
