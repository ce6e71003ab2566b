// SPDX-License-Identifier: Apache-2.0
#include <moeccl/moeccl.h>

#include <cstdio>
#include <string>

#include "tools/moeccl_topo.h"

namespace {
int n_ranks = 0;
}

perf::App* add_doctor(perf::App& app) {
  perf::App* doctor =
      app.add_subcommand("doctor", "what was found here, which transports ranks would use, what to fix");
  doctor->add_option("--ranks", n_ranks, "ranks on this host; default: one for each GPU, or each core")
      ->check(perf::range(0, 65535))
      ->default_str("");
  return doctor;
}

// Returns 0 when there is no problem, 1 when there are problems or the check failed.
int run_doctor() {
  std::string page(size_t{1} << 16, '\0');
  size_t needed = 0;
  int n_bad = 0;
  moecclResult_t rc = moecclDoctor(n_ranks, page.data(), page.size(), &needed, &n_bad);
  if (rc == moecclSuccess && needed > page.size()) {
    page.resize(needed);
    rc = moecclDoctor(n_ranks, page.data(), page.size(), nullptr, &n_bad);
  }
  if (rc != moecclSuccess) {
    std::fprintf(stderr, "doctor: %s\n", moecclGetLastError(nullptr));
    return 1;
  }
  std::fputs(page.c_str(), stdout);
  return n_bad == 0 ? 0 : 1;
}
