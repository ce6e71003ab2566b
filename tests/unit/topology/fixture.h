// SPDX-License-Identifier: Apache-2.0
// Fixtures by name: reads and merges tests/fixtures/topology/NAME.xml.
#pragma once

#include <string>

#include "topology/graph.h"

namespace moeccl::topology {

std::string fixture_folder();
std::string read_file(const std::string& path);  // fails when there is no such file
Graph fixture(const std::string& name);          // complete: merged from the file's part only
Graph fixture_part(const std::string& name);     // as the file gives it

}  // namespace moeccl::topology
