// SPDX-License-Identifier: Apache-2.0
// Compares duplication rates of uniform routing with HierMoE's Table II: of the k rows that a token would send without
// deduplication, the share that deduplication over G groups of experts saves, 1 - distinct groups / k. The paper prints
// whole percents, so the counted rates are rounded to whole percents before they are compared.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "perf/common/routing.h"
#include "perf/common/shared_options.h"

namespace {

constexpr int kExperts = 256;
constexpr size_t kTokens = 200000;  // the error of a rate is below 0.1 points
constexpr int kTopK[] = {2, 4, 6, 8};
struct TableRow {
  int n_groups;
  int percent[4];  // the paper's
};
constexpr TableRow kPaper[] = {{32, {2, 4, 7, 9}}, {16, {3, 9, 14, 18}}, {8, {6, 17, 27, 34}}, {4, {12, 32, 46, 55}}};

double duplication_percent(int n_groups, int k) {
  const perf::TopkShape shape = {.n_tokens = kTokens, .k = k, .n_experts = kExperts};
  const std::vector<int32_t> index = perf::uniform_topk(shape, 2024);
  size_t distinct = 0;
  for (size_t t = 0; t < kTokens; t++) {
    std::vector<bool> reached(static_cast<size_t>(n_groups));
    for (size_t j = t * static_cast<size_t>(k); j < (t + 1) * static_cast<size_t>(k); j++) {
      const size_t group = static_cast<size_t>(index[j] * n_groups / kExperts);
      distinct += reached[group] ? 0 : 1;
      reached[group] = true;
    }
  }
  return 100 * (1 - static_cast<double>(distinct) / static_cast<double>(index.size()));
}

}  // namespace

int main(int argc, char** argv) {
  perf::App app("Duplication rates of uniform routing beside HierMoE's Table II");
  perf::parse_or_exit(app, argc, argv);
  double worst = 0, worst_unrounded = 0;
  std::printf("# Duplication rate (%%), uniform routing over %d experts, %zu tokens; HierMoE Table II beside it\n",
              kExperts, kTokens);
  std::printf("# groups  top-k  counted  rounded  paper  difference\n");
  for (const TableRow& row : kPaper)
    for (size_t i = 0; i < std::size(kTopK); i++) {
      const double counted = duplication_percent(row.n_groups, kTopK[i]);
      const double difference = std::round(counted) - row.percent[i];
      worst = std::fmax(worst, std::fabs(difference));
      worst_unrounded = std::fmax(worst_unrounded, std::fabs(counted - row.percent[i]));
      std::printf("  %6d  %5d  %7.2f  %7.0f  %5d  %+10.0f\n", row.n_groups, kTopK[i], counted, std::round(counted),
                  row.percent[i], difference);
    }
  std::printf("# largest difference: %.0f percentage points (%.2f before rounding) %s\n", worst, worst_unrounded,
              worst <= 1 ? "OK" : "FAILED");
  return worst <= 1 ? 0 : 1;
}
