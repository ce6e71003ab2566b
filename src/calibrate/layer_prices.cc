// SPDX-License-Identifier: Apache-2.0
#include "src/calibrate/layer_prices.h"

#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "src/driver/thread.h"

namespace moeccl::comm {

namespace {

// The most steps of each of two plans that are priced at the same time: half a GiB each.
constexpr uint64_t kMostStepsAtOnce = 8u << 20;

// Runs task(0) to task(n - 1) on this thread and, unless `alone`, on a second one.
Status run_tasks(size_t n, bool alone, const std::function<Status(size_t)>& task) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    return contained([&]() -> Status {
      for (size_t i = next.fetch_add(1); i < n; i = next.fetch_add(1)) MOECCL_TRY(task(i));
      return {};
    });
  };
  Status there;
  Result<std::thread> other = error(moecclUnsupported, "one thread is wanted");
  if (!alone) other = driver::start_thread("moeccl-price", [&] { there = work(); });
  Status here = work();
  if (other.ok()) other->join();
  MOECCL_TRY(there);
  return here;
}

}  // namespace

Status count_layer(std::deque<LayerPlan>& plans, const algo::RoutedLayer& layer,
                   const std::function<std::string(uint64_t steps)>& refuse) {
  MOECCL_TRY(run_tasks(plans.size(), false, [&](size_t i) -> Status {
    LayerPlan& p = plans[i];
    MOECCL_ASSIGN_OR_RETURN(p.traffic, algo::count_traffic(p.paths, layer));
    p.refusal = refuse(algo::moe_steps(p.traffic));
    return {};
  }));
  // flat and hier:1 are one plan if no rank has two experts of a token.
  for (size_t i = 0; i < plans.size(); ++i) {
    for (size_t e = 0; e < i && plans[i].traffic.n_hops == 1 && plans[i].same == nullptr; ++e)
      if (plans[e].priced() && plans[e].traffic == plans[i].traffic) plans[i].same = &plans[e];
  }
  return {};
}

Status price_layer(std::deque<LayerPlan>& plans, const plan::LevelTree& tree, const plan::Profile& profile,
                   uint64_t row_bytes) {
  std::vector<std::pair<LayerPlan*, bool>> tasks;  // the longer ones, which are dispatches, come first
  bool large = false;
  for (const bool back : {false, true}) {
    for (LayerPlan& p : plans) {
      if (!p.priced()) continue;
      tasks.emplace_back(&p, back);
      large = large || algo::moe_steps(p.traffic) > kMostStepsAtOnce;
    }
  }
  return run_tasks(tasks.size(), large, [&](size_t i) -> Status {
    const auto [p, back] = tasks[i];
    (back ? p->combine : p->dispatch) =
        algo::moe_price(back ? moecclOpCombine : moecclOpDispatch, p->paths, p->traffic, tree, profile, row_bytes);
    return {};
  });
}

}  // namespace moeccl::comm
