// SPDX-License-Identifier: Apache-2.0
// moecclSimulate without its C form: candidates on a topology, priced by simulation, as a page.
#pragma once

#include <string>

#include "moeccl/simulate.h"
#include "src/base/status.h"

namespace moeccl::comm {

Result<std::string> simulate(const moecclSimulateConfig_t& config);

// A file as text; the error names it. At most 256 MiB.
Result<std::string> read_file(const std::string& path);

}  // namespace moeccl::comm
