// SPDX-License-Identifier: Apache-2.0
// Runs a plan of blocks on numbers, in interleavings drawn from seeds, as an independent judge of what the checker
// accepts. Elements of Inputs are random 64-bit numbers, sums wrap, final_reduce adds a constant, and fresh memory is
// random garbage.
#pragma once

#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "src/plan/binding.h"
#include "src/plan/checker.h"

namespace moeccl::test {

class BlockMachine {
 public:
  BlockMachine(const plan::Plan& plan, uint32_t seed)
      : plan_(plan), bindings_(plan::uniform_bindings(plan)), random_(seed) {
    const plan::Shape& s = plan.shape;
    for (uint32_t r = 0; r < s.n_ranks; ++r) {
      const plan::Program& p = plan.programs[r];
      in_.push_back(numbers(plan::in_blocks(s) * s.count));
      if (!s.group_of.empty()) in_.back() = in_[first_of_group(s.group_of[r])];
      out_.push_back(numbers(plan::out_blocks(s) * s.count));
      staging_.push_back(numbers(plan::staging_elements(bindings_[r], p)));
      for (const plan::Lane& lane : p.lanes) lanes_.push_back({r, &lane, 0, 0});
    }
  }

  // Returns "" when all lanes end and all Outputs are right.
  std::string run() {
    for (size_t alive = lanes_.size(); alive > 0;) {
      size_t moved = 0;
      alive = 0;
      std::shuffle(lanes_.begin(), lanes_.end(), random_);
      for (Position& at : lanes_) {
        for (uint64_t n = random_() % 4 == 0 ? 500 : random_() % 3; n > 0 && advance(at); --n) ++moved;
        alive += at.chunk < plan_.chunking.n_chunks;
      }
      idle_ = moved > 0 ? 0 : idle_ + 1;
      if (idle_ > 64) return "stuck";
    }
    return verdict();
  }

 private:
  struct Position {
    uint32_t rank;
    const plan::Lane* lane;
    uint32_t chunk;
    size_t step;
  };
  static constexpr uint64_t kFinal = 0x123456789abcdefull;

  std::vector<uint64_t> numbers(uint64_t n) {
    std::vector<uint64_t> all(n);
    for (uint64_t& x : all) x = random_();
    return all;
  }

  bool advance(Position& at) {
    if (at.chunk >= plan_.chunking.n_chunks) return false;
    if (at.step < at.lane->steps.size()) {
      const plan::Step& step = at.lane->steps[at.step];
      const bool runs = step.when == plan::When::kEvery || (step.when == plan::When::kFirst && at.chunk == 0) ||
                        (step.when == plan::When::kLast && at.chunk + 1 == plan_.chunking.n_chunks);
      if (runs && !execute(at, step)) return false;
    }
    if (++at.step >= at.lane->steps.size()) at.step = 0, ++at.chunk;
    return true;
  }

  bool execute(const Position& at, const plan::Step& step) {
    const bool once = step.when != plan::When::kEvery;
    if (step.kind == plan::StepKind::kSignal) {
      ++signals_[{at.rank, step.peer, step.sig}];
      return true;
    }
    if (step.kind == plan::StepKind::kWait) {
      if (at.chunk < step.lag) return true;
      const uint64_t number = (once ? 0 : uint64_t{at.chunk - step.lag} * step.per_chunk) + step.ordinal;
      return signals_[{step.peer, at.rank, step.sig}] > number;
    }
    const plan::Range dst = range(at, step, step.dst);
    for (uint64_t i = 0; i < dst.length; ++i) {
      uint64_t sum = step.final_reduce ? kFinal : 0;
      for (uint32_t k = 0; k < step.n_srcs; ++k) {
        const plan::Ref& ref = plan_.programs[at.rank].srcs[step.first_src + k];
        sum += memory(ref)[range(at, step, ref).offset + i];
      }
      memory(step.dst)[dst.offset + i] = sum;
    }
    return true;
  }
  plan::Range range(const Position& at, const plan::Step& step, const plan::Ref& ref) const {
    const plan::Program& p = plan_.programs[at.rank];
    const plan::Binding& b = bindings_[at.rank];
    return plan::resolve(b, p, ref, plan::governing_length(b, p, step), at.chunk);
  }
  std::vector<uint64_t>& memory(const plan::Ref& ref) {
    if (ref.buffer == plan::Buffer::kStaging) return staging_[ref.rank];
    return ref.buffer == plan::Buffer::kInput ? in_[ref.rank] : out_[ref.rank];
  }

  size_t first_of_group(uint64_t group) const {
    const auto& of = plan_.shape.group_of;
    return static_cast<size_t>(std::find(of.begin(), of.end(), group) - of.begin());
  }
  uint64_t sum_of_all(uint64_t i) const {
    uint64_t sum = plan_.shape.n_ranks > 1 ? kFinal : 0;
    for (const auto& in : in_) sum += in[i];
    return sum;
  }
  uint64_t expected(uint32_t rank, uint64_t block, uint64_t i) const {
    const plan::Shape& s = plan_.shape;
    switch (s.op) {
      case moecclOpAllReduce:
      case moecclOpReduce:
        return sum_of_all(i);
      case moecclOpReduceScatter:
        return sum_of_all(rank * s.count + i);
      case moecclOpBroadcast:
        return in_[s.root][i];
      case moecclOpAllGather:
      case moecclOpGather:
        return in_[block][i];
      case moecclOpScatter:
        return in_[s.root][rank * s.count + i];
      case moecclOpTensorAllToAll:
        return in_[first_of_group(block)][s.group_of[rank] * s.count + i];
      default:
        return in_[block][rank * s.count + i];
    }
  }
  std::string verdict() const {
    const plan::Shape& s = plan_.shape;
    for (uint32_t r = 0; r < s.n_ranks; ++r) {
      if (r != s.root && (s.op == moecclOpReduce || s.op == moecclOpGather)) continue;
      for (uint64_t u = 0; u < out_[r].size(); ++u)
        if (out_[r][u] != expected(r, u / s.count, u % s.count))
          return "rank " + std::to_string(r) + ", element " + std::to_string(u) + " is wrong";
    }
    return "";
  }

  const plan::Plan& plan_;
  std::vector<plan::Binding> bindings_;
  std::mt19937_64 random_;
  std::vector<std::vector<uint64_t>> in_, out_, staging_;
  std::vector<Position> lanes_;
  std::map<std::tuple<uint32_t, uint32_t, uint8_t>, uint64_t> signals_;
  int idle_ = 0;
};

}  // namespace moeccl::test
