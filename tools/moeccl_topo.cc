// SPDX-License-Identifier: Apache-2.0
#include "tools/moeccl_topo.h"

#include <moeccl/moeccl.h>

#include <cstdio>
#include <string>

namespace {

struct TopoOptions {
  std::string source, svg;
  bool json = false, levels = false;
} options;

bool describe(moecclTopologyFormat_t format, std::string* text) {
  size_t needed = 0;
  const char* source = options.source.empty() ? nullptr : options.source.c_str();
  if (moecclTopologyDescribe(source, format, nullptr, 0, &needed) != moecclSuccess) return false;
  text->resize(needed);
  if (moecclTopologyDescribe(source, format, text->data(), text->size(), nullptr) != moecclSuccess) return false;
  text->pop_back();  // the final zero
  return true;
}

int fail() {
  std::fprintf(stderr, "topo: %s\n", moecclGetLastError(nullptr));
  return 1;
}

}  // namespace

perf::App* add_topo(perf::App& app) {
  perf::App* topo = app.add_subcommand("topo", "this machine, or one from a file: its tree, links, NICs and levels");
  topo->add_option("source", options.source,
                   "hwloc XML, MoECCL JSON or a synthetic text; without it, or \"auto\": this host");
  perf::Option* const json = topo->add_flag("--json", options.json, "as MoECCL's own file, for MOECCL_TOPOLOGY");
  topo->add_flag("--levels", options.levels, "only the levels that planners see")->excludes(json);
  topo->add_option("--svg", options.svg, "draw it into this file");
  return topo;
}

int run_topo() {
  std::string text;
  if (!options.svg.empty()) {
    if (!describe(moecclTopologySvg, &text)) return fail();
    std::FILE* out = std::fopen(options.svg.c_str(), "w");
    const bool written = out != nullptr && std::fwrite(text.data(), 1, text.size(), out) == text.size();
    if ((out != nullptr && std::fclose(out) != 0) || !written) {
      std::perror(options.svg.c_str());
      return 1;
    }
    if (!options.json && !options.levels) return 0;
  }
  if (!describe(options.json ? moecclTopologyJson : options.levels ? moecclTopologyLevels : moecclTopologyText, &text))
    return fail();
  std::fputs(text.c_str(), stdout);
  return 0;
}
