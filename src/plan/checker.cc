// SPDX-License-Identifier: Apache-2.0
#include "src/plan/checker.h"

#include <algorithm>
#include <unordered_map>

#include "src/plan/discipline.h"
#include "src/plan/symbolic_run.h"

namespace moeccl::plan {

namespace {

// Returns the largest end of the blocks of one direction of AllToAllv.
uint64_t end_of_blocks(const uint64_t* offset, const uint64_t* length, uint32_t n) {
  uint64_t end = 0;
  for (uint32_t r = 0; r < n; ++r) end = std::max(end, offset[r] + length[r]);
  return end;
}

// Returns the buffers of `rank` in the shape that the C header gives them. Where it allows NULL, they have no elements.
UserMemory user_memory(const Shape& shape, const Binding& b, uint32_t rank, bool in_place) {
  const uint32_t n = shape.n_ranks;
  const bool is_root = rank == shape.root;
  UserMemory user;
  user.in_size = b.in_length ? end_of_blocks(b.in_offset, b.in_length, n) : in_blocks(shape) * b.count;
  user.out_size = b.out_length ? end_of_blocks(b.out_offset, b.out_length, n) : out_blocks(shape) * b.count;
  if (!is_root && root_gives(shape.op)) user.in_size = 0;
  if (!is_root && root_takes(shape.op)) user.out_size = 0;
  if (!in_place || user.in_size == 0 || user.out_size == 0) {
    user.out_first = user.in_size;
  } else if (user.in_size < user.out_size) {  // AllGather, Gather: send == recv + rank * count
    user.in_first = rank * b.count;
  } else if (user.out_size < user.in_size) {  // ReduceScatter, Scatter: recv == send + rank * count
    user.out_first = rank * b.count;
  }
  return user;
}

// Returns the terms of element `i` of block `block` of the Output of `rank`.
std::vector<Term> expected_terms(const CheckInput& input, uint32_t rank, uint32_t block, uint64_t i) {
  const Shape& shape = input.plan.shape;
  const uint64_t count = input.bindings[rank].count;
  const auto of_all = [&](uint64_t unit) {
    std::vector<Term> terms;
    for (uint32_t r = 0; r < shape.n_ranks; ++r) terms.push_back({r, static_cast<uint32_t>(unit), 1});
    return terms;
  };
  const auto one = [](uint32_t from, uint64_t unit) {
    return std::vector<Term>{{from, static_cast<uint32_t>(unit), 1}};
  };
  switch (shape.op) {
    case moecclOpAllReduce:
    case moecclOpReduce:
      return of_all(i);
    case moecclOpReduceScatter:
      return of_all(rank * count + i);
    case moecclOpBroadcast:
      return one(shape.root, i);
    case moecclOpAllGather:
    case moecclOpGather:
      return one(block, i);
    case moecclOpScatter:
      return one(shape.root, rank * count + i);
    case moecclOpTensorAllToAll: {
      // Any member of group `block` holds it: the name of the first one stands for all, see symbolic_run.cc.
      const auto first = std::find(shape.group_of.begin(), shape.group_of.end(), block) - shape.group_of.begin();
      return one(static_cast<uint32_t>(first), shape.group_of[rank] * count + i);
    }
    case moecclOpAllToAllv: {
      const Binding& sender = input.bindings[block];
      return one(block, (sender.in_offset ? sender.in_offset[rank] : rank * count) + i);
    }
    default:
      return one(block, rank * count + i);
  }
}

Status check_blocks(const CheckInput& input, const SymbolicRun& run, const std::vector<UserMemory>& users) {
  const Shape& shape = input.plan.shape;
  const Values& values = run.values();
  const bool sums = reduces(shape.op);
  std::unordered_map<ValueId, std::pair<uint64_t, uint32_t>>
      proved;  // sums: the element (and rank) for which the value is right
  for (uint32_t r = 0; r < shape.n_ranks; ++r) {
    const Binding& b = input.bindings[r];
    for (uint32_t block = 0; users[r].out_size > 0 && block < out_blocks(shape); ++block) {
      const uint64_t first = b.out_offset ? b.out_offset[block] : block * b.count;
      const uint64_t length = b.out_length ? b.out_length[block] : b.count;
      for (uint64_t i = 0; i < length; ++i) {
        const ValueId value = run.output(r, first + i);
        const std::pair<uint64_t, uint32_t> key{i, shape.op == moecclOpReduceScatter ? r : 0};
        if (const auto known = proved.find(value); sums && known != proved.end() && known->second == key) continue;
        const std::vector<Term> terms = expected_terms(input, r, block, i);
        if (value == kUndefined || !values.holds(value, terms))
          return error(moecclInternalError, "rank {} ends with {} in element {} of output block {}: it must be {}{}", r,
                       values.describe(value), i, block, sums ? "the sum over all ranks of " : "",
                       format("in[{}] of rank {}", terms[0].unit, terms[0].rank));
        if (values.is_final(value) != sums && shape.n_ranks > 1)
          return error(moecclInternalError, "rank {}: element {} of output block {} {}", r, i, block,
                       sums ? "was not finished by a final_reduce" : "went through a final_reduce");
        if (shape.deterministic && !values.is_fused_sum(value, terms))
          return error(moecclInternalError,
                       "rank {}: element {} of output block {} is {}, not one sum over ranks in ascending order", r, i,
                       block, values.describe(value));
        if (sums) proved[value] = key;
      }
    }
  }
  return {};
}

Status check_placed_blocks(const CheckInput& input, const SymbolicRun& run) {
  const Values& values = run.values();
  for (uint32_t r = 0; r < input.plan.shape.n_ranks; ++r) {
    const uint64_t count = input.bindings[r].count;
    const std::vector<ExpectedRow>& blocks = input.blocks->output[r];
    for (uint64_t at = 0; at < blocks.size() * count; ++at) {
      const ExpectedRow& block = blocks[at / count];
      const uint64_t i = at % count;
      if (block.any) continue;
      std::vector<Term> terms = block.terms;
      for (Term& term : terms) term.unit = static_cast<uint32_t>(term.unit * count + i);
      std::sort(terms.begin(), terms.end(), term_less);
      const ValueId value = run.output(r, at);
      if (value == kUndefined || !values.holds(value, terms))
        return error(
            moecclInternalError,
            "rank {} ends with {} in element {} of output block {}: it must be the sum of {} blocks, the first "
            "{} * in[{}] of rank {}",
            r, values.describe(value), i, at / count, terms.size(), terms[0].weight, terms[0].unit, terms[0].rank);
      if (values.is_final(value) != (terms.size() > 1))
        return error(moecclInternalError, "rank {}: element {} of output block {} {}", r, i, at / count,
                     terms.size() > 1 ? "was not finished by a final_reduce" : "went through a final_reduce");
    }
  }
  return {};
}

Status check_rows(const CheckInput& input, const SymbolicRun& run) {
  for (uint32_t r = 0; r < input.plan.shape.n_ranks; ++r) {
    const std::vector<ExpectedRow>& rows = input.rows->output[r];
    for (uint64_t i = 0; i < rows.size(); ++i) {
      if (rows[i].any) continue;
      std::vector<Term> terms = rows[i].terms;
      std::sort(terms.begin(), terms.end(), term_less);
      const ValueId value = run.output(r, i);
      if (value != kUndefined && run.values().holds(value, terms)) continue;
      std::string wanted;
      for (const Term& term : terms)
        wanted += format("{}{} * in[{}] of rank {}", wanted.empty() ? "" : " + ", term.weight, term.unit, term.rank);
      return error(moecclInternalError, "rank {} ends with {} in row {} of Output: it must be {}", r,
                   run.values().describe(value), i, wanted.empty() ? "zeros" : wanted);
    }
  }
  return {};
}

Status check_bindings(const CheckInput& input) {
  const Plan& plan = input.plan;
  const uint32_t n = plan.shape.n_ranks;
  if (input.bindings.size() != n)
    return error(moecclInternalError, "{} bindings for {} ranks", input.bindings.size(), n);
  if (plan.chunking.n_chunks == 0) return error(moecclInternalError, "a plan runs at least one chunk");
  const bool of_rows = facts(plan.shape.op).rows;
  if (of_rows && !input.rows) return error(moecclInternalError, "what the rows of Output must hold is not given");
  if (facts(plan.shape.op).plan == PlanOf::kPlacement && reduces(plan.shape.op) && !of_rows && !input.blocks)
    return error(moecclInternalError, "what the blocks of Output must hold is not given");
  if (facts(plan.shape.op).in == Blocks::kGroups && plan.shape.group_of.size() != n)
    return error(moecclInternalError, "which ranks hold equal inputs is not given");
  if (facts(plan.shape.op).plan == PlanOf::kNothing)
    return error(moecclUnsupported, "send and receive have no plan of all ranks");
  for (uint32_t r = 0; r < n; ++r) {
    const Binding& b = input.bindings[r];
    if (b.chunking.chunk != plan.chunking.chunk || b.chunking.n_chunks != plan.chunking.n_chunks)
      return error(moecclInternalError, "rank {} is bound to {} chunks of {}, the plan has {} of {}", r,
                   b.chunking.n_chunks, b.chunking.chunk, plan.chunking.n_chunks, plan.chunking.chunk);
    if (b.slot_elements != input.bindings[0].slot_elements || b.element_bytes != input.bindings[0].element_bytes)
      return error(moecclInternalError, "rank {} is bound to other slots than rank 0", r);
    const Program& program = plan.programs[r];
    const uint64_t staging = staging_elements(b, program) * b.element_bytes;
    if (staging > plan.shape.staging_bytes)
      return error(moecclInternalError, "rank {} needs {} bytes of staging, the cap is {}", r, staging,
                   plan.shape.staging_bytes);
    for (uint32_t p = 0; b.out_length && p < n; ++p)
      if (input.bindings[p].in_length && input.bindings[p].in_length[r] != b.out_length[p])
        return error(moecclInternalError, "rank {} sends {} elements to rank {}, which expects {}", p,
                     input.bindings[p].in_length[r], r, b.out_length[p]);
    const uint64_t longest = !b.in_length ? b.count : n == 0 ? 0 : *std::max_element(b.in_length, b.in_length + n);
    if (!of_rows && longest > 0 &&
        plan.chunking.chunk < (longest + plan.chunking.n_chunks - 1) / plan.chunking.n_chunks)
      return error(moecclInternalError, "{} chunks of {} do not cover a block of {}", plan.chunking.n_chunks,
                   plan.chunking.chunk, longest);
  }
  return {};
}

}  // namespace

Status check(const CheckInput& input) {
  MOECCL_TRY(check_discipline(input.plan));
  MOECCL_TRY(check_bindings(input));
  std::vector<UserMemory> users;
  for (uint32_t r = 0; r < input.plan.shape.n_ranks; ++r) {
    if (input.rows) {
      const uint64_t in_size = input.rows->input_rows[r];
      users.push_back({0, in_size, in_size, input.rows->output[r].size()});
    } else if (input.blocks) {
      const bool in_place = input.in_place ? (*input.in_place)[r] : input.plan.shape.in_place;
      const uint64_t in_size = input.blocks->input_blocks[r] * input.bindings[r].count;
      users.push_back({0, in_size, in_place ? 0 : in_size, input.blocks->output[r].size() * input.bindings[r].count});
    } else {
      const bool in_place = input.in_place ? (*input.in_place)[r] : input.plan.shape.in_place;
      users.push_back(user_memory(input.plan.shape, input.bindings[r], r, in_place));
    }
  }
  SymbolicRun run(input, users);
  MOECCL_TRY(run.run());
  if (input.blocks) return check_placed_blocks(input, run);
  return input.rows ? check_rows(input, run) : check_blocks(input, run, users);
}

Status check(const Plan& plan) {
  const std::vector<Binding> bindings = uniform_bindings(plan);
  return check(CheckInput{plan, bindings, nullptr, nullptr});
}

std::vector<Binding> uniform_bindings(const Plan& plan) {
  Binding b;
  b.chunking = plan.chunking;
  b.element_bytes = plan.shape.element_bytes;
  b.count = plan.shape.count;
  // A plan for any length is not cut into chunks: its slots, if any, are then no larger than the block.
  const uint64_t chunk = plan.chunking.n_chunks == 1 ? std::min(plan.chunking.chunk, b.count) : plan.chunking.chunk;
  b.slot_elements = whole_lines(chunk, b.element_bytes);
  return std::vector<Binding>(plan.shape.n_ranks, b);
}

}  // namespace moeccl::plan
