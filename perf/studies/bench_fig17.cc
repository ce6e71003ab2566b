// SPDX-License-Identifier: Apache-2.0
// Draws HybridEP's Fig. 17 from the model: speed-up over plain expert parallelism against the number of data centres,
// at a fixed domain size and at a fixed p, for several bandwidths. The configuration is in docs/solvers.md.
//   bench_fig17 docs/hybridep_fig17.svg
#include <cstdio>

#include "perf/common/shared_options.h"
#include "perf/common/svg.h"
#include "perf/common/text.h"
#include "src/solve/domains.h"

namespace {

double speedup(int32_t centres, double gbps, double data_bytes, double p) {
  const moeccl::solve::OneLevel v{static_cast<double>(centres), gbps * 1e9 / 8, 0.111, data_bytes, 0.36e6 / 50};
  return moeccl::solve::latency(v, 1) / moeccl::solve::latency(v, p);
}

perf::LineChart chart(const char* title, bool fixed_size) {
  perf::LineChart c;
  c.title = title;
  c.x_label = "data centres";
  c.y_label = "speed-up over EP";
  c.x_is_bytes = false;
  for (const double gbps : {1.0, 2.5, 5.0, 10.0, 25.6}) {
    perf::Series s;
    s.name = perf::number_text(gbps) + " Gbps";
    for (int32_t centres = 500; centres <= 1000; centres += 50) {
      s.x.push_back(centres);
      s.y.push_back(fixed_size ? speedup(centres, gbps, 24e6, 1 - 399.0 / (centres - 1))
                               : speedup(centres, gbps, 77e6, 0.2));
    }
    std::printf("%s, %g Gbps, 1000 data centres: %.2f\n", title, gbps, s.y.back());
    c.series.push_back(s);
  }
  return c;
}

}  // namespace

int main(int argc, char** argv) {
  std::string file;
  perf::App app("HybridEP's Fig. 17 from the model");
  perf::add_output(app, "file", file, "draw it into this SVG file");
  perf::parse_or_exit(app, argc, argv);
  const std::vector<perf::LineChart> charts = {chart("Fixed domain size", true), chart("Fixed p", false)};
  if (file.empty()) return 0;
  const std::string page = perf::svg_page("HybridEP Fig. 17 from the model",
                                          "Predicted, not measured; configuration: docs/solvers.md", charts, {});
  perf::write_or_fail({{file, page}});
  return 0;
}
