// SPDX-License-Identifier: Apache-2.0
// Times MoECCL and another library in turn, in the same processes and on the same buffers.
#ifndef PERF_VERSUS_VERSUS_H_
#define PERF_VERSUS_VERSUS_H_

#include <moeccl/collectives.h>

#include <string>
#include <vector>

#include "perf/common/buffer.h"

namespace perf {

// Shares of an AllToAllv's blocks. kDistance: as in nccl-tests, more distant ranks get more. kUniform: all are equal.
// kZipf: rank r gets 1 / (r + 1) of rank 0's share, as the experts of a skewed router do.
enum class Split { kDistance, kUniform, kZipf };
enum class VersusOp { kAllReduce, kReduceScatter, kAllGather, kAllToAll, kAllToAllv };

struct VersusOptions {
  size_t min_bytes = 8, max_bytes = size_t{64} << 20;
  int step_factor = 4;
  std::vector<VersusOp> ops = {VersusOp::kAllReduce, VersusOp::kReduceScatter, VersusOp::kAllGather,
                               VersusOp::kAllToAll, VersusOp::kAllToAllv};
  Split split = Split::kDistance;
  Memory memory = Memory::kMalloc;
  bool rival_on_heap = false;  // false: the other library has ordinary memory, like a program without MoECCL
  int repetitions = 9;         // turns of each library
  double turn_us = 20000;      // target time of one turn
  int procs = 0;               // ranks to fork, where the program forks
  std::string output_file;
  bool quick = false;
  bool tuned = false;  // Open MPI as its experts set it for shared memory
};
VersusOptions parse_versus_options(int argc, char** argv, const char* program, bool forks);

// One operation at one size on one rank, in floats.
struct Exchange {
  VersusOp op;
  Split split;
  size_t bytes;  // nccl-tests size
  size_t count;  // of the operation's own call: all elements, or those of one block
  size_t n_send, n_recv;
  std::vector<size_t> send_counts, send_displs, recv_counts, recv_displs;  // alltoallv
  float* send;
  float* recv;
};

// The other library as one rank sees it.
class Rival {
 public:
  virtual ~Rival() = default;
  virtual const char* name() const = 0;
  virtual int rank() const = 0;
  virtual int n_ranks() const = 0;
  virtual void barrier() = 0;
  virtual double max(double value) = 0;  // over ranks
  // Sets up what is needed once per size, outside the timing. The exchange outlives the calls of run().
  virtual void prepare(const Exchange& exchange) = 0;
  virtual void run() = 0;
};

struct VersusPoint {
  VersusOp op;
  size_t bytes = 0, count = 0;
  double rival_us = 0, moeccl_us = 0;             // medians of the turns
  std::vector<double> rival_turns, moeccl_turns;  // the slowest rank's us of each turn
  // Above 1, MoECCL is faster.
  double ratio() const { return rival_us / moeccl_us; }
  // The same on both sides of 1: to measure again only what MoECCL loses would raise the mean of two equal libraries.
  bool is_close() const { return ratio() >= kClose && ratio() <= 1 / kClose; }
  static constexpr double kClose = 0.8;
};

// Checks the results of both libraries, then times them. Every rank gets the same figures. Points whose ratio lies
// between 0.8 and 1.25 are timed again at the end, up to twice, and all their turns count, because a host that moves
// its cores for some seconds slows what runs in them. Collective.
std::vector<VersusPoint> run_versus(const VersusOptions& options, Rival& rival, moecclComm_t comm);

// Prints the table and writes the JSON, on rank 0. Returns the exit status.
int report_versus(const VersusOptions& options, const Rival& rival, const std::vector<VersusPoint>& points);

const char* op_name(VersusOp op);

}  // namespace perf

#endif  // PERF_VERSUS_VERSUS_H_
