// SPDX-License-Identifier: Apache-2.0
// Checks and times the algorithms on one rank.
#ifndef PERF_MOE_MOE_BENCH_H_
#define PERF_MOE_MOE_BENCH_H_

#include <moeccl/moe.h>

#include <functional>
#include <string>
#include <vector>

#include "perf/common/buffer.h"
#include "perf/common/progress.h"
#include "perf/common/team.h"
#include "perf/moe/moe_options.h"
#include "perf/moe/oracle.h"

namespace perf {

struct LevelTotal {
  std::string name;
  double rows = 0, bytes = 0, metadata_bytes = 0;  // of one dispatch, over all ranks
};

// One algorithm's figures over all ranks. Times are those of the slowest rank in each iteration.
struct MoeResult {
  std::string algorithm, plan;
  bool emulated = false;
  uint64_t n_wrong = 0;  // entries of the routing, rows and tokens
  std::vector<double> dispatch_us, combine_us, dispatch_backward_us, combine_backward_us;
  std::vector<std::string> ran;  // the plan of each iteration
  int steps_to_settle = 0;       // of auto, before its rounds
  double predicted_us = 0;       // 0: unknown
  double logical_bytes = 0;
  std::vector<LevelTotal> levels;
  std::string explanation;

  std::vector<double> total_us() const;
};

// Creates a layer as the options describe it. Collective.
moecclMoe_t create_layer(const MoeOptions& options, const std::vector<int32_t>& expert_rank, size_t max_tokens,
                         const std::string& algorithm, const Team& team);

class MoeBench {
 public:
  // Collective. All references must outlive it.
  MoeBench(const MoeOptions& options, const std::vector<RankRouting>& routing, const std::vector<int32_t>& expert_rank,
           const Team& team, Progress* progress);

  std::vector<MoeResult> run();

  // The following functions do the same in pieces, for studies that decide as they go. All ranks must decide alike.
  // Collective.
  // Creates and checks a candidate, which takes part in all rounds from now on. Returns its number.
  size_t add(const std::string& algorithm);
  // Times each candidate once per round. Each round starts with a different candidate, and every other round runs
  // backwards, so that no candidate always follows the same neighbour.
  void run_rounds(int rounds, bool keep);
  // Runs training steps of a candidate, which begin with moecclRoutingUpdate, until its plan has stayed the same for
  // kSteadySteps, but at most kMostSteps: `auto` tries plans in a layer's first steps. Returns how many.
  static constexpr int kSteadySteps = 8, kMostSteps = 64;
  int settle(size_t candidate);
  // Returns each candidate's kept rounds so far, of the slowest rank.
  std::vector<std::vector<double>> total_us() const;
  // Frees all candidates.
  std::vector<MoeResult> finish();

 private:
  enum Place : size_t { kDispatch, kCombine, kDispatchBackward, kCombineBackward, kTimedDispatchBackward, kPlaces };
  struct Candidate {
    MoeResult result;
    moecclMoe_t moe = nullptr;
    moecclRouting_t routing = nullptr;
    void* graphs[kPlaces] = {};  // with --cudagraph
  };
  using Operation = std::function<moecclResult_t(moecclStream_t)>;
  const RankRouting& mine() const { return routing_[static_cast<size_t>(team_.rank(0))]; }

  std::vector<std::string> algorithms() const;
  std::vector<MoeResult> run_in_turns(const std::vector<std::string>& algorithms);
  std::vector<double> slowest(const std::vector<double>& mine) const;
  Candidate create(const std::string& algorithm);
  void allocate();
  // Runs an operation to its end. With --cudagraph it is a replay of what prepare() has captured.
  void prepare(Candidate& c, Place place, const char* call, const Operation& operation);
  void run_once(Candidate& c, Place place, const char* call, const Operation& operation);
  void run(Candidate& c, Place place, const char* call, const Operation& operation);  // both
  uint64_t verify(Candidate& c);
  uint64_t verify_backward(Candidate& c);
  void update(Candidate& c);
  void fill_for_timing();
  void time_once(Candidate& c, bool keep);
  double timed(Candidate& c, Place place, const char* call, const Operation& operation);
  // The gradient of the weights passes through the host, which a graph cannot do.
  bool with_weights() const { return options_.layout == moecclLayoutExpertMajor && !options_.cuda_graph; }
  void conclude(Candidate& c);
  moecclRoutingInfo_t info(const Candidate& c) const;
  void demand(moecclResult_t result, const char* call) const;

  const MoeOptions& options_;
  const std::vector<RankRouting>& routing_;
  const std::vector<int32_t>& expert_rank_;
  const Team& team_;
  Progress* progress_;
  Oracle oracle_;
  Buffer tokens_, combined_, rows_, gradient_rows_;
  std::vector<float> gradient_weights_;
  std::vector<Candidate> candidates_;
  size_t n_rounds_ = 0;
  void* stream_ = nullptr;  // with --cudagraph
};

}  // namespace perf

#endif  // PERF_MOE_MOE_BENCH_H_
