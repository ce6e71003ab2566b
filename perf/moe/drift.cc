// SPDX-License-Identifier: Apache-2.0
#include "perf/moe/drift.h"

#include <moeccl/version.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "perf/common/record.h"
#include "perf/common/stats.h"
#include "perf/common/svg.h"

namespace perf {
namespace {

using Json = nlohmann::ordered_json;

std::string fixed(double value, int digits) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

// Returns the median of each plan over the steps.
std::vector<double> medians(const DriftTrace& trace, size_t first, size_t end) {
  std::vector<double> all;
  for (size_t p = 0; p < trace.plans.size(); p++) {
    std::vector<double> us;
    for (size_t s = first; s < end; s++) us.push_back(trace.steps[s].forced_us[p]);
    all.push_back(median(us));
  }
  return all;
}

// Returns the first step after which nearly all steps run a good plan.
int followed_in(const std::vector<bool>& good) {
  int n_good = 0, found = -1;
  for (size_t back = 1; back <= good.size(); back++) {
    const size_t at = good.size() - back;
    n_good += good[at];
    if (good[at] && n_good >= kStays * static_cast<double>(back)) found = static_cast<int>(at);
  }
  return found;
}

}  // namespace

DriftSummary summarize(const DriftTrace& trace) {
  DriftSummary s;
  double auto_us = 0, oracle_us = 0;
  size_t before = 0;  // the best plan of the preceding phase
  for (size_t first = 0; first < trace.steps.size();) {
    DriftPhase phase;
    phase.first = first;
    const size_t number = trace.steps[first].phase;
    size_t end = first;
    while (end < trace.steps.size() && trace.steps[end].phase == number) end++;
    phase.name = trace.phases[number];
    phase.n_steps = end - first;
    const std::vector<double> us = medians(trace, first, end);
    const auto best = static_cast<size_t>(std::min_element(us.begin(), us.end()) - us.begin());
    phase.best = trace.plans[best];
    phase.best_us = us[best];
    phase.forced_us = us;
    if (!s.phases.empty()) phase.keeping = us[before] / us[best];
    std::vector<bool> good;
    for (size_t at = first; at < end; at++) {
      const DriftStep& step = trace.steps[at];
      const auto ran = std::find(trace.plans.begin(), trace.plans.end(), step.plan) - trace.plans.begin();
      good.push_back(static_cast<size_t>(ran) < us.size() && us[static_cast<size_t>(ran)] <= kGood * us[best]);
      phase.auto_us += step.auto_us;
      phase.oracle_us += step.forced_us[best];
    }
    phase.followed_in = followed_in(good);
    if (!s.phases.empty() && phase.keeping < kDiffers) s.shows = false;
    if (!s.phases.empty() && (phase.followed_in < 0 || phase.followed_in > kFollowWithin))
      s.broken.push_back("phase " + std::to_string(number + 1) + " (" + phase.name + "): auto " +
                         (phase.followed_in < 0 ? "never followed"
                                                : "followed after " + std::to_string(phase.followed_in) + " steps") +
                         ", the limit is " + std::to_string(kFollowWithin));
    auto_us += phase.auto_us;
    oracle_us += phase.oracle_us;
    s.phases.push_back(phase);
    before = best;
    first = end;
  }
  s.over_oracle = oracle_us > 0 ? auto_us / oracle_us : 0;
  if (s.over_oracle > kOverOracle)
    s.broken.push_back("auto's total time is " + fixed(s.over_oracle, 3) + " times the oracle's, the limit is " +
                       fixed(kOverOracle, 2));
  if (s.phases.size() < 2) s.shows = false;
  return s;
}

std::string drift_json(const std::string& command, const DriftTrace& trace, const DriftSummary& s) {
  Json j;
  j["version"] = 1;
  j["moeccl_version"] = MOECCL_VERSION;
  j["time"] = time_of_day();
  j["command"] = command;
  j["emulated"] = true;
  j["limits"] = {{"steps", kFollowWithin}, {"over_oracle", kOverOracle}, {"keeping", kDiffers}};
  j["over_oracle"] = s.over_oracle;
  j["shows"] = s.shows;
  j["broken"] = s.broken;
  j["phases"] = Json::array();
  for (const DriftPhase& p : s.phases)
    j["phases"].push_back({{"name", p.name},
                           {"first_step", p.first},
                           {"steps", p.n_steps},
                           {"best", p.best},
                           {"best_p50_us", p.best_us},
                           {"forced_p50_us", p.forced_us},
                           {"keeping_the_plan_before", p.keeping},
                           {"followed_in", p.followed_in},
                           {"auto_us", p.auto_us},
                           {"oracle_us", p.oracle_us}});
  j["plans"] = trace.plans;
  j["steps"] = Json::array();
  for (const DriftStep& step : trace.steps) j["steps"].push_back({step.phase, step.plan, step.auto_us, step.forced_us});
  return j.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string drift_plot(const std::string& heading, const DriftTrace& trace, const DriftSummary& s) {
  LineChart chart = {
      .title = "Time of each step", .x_label = "step", .y_label = "us", .x_is_bytes = false, .series = {}};
  const auto add = [&](const std::string& name, const auto& us_of) {
    Series series{name, {}, {}};
    for (size_t i = 0; i < trace.steps.size(); i++) {
      series.x.push_back(static_cast<double>(i + 1));
      series.y.push_back(us_of(trace.steps[i]));
    }
    chart.series.push_back(std::move(series));
  };
  add("auto", [](const DriftStep& step) { return step.auto_us; });
  for (size_t p = 0; p < trace.plans.size(); p++)
    add(trace.plans[p], [p](const DriftStep& step) { return step.forced_us[p]; });
  std::string note = "EMULATED links. auto / oracle: " + fixed(s.over_oracle, 3);
  for (const DriftPhase& p : s.phases)
    note += "; " + p.name + ": best " + p.best + ", followed in " + std::to_string(p.followed_in);
  return svg_page(heading, note, {chart}, {});
}

}  // namespace perf
