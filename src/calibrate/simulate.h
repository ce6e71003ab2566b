// SPDX-License-Identifier: Apache-2.0
// moecclSimulate without its C form: prices candidates on a topology by simulation and returns a page.
#pragma once

#include <string>

#include "moeccl/simulate.h"
#include "src/base/status.h"

namespace moeccl::comm {

Result<std::string> simulate(const moecclSimulateConfig_t& config);

}  // namespace moeccl::comm
