// SPDX-License-Identifier: Apache-2.0
#include "src/driver/nccl_plugin.h"

#include <climits>
#include <cstdlib>

#include "src/base/trusted_library.h"
#include "src/driver/dynamic_library.h"

namespace moeccl::driver {
namespace {

Result<DynamicLibrary> open_file(const std::string& name) {
  std::string file = name;
  if (name.find('/') != std::string::npos) {
    if (char real[PATH_MAX]; realpath(name.c_str(), real) != nullptr) file = real;
    if (const std::string why = why_not_loaded(&file); !why.empty()) {
      return error(moecclUnsupported, "{}", name.starts_with('/') ? why : name + ": " + why);
    }
  }
  return DynamicLibrary::open(file, {});
}

}  // namespace

std::vector<std::string> plugin_files(const NcclPluginKind& kind, const std::string& entry) {
  std::vector<std::string> names = {entry};
  const bool path = entry.find('/') != std::string::npos;
  const bool library = entry.starts_with("lib") && entry.ends_with(".so");
  if (!path && !library) names.push_back(format("{}-{}.so", kind.prefix, entry));
  return names;
}

Result<NcclPlugin> open_plugin(const NcclPluginKind& kind, const std::string& entry) {
  std::string why_not;
  for (const std::string& name : plugin_files(kind, entry)) {
    Result<DynamicLibrary> library = open_file(name);
    if (!library.ok()) {
      why_not += (why_not.empty() ? "" : "; ") + library.status().message();
      continue;
    }
    for (int version = kind.newest; version >= kind.oldest; --version) {
      const void* const structure = library->symbol(format("{}{}", kind.symbol, version).c_str());
      if (structure == nullptr) continue;
      library->keep();
      return NcclPlugin{version, structure, name};
    }
    return error(moecclUnsupported, "{} exports none of {}{} to {}{}: it is no {}, or one for another NCCL", name,
                 kind.symbol, kind.oldest, kind.symbol, kind.newest, kind.what);
  }
  return error(moecclUnsupported, "{}", why_not);
}

}  // namespace moeccl::driver
