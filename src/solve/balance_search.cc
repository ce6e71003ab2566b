// SPDX-License-Identifier: Apache-2.0
// Local search of expert load balance. A change exchanges two slots, or takes a replica from one expert and gives its
// slot to another, so that numbers of replicas and places are chosen together.
#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "src/base/random.h"
#include "src/solve/balance_layer.h"

namespace moeccl::solve {
namespace {

constexpr size_t kNone = std::numeric_limits<size_t>::max();
// Slots whose shares are added in about the time that the rest of a step takes.
constexpr size_t kSlotsOfWork = 10;
constexpr double kLess = 1 - 1e-12;  // what a change lowers counts if it is above the rounding of sums

struct Change {
  size_t slot = 0, other = kNone;  // kNone: `slot` gets a replica of `expert`; otherwise both exchange theirs
  int32_t expert = 0;
};

class Search {
 public:
  Search(const BalanceShape& shape, Loads load, const BalanceTerms& terms, int64_t work)
      : shape_(shape),
        load_(load),
        terms_(terms),
        work_(work),
        work_of_gpu_(1 + static_cast<int64_t>(shape.per_gpu() / kSlotsOfWork)),
        gpu_of_(shape.slots),
        share_(shape.experts),
        slots_of_(shape.experts),
        full_(shape.gpus) {
    for (size_t s = 0; s < shape.slots; ++s) gpu_of_[s] = s / shape.per_gpu();
  }

  Slots run(const Slots& start) {
    best_ = start;
    judged_ = judge(shape_, load_, terms_, start);
    set(start);
    descend();
    while (work_ > 0 && judged_.cost > terms_.enough) {
      set(best_);
      kick();
      kick();
      descend();
    }
    return best_;
  }

 private:
  void set(const Slots& slots) {
    slots_ = slots;
    work_ -= static_cast<int64_t>(slots.size());
    for (auto& of : slots_of_) of.clear();
    for (size_t s = 0; s < slots.size(); ++s) slots_of(slots[s]).push_back(s);
    for (size_t e = 0; e < shape_.experts; ++e) share_[e] = load_[e] / static_cast<double>(slots_of_[e].size());
    for (size_t g = 0; g < shape_.gpus; ++g) sum(g);
  }
  std::vector<size_t>& slots_of(int32_t expert) { return slots_of_[static_cast<size_t>(expert)]; }
  double share(int32_t expert) const { return share_[static_cast<size_t>(expert)]; }
  double share_of(int32_t expert, size_t n) const {
    return load_[static_cast<size_t>(expert)] / static_cast<double>(n);
  }
  // Sums anew, so that a GPU's load does not depend on the changes that led to it.
  void sum(size_t gpu) {
    full_[gpu] = 0;
    for (size_t s = gpu * shape_.per_gpu(); s < (gpu + 1) * shape_.per_gpu(); ++s) full_[gpu] += share(slots_[s]);
  }

  // Empties the fullest GPU again and again, and keeps the best placement on the way. One change may lower the load of
  // one of several full GPUs only, so the walk goes on while moves cost more than they have gained so far.
  void descend() {
    for (;;) {
      const size_t gpu = static_cast<size_t>(std::max_element(full_.begin(), full_.end()) - full_.begin());
      if (full_[gpu] < judged_.fullest || terms_.move_cost > 0) {
        const Judged now = judge(shape_, load_, terms_, slots_);
        if (now.better_than(judged_)) judged_ = now, best_ = slots_;
      }
      if (work_ <= 0 || full_[gpu] <= terms_.enough || !find(gpu)) return;
      apply(*found_);
    }
  }

  // Finds the change that leaves the least load on the fullest GPU and on those that gain load.
  bool find(size_t gpu) {
    limit_ = full_[gpu] * kLess;
    found_.reset();
    const size_t first = gpu / shape_.pool_gpus() * shape_.pool_slots(), last = first + shape_.pool_slots();
    const size_t begin = gpu * shape_.per_gpu(), end = begin + shape_.per_gpu();
    for (size_t t = first; t < last && work_ > 0; ++t) {
      if (t == begin) t = end;
      if (t >= last) break;
      for (size_t s = begin; s < end; ++s) {
        const double less = share(slots_[s]) - share(slots_[t]);
        work_ -= 2;
        if (less > 0) weigh(std::max(full_[gpu] - less, full_[gpu_of_[t]] + less), {s, t, 0});
        if (slots_of(slots_[t]).size() > 1 && slots_[t] != slots_[s])
          weigh(fullest_after(t, slots_[s], gpu), {t, kNone, slots_[s]});
        if (slots_of(slots_[s]).size() > 1 && slots_[t] != slots_[s] && slots_of(slots_[t]).front() == t)
          weigh(fullest_after(s, slots_[t], gpu), {s, kNone, slots_[t]});
      }
    }
    return found_.has_value();
  }
  void weigh(double fullest, const Change& change) {
    if (fullest >= limit_) return;
    limit_ = fullest;
    found_ = change;
  }
  // Returns the largest load of the GPUs that gain load, and of `gpu`, when `slot` gets a replica of `expert`. Stops at
  // a load that is too large.
  double fullest_after(size_t slot, int32_t expert, size_t gpu) {
    const std::vector<size_t>& losers = slots_of(slots_[slot]);
    const double winner = share_of(expert, slots_of(expert).size() + 1);
    const double more = share_of(slots_[slot], losers.size() - 1) - share(slots_[slot]), less = winner - share(expert);
    const auto after = [&](size_t g) {
      work_ -= work_of_gpu_;
      double load = full_[g];
      for (size_t s = g * shape_.per_gpu(); s < (g + 1) * shape_.per_gpu(); ++s) {
        if (slots_[s] == slots_[slot]) load += s == slot ? winner - share(slots_[slot]) : more;
        if (slots_[s] == expert) load += less;
      }
      return load;
    };
    double fullest = after(gpu);
    for (size_t k = 0; k < losers.size() && fullest < limit_; ++k)
      fullest = std::max(fullest, after(gpu_of_[losers[k]]));
    return fullest;
  }

