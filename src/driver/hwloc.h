// SPDX-License-Identifier: Apache-2.0
// This machine as hwloc sees it, in hwloc's XML. The library is opened when asked for and through functions of plain
// types alone, so that it is needed neither to build nor to run.
#pragma once

#include <string>

#include "src/base/status.h"

namespace moeccl::driver {

struct HwlocExport {
  std::string version;  // "2.9.0"
  std::string xml;
};

// `library`: a path instead of libhwloc.so.15. Unsupported when there is no such library or it is older than 2.0.
// Takes some 10 ms on a small machine. hwloc's own plugins for GPUs stay out: they would start CUDA.
Result<HwlocExport> export_hwloc(const std::string& library = "");

}  // namespace moeccl::driver
