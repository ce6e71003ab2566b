// SPDX-License-Identifier: Apache-2.0
#include "tools/moeccl_status.h"

#include <moeccl/moeccl.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "tools/postmortem.h"

namespace {

struct Options {
  std::vector<int> pids;
  std::vector<std::string> files;
  bool json = false;
} options;

bool status_of(int pid, std::string* text) {
  for (size_t needed = 1 << 16;;) {  // the text may grow meanwhile
    text->resize(needed);
    const size_t room = needed;
    if (moecclStatus(pid, text->data(), text->size(), &needed) != moecclSuccess) return false;
    if (needed > room) continue;
    text->resize(needed - 1);
    return true;
  }
}

// Returns whether a culprit is named.
bool print(tools::PostMortem& all) {
  bool found = false;
  std::fputs(all.report(&found).c_str(), stdout);
  return found;
}

}  // namespace

perf::App* add_status(perf::App& app) {
  perf::App* status = app.add_subcommand("status", "what the communicators of running processes do and wait for");
  status->add_option("pid", options.pids, "processes of this host")
      ->required()
      ->check(perf::positive())
      ->default_str("");
  status->add_flag("--json", options.json, "as moecclStatus writes it, one document for each process");
  return status;
}

perf::App* add_postmortem(perf::App& app) {
  perf::App* postmortem =
      app.add_subcommand("postmortem", "which rank waited for which, from the files of MOECCL_DUMP");
  postmortem->add_option("files", options.files, "the files of all processes of the job that left one")
      ->required()
      ->check(perf::existing_file())
      ->default_str("");
  return postmortem;
}

int run_status() {
  tools::PostMortem all(true);
  bool any = false;
  for (const int pid : options.pids) {
    std::string text;
    if (!status_of(pid, &text)) {
      std::fprintf(stderr, "status: %s\n", moecclGetLastError(nullptr));
      continue;
    }
    any = true;
    if (options.json)
      std::printf("%s\n", text.c_str());
    else
      all.add(text);
  }
  if (!any) return 1;
  if (!options.json) (void)print(all);
  return 0;
}

int run_postmortem() {
  tools::PostMortem all(false);
  size_t n_read = 0;
  for (const std::string& path : options.files) {
    std::ifstream file(path);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    try {
      all.add(text);
      ++n_read;
    } catch (const std::runtime_error& e) {  // a rank may have died while it wrote
      std::fprintf(stderr, "postmortem: %s %s: it is left out\n", path.c_str(), e.what());
    }
  }
  if (n_read == 0) return 2;
  return print(all) ? 0 : 1;
}
