// SPDX-License-Identifier: Apache-2.0
// One operation as an executor gets it: a program, its binding and the caller's buffers.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/table.h"
#include "src/exec/lane_trace.h"
#include "src/plan/binding.h"
#include "src/plan/plan.h"

namespace moeccl::cuda {
struct WalkTables;
}

namespace moeccl::exec {

class Runner;

// What all ranks must agree on, and how a disagreement is named.
struct Signature {
  moecclOp_t op = moecclOpAllReduce;
  moecclDataType_t type = moecclInt8;
  uint8_t reduce = 0;  // moecclBuiltinRedOp_t, or kPreMulSum
  uint32_t root = 0;
  uint64_t count = 0;
  uint64_t plan = 0;  // hash of the plan, or of the plans among which agreement chooses
};
inline constexpr uint8_t kPreMulSum = 5;
using plan::op_name;
const char* reduce_name(uint8_t reduce);  // "sum"

// Packed for an Entry: op 8 | type 8 | reduce 8 | flags 8 | root 32.
inline constexpr uint64_t kInputInHeap = 1, kOutputInHeap = 2;
uint64_t pack(const Signature& s, uint64_t flags);
Signature unpack(uint64_t packed, uint64_t count, uint64_t plan);
// The hash of all operations up to this one, from that of those before.
uint64_t extend_history(uint64_t history, const Signature& s);
// The sentence for two ranks that differ: "rank 0 calls allreduce with count 4096, rank 3 with count 4100".
std::string describe_difference(uint32_t rank_a, const Signature& a, uint32_t rank_b, const Signature& b);

// The class of traffic for transport::Link::admit(): `priority` as the user counts (from 1), 0: by operation.
uint32_t traffic_class(moecclOp_t op, int priority);

// A plan that could run, with what is specific to this rank.
struct Choice {
  const plan::Program* program = nullptr;
  plan::Chunking chunking;
  const char* algorithm = "";
  uint64_t plan_hash = 0;
  uint64_t program_hash = 0;  // of this rank's program: plans of one hash differ in place. 0: not kept apart
};

// One, as a Scalar of the type.
kernels::Scalar unit_scale(moecclDataType_t type);

struct Operation {
  Runner* runner = nullptr;  // the communicator's, which picks it once
  Signature signature;
  Choice choice;  // the plan, when all ranks already know it
  // When every buffer of every rank turns out to be reachable (agreed at entry), this one runs instead. Null: no
  // question.
  const Choice* if_reachable = nullptr;
  // The choice's. When a correction of the profile has come in between, it is made again before the operation runs. 0:
  // it stands.
  uint32_t epoch = 0;
  // AllToAllv: its size is known only when all ranks have entered. What is left after the first chunk of `choice` runs
  // with this one. Null: `choice` runs to the end.
  const Choice* for_rest = nullptr;
  std::shared_ptr<const void> keep;  // owns the programs

  plan::Binding binding;  // chunking and slots are filled from the choice
  const void* input = nullptr;
  void* output = nullptr;
  size_t element_bytes = 1;
  uint64_t output_bytes = 0;  // 0: what the blocks of the operation and `binding` say
  kernels::ReduceOp reduce = kernels::ReduceOp::kSum;
  uint32_t divisor = 0;  // Avg
  bool scaled = false;   // premulsum
  kernels::Scalar scale{};
  // The scale as one element of CUDA memory, read when the operation runs; null: `scale` holds it.
  const void* scale_at = nullptr;
  bool grouped = false;  // deterministic row sums
  uint8_t priority = 0;  // of the call, a moecclPriority_t; 0: by operation
  // Rows with scales: element_bytes counts both, and a slot holds its rows first, then their scales.
  struct Scales {
    const void* input = nullptr;
    void* output = nullptr;
    uint32_t bytes = 0;  // of a row; 0: none
  } scales;
  // Rows on the persistent kernel.
  struct Rows {
    const cuda::WalkTables* tables = nullptr;  // RowTables::device(); null: the lists are the binding's alone
    bool in_tables_alone = false;              // the lists that hold now
    bool weighted = false;                     // the lists' weights apply
    // About what this rank moves, and the most that a graph's replay may have to move.
    uint64_t bytes = 0, most_bytes = 0;
  } rows;
  bool on_device() const;  // input and output are CUDA memory
  // Where the last run's time and bytes are noted; owned by `keep`. Null: nowhere.
  struct Measured {
    std::atomic<double> ns{0};
    std::atomic<uint64_t> wire_bytes{0};
    LaneRecord lanes;  // of TensorAllToAll
  };
  Measured* measured = nullptr;
  // Where a trial of plans (select/trials.h) hears of the run; the communicator's. Null: none goes on.
  struct Ran {
    bool is_timed = false;
    double took_ns = 0;  // on this rank; 0: not timed, or the plan that was chosen before it began did not run
    uint64_t largest_block_bytes = 0;  // AllToAllv: of all ranks, the same on all; 0: all went with the first word
  };
  Ran* ran = nullptr;
  // AllToAllv: [n_ranks] in elements; owned by the operation because the call may be asynchronous.
  std::vector<uint64_t> send_counts, send_displs, recv_counts, recv_displs;

  // As new, but for what a preparation sets anyway and for memory that it can use again.
  void reset() {
    binding = {};
    epoch = 0;
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
