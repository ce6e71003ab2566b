// SPDX-License-Identifier: Apache-2.0
// One communicator's tuner: what it knows when NCCL asks, and what it then writes.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "plugins/tuner/abi.h"
#include "plugins/tuner/fabric.h"
#include "plugins/tuner/price.h"

namespace moeccl::tuner {

class Tuner {
 public:
  struct Setup {
    size_t n_ranks = 0, n_nodes = 0;
    Logger log = nullptr;
    const NvlDomains* domains = nullptr;   // null before v5
    const Constants* constants = nullptr;  // NCCL's own, null before v5
  };
  // Reads MOECCL_PROFILE and MOECCL_TUNER_RAILS, and says in the log what it will do.
  explicit Tuner(const Setup& setup);
  Tuner(const Tuner&) = delete;
  Tuner& operator=(const Tuner&) = delete;

  // Writes costs where the measured links say that an entry other than NCCL's cheapest is worth it; else writes
  // nothing. Called from any thread.
  void ask(int function, size_t bytes, int n_ops, float* table, int n_algorithms, int n_protocols);

 private:
  void prepare(const Setup& setup);
  using Costs = double[kAlgorithms][kProtocols];
  void price(const Ask& ask, const float* table, int n_algorithms, Costs& costs) const;
  void say(int level, const std::string& text) const;
  void say_change(const Ask& ask, int theirs, int ours, const Costs& costs);

  const Logger log_;
  Shape shape_;
  Constants nccl_;
  std::vector<Crossing> crossings_;              // empty: nothing is changed
  std::atomic<uint64_t> said_[kFunctions] = {};  // a bit for each power of two for which a change was logged
};

}  // namespace moeccl::tuner