  void apply(const Change& change) {
    const int32_t before = slots_[change.slot];
    if (change.other == kNone) {
      auto& losers = slots_of(before);
      losers.erase(std::find(losers.begin(), losers.end(), change.slot));
      slots_of(change.expert).push_back(change.slot);
      slots_[change.slot] = change.expert;
      for (const int32_t e : {before, change.expert}) {
        share_[static_cast<size_t>(e)] = share_of(e, slots_of(e).size());
        for (const size_t s : slots_of(e)) sum(gpu_of_[s]);
      }
    } else {
      const int32_t after = slots_[change.other];
      std::replace(slots_of(before).begin(), slots_of(before).end(), change.slot, change.other);
      std::replace(slots_of(after).begin(), slots_of(after).end(), change.other, change.slot);
      std::swap(slots_[change.slot], slots_[change.other]);
      sum(gpu_of_[change.other]);
    }
    sum(gpu_of_[change.slot]);
  }
  // Makes a random change in the pool of the fullest GPU.
  void kick() {
    const size_t gpu = static_cast<size_t>(std::max_element(full_.begin(), full_.end()) - full_.begin());
    const size_t first = gpu / shape_.pool_gpus() * shape_.pool_slots();
    const size_t t = random_.below(2) == 0 ? gpu * shape_.per_gpu() + random_.below(shape_.per_gpu())
                                           : first + random_.below(shape_.pool_slots());
    shared_.clear();
    for (size_t s = first; s < first + shape_.pool_slots(); ++s)
      if (slots_[s] != slots_[t] && slots_of(slots_[s]).size() > 1) shared_.push_back(s);
    if (!shared_.empty() && random_.below(2) == 0) {
      apply({shared_[random_.below(shared_.size())], kNone, slots_[t]});
    } else {
      const size_t s = first + random_.below(shape_.pool_slots());
      if (slots_[s] != slots_[t]) apply({s, t, 0});
    }
  }

  const BalanceShape shape_;
  const Loads load_;
  const BalanceTerms terms_;
  int64_t work_;  // loads of GPUs that may yet be computed
  const int64_t work_of_gpu_;
  SplitMix64 random_{1};
  std::vector<size_t> gpu_of_;
  Slots slots_, best_;
  Judged judged_;  // of best_
  std::vector<double> share_;
  std::vector<std::vector<size_t>> slots_of_;
  std::vector<double> full_;  // the load of each GPU
  double limit_ = 0;          // what a change must come below
  std::optional<Change> found_;
  std::vector<size_t> shared_;
};

}  // namespace

double fullest_gpu(const BalanceShape& shape, Loads load, const Slots& slots) {
  std::vector<double> replicas(shape.experts);
  for (const int32_t e : slots) ++replicas[static_cast<size_t>(e)];
  double fullest = 0;
  for (size_t g = 0; g < shape.gpus; ++g) {
    double sum = 0;
    for (size_t s = g * shape.per_gpu(); s < (g + 1) * shape.per_gpu(); ++s)
      sum += load[static_cast<size_t>(slots[s])] / replicas[static_cast<size_t>(slots[s])];
    fullest = std::max(fullest, sum);
  }
  return fullest;
}

Judged judge(const BalanceShape& shape, Loads load, const BalanceTerms& terms, const Slots& slots) {
  Judged j;
  j.fullest = fullest_gpu(shape, load, slots);
  for (size_t s = 0; terms.current != nullptr && s < slots.size(); ++s) {
    const size_t begin = s - s % shape.per_gpu();
    const auto *held = terms.current + begin, *here = slots.data() + begin;
    if (std::find(held, held + shape.per_gpu(), slots[s]) == held + shape.per_gpu() &&
        std::find(here, slots.data() + s, slots[s]) == slots.data() + s)
      ++j.moved;
  }
  j.cost = std::max(j.fullest, terms.enough) + terms.move_cost * static_cast<double>(j.moved);
  return j;
}

Slots search_placement(const BalanceShape& shape, Loads load, const BalanceTerms& terms, const Slots& start,
                       int64_t work) {
  return Search(shape, load, terms, work).run(start);
}

}  // namespace moeccl::solve
