// SPDX-License-Identifier: Apache-2.0
// Runs one rank's part of a collective by one algorithm, with real bytes, and compares with what the C header promises.
#pragma once

#include <string>
#include <vector>

#include "src/algo/algorithm.h"
#include "src/exec/execution.h"

namespace moeccl::tests {

inline int64_t input_value(uint32_t rank, uint64_t i) {
  return static_cast<int64_t>(rank + 1) * 1000003 + static_cast<int64_t>(i * 7);
}

// Returns the required element i of rank's output, for int64 sums.
inline int64_t expected(const plan::Shape& s, uint32_t rank, uint64_t i) {
  const uint64_t block = s.count == 0 ? 0 : i / s.count, at = s.count == 0 ? 0 : i % s.count;
  const auto sum = [&](uint64_t j) {
    int64_t total = 0;
    for (uint32_t r = 0; r < s.n_ranks; ++r) total += input_value(r, j);
    return total;
  };
  switch (s.op) {
    case moecclOpAllReduce:
    case moecclOpReduce:
      return sum(i);
    case moecclOpReduceScatter:
      return sum(rank * s.count + i);
    case moecclOpBroadcast:
      return input_value(s.root, i);
    case moecclOpScatter:
      return input_value(s.root, rank * s.count + i);
    case moecclOpTensorAllToAll:  // a flat tree is one group, whose ranks hold the same
      return input_value(0, i);
    case moecclOpAllGather:
    case moecclOpGather:
      return input_value(static_cast<uint32_t>(block), at);
    default:
      return input_value(static_cast<uint32_t>(block), rank * s.count + at);
  }
}

inline bool has_output(const plan::Shape& s, uint32_t rank) {
  return (s.op != moecclOpReduce && s.op != moecclOpGather) || rank == s.root;
}

// Returns "", or what went wrong on this rank. `plan` is of all ranks; each rank calls this on its own thread.
inline std::string run_algorithm(exec::Fabric& f, const algo::Algorithm& a, const plan::Shape& shape,
                                 const plan::Plan& plan) {
  const uint32_t rank = f.rank;
  std::vector<int64_t> in(plan::in_blocks(shape.op, shape.n_ranks) * shape.count);
  std::vector<int64_t> out(plan::out_blocks(shape.op, shape.n_ranks) * shape.count, -1);
  for (uint64_t i = 0; i < in.size(); ++i) in[i] = input_value(shape.op == moecclOpTensorAllToAll ? 0 : rank, i);
  exec::Operation op;
  op.signature = {shape.op, moecclInt64, moecclSum, shape.root, shape.count, plan.hash};
  op.choice = {&plan.programs[rank], plan.chunking, a.name, plan.hash};
  op.binding.count = shape.count;
  op.input = in.data();
  op.output = out.data();
  op.element_bytes = 8;
  if (shape.op == moecclOpAllToAllv) {
    op.send_counts.assign(shape.n_ranks, shape.count);
    op.recv_counts = op.send_counts;
    for (uint32_t r = 0; r < shape.n_ranks; ++r) op.send_displs.push_back(r * shape.count);
    op.recv_displs = op.send_displs;
    op.signature.count = 0;
  }
  exec::Execution e(f, op);
  if (const Status status = exec::drive(e); !status.ok()) return status.message();
  if (!has_output(shape, rank)) return {};
  for (uint64_t i = 0; i < out.size(); ++i) {
    if (out[i] == expected(shape, rank, i)) continue;
    return format("{} of {}, {} ranks, count {}, rank {}: element {} is {} instead of {}", a.name,
                  exec::op_name(shape.op), shape.n_ranks, shape.count, rank, i, out[i], expected(shape, rank, i));
  }
  return {};
}

}  // namespace moeccl::tests
