// SPDX-License-Identifier: Apache-2.0
// Fixtures by name: tests/fixtures/topology/NAME.xml, read and merged.
#pragma once

#include <string>

#include "topology/graph.h"

namespace moeccl::topology {

std::string fixture_folder();
std::string read_file(const std::string& path);  // a failure when there is none
Graph fixture(const std::string& name);          // complete: merged from the file's part alone
Graph fixture_part(const std::string& name);     // as the file gives it

}  // namespace moeccl::topology
