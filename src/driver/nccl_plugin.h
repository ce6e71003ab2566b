// SPDX-License-Identifier: Apache-2.0
// Libraries of plugins that were made for NCCL, found by NCCL's own rules.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "src/base/status.h"

namespace moeccl::driver {

struct NcclPluginKind {
  const char* what;    // for messages: "net plugin"
  const char* prefix;  // of file names: "libnccl-net"
  const char* symbol;  // without its number: "ncclNetPlugin_v"
  int oldest, newest;  // versions
};

// Returns the file names to try for one entry of a variable: the entry itself, then <prefix>-<entry>.so if it is a bare
// name.
std::vector<std::string> plugin_files(const NcclPluginKind& kind, const std::string& entry);

struct NcclPlugin {
  int version = 0;
  const void* structure = nullptr;  // what the library exports for this version
  std::string file;
};
// Opens the first of an entry's files that can be opened, takes the newest version that it exports, and keeps the
// library open for the life of the process, because plugins have threads. Unsupported says for each file why not.
Result<NcclPlugin> open_plugin(const NcclPluginKind& kind, const std::string& entry);

}  // namespace moeccl::driver
