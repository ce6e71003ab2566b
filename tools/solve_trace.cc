// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "tools/solve.h"
#include "tools/waiting.h"

namespace tools {

void fail(const std::string& sentence) {
  std::fprintf(stderr, "moeccl: %s\n", sentence.c_str());
  std::exit(1);
}

void check(moecclResult_t result, const OptionNames& names) {
  if (result != moecclSuccess) fail(in_options(moecclGetLastError(nullptr), names));
}

void add_trace_options(perf::App& app, TraceOptions& o, Reads reads) {
  perf::Option* const trace =
      app.add_option("--trace", o.path, "routing trace (perf/TRACE.md); without it one is generated");
  app.add_option("--tokens", o.tokens, "generated trace: tokens of a step")
      ->check(perf::range(1, 1 << 24))
      ->excludes(trace);
  if (reads == Reads::kTokens) return;
  if (reads != Reads::kLoads) {
    app.add_option("--layer", o.layer, "layer of the trace");
    app.add_option("--step", o.step, "step of the trace");
  }
  app.add_option("--topk", o.k, "generated trace: experts per token")->check(perf::range(1, 64))->excludes(trace);
  app.add_option("--experts", o.experts, "generated trace: experts")->check(perf::range(1, 8192))->excludes(trace);
  if (reads == Reads::kRows) return;
  app.add_option("--zipf", o.zipf, "generated trace: exponent of the experts' popularity")
      ->check(perf::within(0, 10))
      ->excludes(trace);
}

perf::Trace load_trace(const TraceOptions& o) {
  perf::Trace t;
  if (!o.path.empty()) {
    const std::string wrong = perf::read_trace(o.path, t);
    if (!wrong.empty()) fail("--trace " + wrong);
  } else {
    if (o.k > o.experts) fail("--topk " + std::to_string(o.k) + ": more than --experts");
    t.n_layers = 2, t.n_steps = 2, t.n_tokens = o.tokens, t.k = o.k, t.n_experts = o.experts;
    watched("generating a trace", [&] {
      for (uint64_t s = 0; s < 4; ++s) {
        const auto made = perf::zipf_topk({static_cast<size_t>(o.tokens), o.k, o.experts}, {o.zipf, 1 + s / 2}, s);
        t.index.insert(t.index.end(), made.begin(), made.end());
      }
    });
    std::printf("generated trace: %d tokens, top-%d of %d experts, zipf %.2g (give --trace for a recorded routing)\n",
                t.n_tokens, t.k, t.n_experts, o.zipf);
  }
  if (o.layer < 0 || o.layer >= t.n_layers || o.step < 0 || o.step >= t.n_steps)
    fail("layer " + std::to_string(o.layer) + ", step " + std::to_string(o.step) + ": the trace has " +
         std::to_string(t.n_layers) + " layers of " + std::to_string(t.n_steps) + " steps");
  return t;
}

}  // namespace tools
