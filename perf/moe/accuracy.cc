// SPDX-License-Identifier: Apache-2.0
#include "perf/moe/accuracy.h"

#include <moeccl/version.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "perf/common/fail.h"
#include "perf/common/record.h"
#include "perf/common/stats.h"
#include "perf/common/svg.h"

namespace perf {
namespace {

using Json = nlohmann::ordered_json;

bool forced(const PlanTimes& p) { return p.asked != "auto" && p.asked != kFlatAgain; }

std::string fixed(double value, int digits) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

// The geometric mean, and the largest ratio with its place.
struct Ratios {
  double mean = 1, worst = 1;
  std::string worst_at;
};
Ratios ratios_of(const std::vector<AccuracyPoint>& points, double (AccuracyPoint::*ratio)() const) {
  Ratios r;
  double logs = 0;
  for (const AccuracyPoint& p : points) {
    const double value = (p.*ratio)();
    logs += std::log(value);
    if (value > r.worst || r.worst_at.empty()) {
      r.worst = value;
      r.worst_at = p.cell.name();
    }
  }
  if (!points.empty()) r.mean = std::exp(logs / static_cast<double>(points.size()));
  return r;
}

void judge(AccuracySummary& s, const std::vector<AccuracyPoint>& points, const AccuracyLimits& limits) {
  const auto say = [&](const std::string& what, double value, double limit, int digits, const std::string& at = "") {
    if (limit > 0 && value > limit)
      s.broken.push_back(what + " is " + fixed(value, digits) + ", the limit is " + fixed(limit, 2) +
                         (at.empty() ? "" : ": " + at));
  };
  const std::string of = " of " + std::to_string(s.n) + " points";
  if (s.n == 0) s.broken.push_back("no point was measured");
  if (s.n_wrong > 0) s.broken.push_back(std::to_string(s.n_wrong) + " rows or tokens are wrong");
  say("the regret's geometric mean", s.regret_mean, limits.regret_mean, 3);
  say("the worst regret", s.regret_worst, limits.regret_worst, 2, s.regret_worst_at);
  if (limits.over_flat && s.n_loses > 0)
    s.broken.push_back("auto takes more than " + fixed(kOverFlat, 2) + " times what flat takes, beyond noise, at " +
                       std::to_string(s.n_loses) + of);
  if (limits.error_median > 0 && s.n_errors == 0) s.broken.push_back("no plan has a prediction");
  say("the median error of predictions", s.error_median, limits.error_median, 3);
  if (s.n_wrong_choice > 0) s.broken.push_back("the command of M1 gives another plan than flat or hier:1");
  for (const AccuracyPoint& p : points)
    if (limits.choice > 0)
      say("the chosen plan's time over the best one's", p.choice_regret(), limits.choice * p.noise(), 3, p.cell.name());
}

Json point_json(const AccuracyPoint& p) {
  Json j = {{"name", p.cell.name()},
            {"topology", p.cell.topology},
            {"ranks", p.cell.ranks},
            {"levels", p.cell.levels},
            {"latency", p.cell.latency},
            {"tokens", p.cell.tokens},
            {"hidden", p.cell.hidden},
            {"topk", p.cell.top_k},
            {"experts", p.cell.n_experts},
            {"routing", p.cell.routing},
            {"chosen", p.plan("auto").ran},
            {"best", p.best().asked},
            {"regret", p.regret()},
            {"choice_regret", p.choice_regret()},
            {"auto_over_flat", p.over_flat()},
            {"flat_over_flat", p.flat_over_flat()},
            {"loses_to_flat", p.loses_to_flat()},
            {"steps_to_settle", p.steps_to_settle},
            {"times_again", p.times_again},
            {"nwrong", p.n_wrong},
            {"command", p.cell.command("auto," + p.best().asked)}};
  j["plans"] = Json::array();
  for (const PlanTimes& plan : p.plans)
    j["plans"].push_back({{"algo", plan.asked},
                          {"plan", plan.ran},
                          {"rounds_of_plan", plan.n_ran},
                          {"p50_us", median(plan.us)},
                          {"predicted_us", plan.predicted_us > 0 ? Json(plan.predicted_us) : Json()},
                          {"rounds_us", plan.us}});
  return j;
}

}  // namespace

std::string AccuracyCell::name() const {
  return std::to_string(levels) + " levels, " + (latency.empty() ? "" : "lat " + latency + ", ") +
         std::to_string(tokens) + " tokens, " + routing + ", top-" + std::to_string(top_k) + " of " +
         std::to_string(n_experts) + (of_m1 ? " (M1)" : "");
}

std::string AccuracyCell::command(const std::string& plans) const {
  return "build/perf/dispatch_combine_perf --procs " + std::to_string(ranks) + " --topology '" + topology +
         "' --pace --tokens " + std::to_string(tokens) + " --hidden " + std::to_string(hidden) + " --experts " +
         std::to_string(n_experts) + " --topk " + std::to_string(top_k) + " --routing " + routing + " --algo " + plans +
         " --update --explain";
}

const PlanTimes& AccuracyPoint::plan(const std::string& asked) const {
  for (const PlanTimes& p : plans)
    if (p.asked == asked) return p;
  fail(cell.name() + ": " + asked + " was not measured");
}

double AccuracyPoint::median_us(const std::string& asked) const { return median(plan(asked).us); }

const PlanTimes& AccuracyPoint::best() const {
  const PlanTimes* best = &plan("flat");
  for (const PlanTimes& p : plans)
    if (forced(p) && median(p.us) < median(best->us)) best = &p;
  return *best;
}

double AccuracyPoint::regret() const { return median_us("auto") / median(best().us); }
double AccuracyPoint::over_flat() const { return median_us("auto") / median_us("flat"); }
double AccuracyPoint::flat_over_flat() const { return median_us(kFlatAgain) / median_us("flat"); }

double AccuracyPoint::choice_regret() const {
  for (const PlanTimes& p : plans)
    if (forced(p) && p.ran == plan("auto").ran) return median(p.us) / median(best().us);
  return regret();
}
double AccuracyPoint::noise() const { return std::max(flat_over_flat(), 1 / flat_over_flat()); }
bool AccuracyPoint::loses_to_flat() const { return over_flat() > kOverFlat * noise(); }

bool AccuracyPoint::wrong_choice() const {
  const std::string& ran = plan("auto").ran;
  return cell.of_m1 && ran != "flat" && ran != "hier:1";
}

std::vector<double> AccuracyPoint::errors() const {
  std::vector<double> errors;
  for (const PlanTimes& p : plans)
    if (forced(p) && p.predicted_us > 0) errors.push_back(std::fabs(p.predicted_us / median(p.us) - 1));
  return errors;
}

AccuracySummary summarize(const std::vector<AccuracyPoint>& points, const AccuracyLimits& limits) {
  AccuracySummary s;
  s.n = points.size();
  const Ratios regret = ratios_of(points, &AccuracyPoint::regret), flat = ratios_of(points, &AccuracyPoint::over_flat),
               itself = ratios_of(points, &AccuracyPoint::flat_over_flat),
               choice = ratios_of(points, &AccuracyPoint::choice_regret);
  s.regret_mean = regret.mean, s.regret_worst = regret.worst, s.regret_worst_at = regret.worst_at;
  s.over_flat_mean = flat.mean, s.over_flat_worst = flat.worst, s.over_flat_worst_at = flat.worst_at;
  s.flat_over_flat_mean = itself.mean, s.flat_over_flat_worst = itself.worst;
  s.choice_mean = choice.mean, s.choice_worst = choice.worst, s.choice_worst_at = choice.worst_at;
  std::vector<double> errors;
  for (const AccuracyPoint& p : points) {
    s.n_over_flat += p.over_flat() > kOverFlat;
    s.n_flat_over_flat += p.flat_over_flat() > kOverFlat;
    s.n_loses += p.loses_to_flat();
    s.n_wrong_choice += p.wrong_choice();
    s.n_wrong += p.n_wrong;
    for (const double e : p.errors()) errors.push_back(e);
  }
  s.n_errors = errors.size();
  s.error_median = median(errors);
  judge(s, points, limits);
  return s;
}

std::string accuracy_json(const std::string& command, const std::vector<AccuracyPoint>& points,
                          const AccuracySummary& s, const AccuracyLimits& limits) {
  Json j;
  j["version"] = 1;
  j["moeccl_version"] = MOECCL_VERSION;
  j["time"] = time_of_day();
  j["command"] = command;
  j["emulated"] = true;
  j["limits"] = {{"regret_geomean", limits.regret_mean},
                 {"regret_worst", limits.regret_worst},
                 {"over_flat", limits.over_flat ? kOverFlat : 0},
                 {"error_median", limits.error_median},
                 {"choice_regret", limits.choice}};
  j["summary"] = {{"points", s.n},
                  {"regret_geomean", s.regret_mean},
                  {"regret_worst", s.regret_worst},
                  {"regret_worst_at", s.regret_worst_at},
                  {"auto_over_flat_geomean", s.over_flat_mean},
                  {"auto_over_flat_worst", s.over_flat_worst},
                  {"auto_over_flat_worst_at", s.over_flat_worst_at},
                  {"auto_over_flat_beyond_limit", s.n_over_flat},
                  {"auto_over_flat_beyond_noise", s.n_loses},
                  {"flat_over_flat_geomean", s.flat_over_flat_mean},
                  {"flat_over_flat_worst", s.flat_over_flat_worst},
                  {"flat_over_flat_beyond_limit", s.n_flat_over_flat},
                  {"choice_regret_geomean", s.choice_mean},
                  {"choice_regret_worst", s.choice_worst},
                  {"choice_regret_worst_at", s.choice_worst_at},
                  {"error_median", s.error_median},
                  {"predictions", s.n_errors},
                  {"nwrong", s.n_wrong},
                  {"broken", s.broken}};
  j["points"] = Json::array();
  for (const AccuracyPoint& p : points) j["points"].push_back(point_json(p));
  return j.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string accuracy_plot(const std::string& heading, const std::vector<AccuracyPoint>& points,
                          const AccuracySummary& s) {
  // There is one chart for each number of levels. A point's place is its number in the printed list.
  std::vector<BarChart> bars;
  LineChart predicted = {.title = "Predicted and measured time of every plan",
                         .x_label = "measured (us)",
                         .y_label = "predicted (us)",
                         .x_is_bytes = false,
                         .series = {}};
  double least = 1e300, most = 0;
  for (size_t i = 0; i < points.size(); i++) {
    const AccuracyPoint& p = points[i];
    const std::string title = std::to_string(p.cell.levels) + " levels, " + std::to_string(p.cell.ranks) +
                              " ranks: auto beside the best forced plan and flat, flat beside itself";
    if (bars.empty() || bars.back().title != title)
      bars.push_back({title, "ratio", {}, {"auto / best", "auto / flat", "flat / flat"}, {{}, {}, {}}});
    BarChart& chart = bars.back();
    chart.categories.push_back(std::to_string(i + 1));
    const double values[] = {p.regret(), p.over_flat(), p.flat_over_flat()};
    for (size_t v = 0; v < 3; v++) chart.values[v].push_back(values[v]);
    for (const PlanTimes& plan : p.plans) {
      if (!forced(plan) || plan.predicted_us <= 0) continue;
      const double took = median(plan.us);
      least = std::min(least, took);
      most = std::max(most, took);
      auto series = std::find_if(predicted.series.begin(), predicted.series.end(),
                                 [&](const Series& x) { return x.name == plan.asked; });
      if (series == predicted.series.end()) series = predicted.series.insert(series, Series{plan.asked, {}, {}, false});
      series->x.push_back(took);
      series->y.push_back(plan.predicted_us);
    }
  }
  if (most > 0) predicted.series.push_back({"equal", {least, most}, {least, most}});
  const std::string note = "EMULATED links. Regret: geometric mean " + fixed(s.regret_mean, 3) + ", worst " +
                           fixed(s.regret_worst, 2) + "; median error " + fixed(100 * s.error_median, 1) + " %.";
  return svg_page(heading, note, {predicted}, bars);
}

}  // namespace perf
