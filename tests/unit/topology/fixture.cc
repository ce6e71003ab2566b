// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/topology/fixture.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "topology/hwloc_xml.h"
#include "topology/merge.h"

namespace moeccl::topology {

// Searches above the build folder, wherever that is in the source tree, and above the working directory.
std::string fixture_folder() {
  namespace fs = std::filesystem;
  std::error_code bad;
  for (const fs::path& from : {fs::read_symlink("/proc/self/exe", bad), fs::current_path(bad) / "x"})
    for (fs::path at = from.parent_path(); at.has_relative_path(); at = at.parent_path())
      if (fs::exists(at / "tests/fixtures/topology/dgx.xml", bad)) return at / "tests/fixtures/topology";
  ADD_FAILURE() << "tests/fixtures/topology was not found";
  return {};
}

std::string read_file(const std::string& path) {
  std::ifstream in(path);
  EXPECT_TRUE(in.good()) << path;
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

Graph fixture_part(const std::string& name) {
  const std::string file = name + ".xml";
  const auto part = read_hwloc_xml(read_file(fixture_folder() + "/" + file), file);
  EXPECT_TRUE(part.ok()) << part.status().message();
  return part.ok() ? part.value() : Graph();
}

Graph fixture(const std::string& name) {
  const auto graph = merge({fixture_part(name)});
  EXPECT_TRUE(graph.ok()) << graph.status().message();
  return graph.ok() ? graph.value() : Graph();
}

}  // namespace moeccl::topology
