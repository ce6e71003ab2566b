// SPDX-License-Identifier: Apache-2.0
// One operation as an executor receives it: a program, its binding and the caller's buffers.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/table.h"
#include "src/exec/lane_trace.h"
#include "src/exec/promise.h"
#include "src/plan/binding.h"
#include "src/plan/plan.h"

namespace moeccl::cuda {
struct WalkTables;
}

namespace moeccl::exec {

class Runner;

// The properties on which all ranks must agree. Disagreements are reported in these terms.
struct Signature {
  moecclOp_t op = moecclOpAllReduce;
  moecclDataType_t type = moecclInt8;
  uint8_t reduce = 0;  // moecclBuiltinRedOp_t, or kPreMulSum
  uint32_t root = 0;
  uint64_t count = 0;
  uint64_t plan = 0;  // hash of the plan, or of the plans from which the agreement chooses
};
inline constexpr uint8_t kPreMulSum = 5;
using plan::op_name;
const char* reduce_name(uint8_t reduce);  // "sum"

// Packed for an Entry: op 8 | type 8 | reduce 8 | flags 8 | root 32.
inline constexpr uint64_t kInputInHeap = 1, kOutputInHeap = 2;
uint64_t pack(const Signature& s, uint64_t flags);
Signature unpack(uint64_t packed, uint64_t count, uint64_t plan);
// Returns the hash of all operations up to this one, given the hash of those before.
uint64_t extend_history(uint64_t history, const Signature& s);
// Returns the message for two ranks that differ: "rank 0 calls allreduce with count 4096, rank 3 with count 4100".
std::string describe_difference(uint32_t rank_a, const Signature& a, uint32_t rank_b, const Signature& b);

// Returns the class of traffic for transport::Pace::admit(). `priority` is the user's (from 1); 0: the operation's own.
uint32_t traffic_class(moecclOp_t op, int priority);

// A plan that could run, with the parts that are specific to this rank.
struct Choice {
  const plan::Program* program = nullptr;
  plan::Chunking chunking;
  const char* algorithm = "";
  uint64_t plan_hash = 0;
  // The hash of this rank's program, which an operation in place changes while the plan hash stays; 0: not
  // distinguished.
  uint64_t program_hash = 0;
};

// Returns 1 as a Scalar of the type.
kernels::Scalar unit_scale(moecclDataType_t type);

struct Operation {
  Runner* runner = nullptr;  // the communicator's runner, chosen once
  Signature signature;
  Choice choice;  // the plan, if all ranks already know it
  // The choice that runs instead if every buffer of every rank turns out to be reachable (agreed at entry). Null:
  // reachability does not matter.
  const Choice* if_reachable = nullptr;
  // AllToAllv: a rank that neither sends nor receives so many bytes answers that its buffers cannot be reached.
  uint64_t reach_from_bytes = 0;
  bool is_tried = false;  // its plans are tried against each other: `keep` is a comm::PlanSlot that names them
  // AllToAllv: its size is known only when all ranks have entered. This choice runs what is left after the first chunk
  // of `choice`. Null: `choice` runs to the end.
  const Choice* for_rest = nullptr;
  std::shared_ptr<const void> keep;       // owns the programs
  std::shared_ptr<const void> own_input;  // owns the input where it is not the caller's

  plan::Binding binding;  // chunking and slots are filled from the choice
  const void* input = nullptr;
  void* output = nullptr;
  size_t element_bytes = 1;
  uint64_t output_bytes = 0;  // 0: follows from the operation's blocks and `binding`
  kernels::ReduceOp reduce = kernels::ReduceOp::kSum;
  uint32_t divisor = 0;  // Avg
  bool scaled = false;   // premulsum
  kernels::Scalar scale{};
  // The scale as one element of CUDA memory, read when the operation runs. Null: `scale` holds it.
  const void* scale_at = nullptr;
  bool grouped = false;  // deterministic row sums
  uint8_t priority = 0;  // of the call, a moecclPriority_t; 0: the operation's own
  Promise promise;       // while it has a ticket and waits for its turn, if the persistent kernel may run it
  // Rows with scales: element_bytes counts both, and a slot holds its rows first and then their scales.
  struct Scales {
    const void* input = nullptr;
    void* output = nullptr;
    uint32_t bytes = 0;  // per row; 0: none
  } scales;
  // Rows on the persistent kernel.
  struct Rows {
    const moeccl::cuda::WalkTables* tables = nullptr;  // RowTables::device(); null: only the binding has the lists
    bool in_tables_alone = false;                      // only the tables have the lists that are valid now
    bool weighted = false;                             // the lists' weights apply
    // `bytes`: roughly what this rank moves. `most_bytes`: the most that a graph's replay may have to move.
    uint64_t bytes = 0, most_bytes = 0;
  } rows;
  bool on_device() const;  // input and output are CUDA memory
  // Receives the time and bytes of the last run; owned by `keep`. Null: they are not recorded.
  struct Measured {
    std::atomic<double> ns{0};
    std::atomic<uint64_t> wire_bytes{0};
    LaneRecord lanes;  // of TensorAllToAll
  };
  Measured* measured = nullptr;
  // Reports the run to a trial of plans (select/trials.h); owned by the communicator. Null: no trial is under way.
  struct Ran {
    bool is_timed = false;
    double took_ns = 0;  // on this rank; 0: not timed, or another plan ran than the one chosen beforehand
    // AllToAllv: over all ranks, the same on all; 0: all data went with the first word.
    uint64_t largest_block_bytes = 0;
  };
  Ran* ran = nullptr;
  // AllToAllv: [n_ranks] in elements; owned by the operation because the call may be asynchronous.
  std::vector<uint64_t> send_counts, send_displs, recv_counts, recv_displs;

  // Resets everything except what a preparation sets anyway and memory that it can reuse.
  void reset() {
    promise = nullptr;
    binding = {};
    is_tried = false;
    reduce = kernels::ReduceOp::kSum;
    divisor = 0;
    scale_at = nullptr;
    output_bytes = 0;
    grouped = false;
    ran = nullptr;
    scales = {};
    rows = {};
  }
};

}  // namespace moeccl::exec
