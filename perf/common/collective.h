// SPDX-License-Identifier: Apache-2.0
// The properties that distinguish the *_perf binaries: shapes, the call, and the data that must arrive.
#ifndef PERF_COMMON_COLLECTIVE_H_
#define PERF_COMMON_COLLECTIVE_H_

#include <moeccl/collectives.h>
#include <moeccl/plan.h>

#include <cstddef>
#include <vector>

#include "perf/common/options.h"

namespace perf {

// Element counts for one nccl-tests size.
struct Shape {
  size_t send = 0, recv = 0;  // in each rank's buffers
  size_t count = 0;           // the count of the operation's own call
  // In place, rank r sends from r * send_in_place and receives at r * recv_in_place of one buffer.
  size_t send_in_place = 0, recv_in_place = 0;
};

struct Call {
  const void* send;
  void* recv;
  size_t count;
  moecclDataType_t type;
  moecclRedOp_t op;
  int root;
  int rank, n_ranks;
  int round;  // see Collective::rounds
  moecclComm_t comm;
  moecclStream_t stream;
};

// A run of elements that must arrive: elements first .. first + count - 1 of the input of rank `source`.
struct Segment {
  int source;  // or kReduced: of the reduction over all inputs
  size_t first, count;
};
inline constexpr int kReduced = -1;

struct Place {
  int rank, n_ranks, root;
  size_t element_bytes;
};

// kTimed: sends what it receives into, so there is no right result, and nccl-tests prints N/A for #wrong.
enum class InPlace { kNone, kTimed, kChecked };

struct Collective {
  const char* program;  // all_reduce_perf
  moecclOp_t op;
  bool reduces, rooted;
  InPlace in_place;
  double (*bus_factor)(int n_ranks);
  // elements: the nccl-tests size divided by the element's bytes.
  Shape (*shape)(size_t elements, size_t element_bytes, int n_ranks);
  moecclResult_t (*run)(const Call& call);
  // Returns what arrives at place.rank, in the order of its receive buffer.
  std::vector<Segment> (*expected)(const Place& place, size_t count);
  // May be null. Reads the program's own options before anything runs.
  void (*prepare)(const Options& options, int n_ranks) = nullptr;
  // True if a file gives the sizes: then there is one line, whatever -b and -e say.
  bool (*fixed_size)() = nullptr;
  // The number of calls that one operation consists of, each of which needs the data of the one before. Null: one.
  int (*rounds)(int n_ranks) = nullptr;
  // The share of a line's size that algbw counts. Null: all of it.
  double (*counted)(int n_ranks) = nullptr;
};

// nccl-tests rounds blocks down to 16 bytes.
inline size_t block_elements(size_t elements, size_t element_bytes, int n_ranks) {
  return elements / static_cast<size_t>(n_ranks) / (16 / element_bytes) * (16 / element_bytes);
}
inline double factor_one(int) { return 1; }
inline double factor_others(int n_ranks) { return static_cast<double>(n_ranks - 1) / n_ranks; }

// Runs a program: parses, measures, prints. Returns the exit status.
int perf_main(int argc, char** argv, const Collective& collective);

}  // namespace perf

#endif  // PERF_COMMON_COLLECTIVE_H_
