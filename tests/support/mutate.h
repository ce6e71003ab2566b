// SPDX-License-Identifier: Apache-2.0
// Makes one random change to one rank's program, as a mistake in a plan builder would. The checker must find it.
#pragma once

#include <optional>
#include <random>
#include <string>
#include <utility>

#include "src/plan/binding.h"
#include "src/plan/checker.h"
#include "src/plan/discipline.h"

namespace moeccl::test {

enum class MutationKind { kDrop, kDouble, kSwap, kPeer, kExtent, kSig, kLag, kSource, kWhen };
inline constexpr int kNumMutationKinds = 9;

struct Mutation {
  MutationKind kind;
  std::string what;
  plan::Plan plan;
};

class Mutator {
 public:
  Mutator(const plan::Plan& plan, uint32_t seed)
      : plan_(plan), bindings_(plan::uniform_bindings(plan)), random_(seed) {}

  // Returns nothing when the drawn step does not have what the kind changes, or when the change would move the same
  // bytes, because the extents of all steps resolve to the same ranges at all chunks, as those of empty parts do.
  std::optional<Mutation> draw(MutationKind kind) {
    plan::Plan changed = plan_;
    plan::Program& program = changed.programs[pick(changed.programs.size())];
    if (program.lanes.empty()) return {};
    const auto lane = static_cast<uint32_t>(pick(program.lanes.size()));
    if (program.lanes[lane].steps.empty()) return {};
    const auto index = static_cast<uint32_t>(pick(program.lanes[lane].steps.size()));
    const std::string name = plan::step_name(program, lane, index);
    if (moves_nothing(program, program.lanes[lane].steps[index])) return {};
    const std::optional<std::string> what = change(kind, program, program.lanes[lane].steps, index);
    if (!what) return {};
    program.finalize();
    return Mutation{kind, *what + ": " + name, std::move(changed)};
  }

 private:
  using Steps = std::vector<plan::Step>;

  static bool is_sync(const plan::Step& s) {
    return s.kind == plan::StepKind::kSignal || s.kind == plan::StepKind::kWait;
  }
  size_t pick(size_t n) { return random_() % n; }
  uint32_t other_rank(uint32_t rank) {
    const uint32_t n = plan_.shape.n_ranks;
    return static_cast<uint32_t>((rank + 1 + pick(n - 1)) % n);
  }

  plan::Range range(const plan::Program& program, const plan::Step& step, const plan::Ref& ref, uint32_t chunk) const {
    const plan::Binding& b = bindings_[program.rank];
    return plan::resolve(b, program, ref, plan::governing_length(b, program, step), chunk);
  }
  bool moves_nothing(const plan::Program& program, const plan::Step& step) const {
    if (is_sync(step)) return false;
    for (uint32_t c = 0; c < plan_.chunking.n_chunks; ++c)
      if (range(program, step, step.dst, c).length > 0) return false;
    return true;
  }
  bool same_ranges(const plan::Program& program, const plan::Step& step, const plan::Ref& a, const plan::Ref& b) const {
    for (uint32_t c = 0; c < plan_.chunking.n_chunks; ++c) {
      const plan::Range x = range(program, step, a, c), y = range(program, step, b, c);
      if (x.length != y.length || (x.length > 0 && x.offset != y.offset)) return false;
    }
    return true;
  }

  std::optional<std::string> change(MutationKind kind, plan::Program& program, Steps& steps, uint32_t i) {
    plan::Step& step = steps[i];
    const auto at = steps.begin() + i;
    switch (kind) {
      case MutationKind::kDrop:
        steps.erase(at);
        return "dropped";
      case MutationKind::kDouble:
        steps.insert(at, plan::Step(step));
        return "doubled";
      case MutationKind::kSwap:
        return swap_with_next(program, steps, i);
      case MutationKind::kPeer:
        return change_peer(program, step);
      case MutationKind::kExtent:
        return change_extent(program, step);
      case MutationKind::kSig:
        if (!is_sync(step)) return {};
        step.sig = static_cast<uint8_t>((step.sig + 1 + pick(plan::kMaxSigs - 1)) % plan::kMaxSigs);
        return "other sig";
      case MutationKind::kLag:
        if (step.kind != plan::StepKind::kWait || step.when != plan::When::kEvery) return {};
        if (step.lag > 0 && pick(2) == 0) {
          --step.lag;
          return "shorter lag";
        }
        ++step.lag;
        return "longer lag";
      case MutationKind::kSource:
        if (step.kind != plan::StepKind::kReduce || step.n_srcs < 2) return {};
        --step.n_srcs;
        return "source dropped";
      case MutationKind::kWhen: {
        if (plan_.chunking.n_chunks < 3) return {};
        const plan::When others[] = {plan::When::kEvery, plan::When::kFirst, plan::When::kLast};
        const plan::When other = others[pick(3)];
        if (other == step.when) return {};
        step.when = other;
        return "at other chunks";
      }
    }
    return {};
  }

  // Either order is valid for two signals, two waits, or two moves that share no element that one of them writes.
  std::optional<std::string> swap_with_next(const plan::Program& program, Steps& steps, uint32_t i) {
    if (i + 1 >= steps.size()) return {};
    plan::Step &a = steps[i], &b = steps[i + 1];
    if (a.kind == b.kind && is_sync(a)) return {};
    if (!is_sync(a) && !is_sync(b) && a.when == b.when && !conflict(program, a, b) && !conflict(program, b, a))
      return {};
    std::swap(a, b);
    return "swapped with the next";
  }
  // Returns whether `writer` writes what `other` touches.
  bool conflict(const plan::Program& program, const plan::Step& writer, const plan::Step& other) const {
    for (uint32_t c = 0; c < plan_.chunking.n_chunks; ++c) {
      const auto meets = [&](const plan::Ref& ref) {
        if (ref.rank != writer.dst.rank || ref.buffer != writer.dst.buffer) return false;
        const plan::Range x = range(program, writer, writer.dst, c), y = range(program, other, ref, c);
        return x.length > 0 && y.length > 0 && x.offset < y.offset + y.length && y.offset < x.offset + x.length;
      };
      if (meets(other.dst)) return true;
      for (uint32_t k = 0; k < other.n_srcs; ++k)
        if (meets(program.srcs[other.first_src + k])) return true;
    }
    return false;
  }

  std::optional<std::string> change_peer(plan::Program& program, plan::Step& step) {
    if (plan_.shape.n_ranks < 2) return {};
    if (is_sync(step)) {
      step.peer = other_rank(step.peer);
      return "other peer";
    }
    plan::Ref& ref = drawn_ref(program, step);
    ref.rank = other_rank(ref.rank);
    return "other rank's memory";
  }

  // Makes a separate Ref, so that a source list that several steps share changes for only one of them.
  plan::Ref& drawn_ref(plan::Program& program, plan::Step& step) {
    const size_t which = pick(step.n_srcs + 1);
    if (which == step.n_srcs) return step.dst;
    const auto first = static_cast<uint32_t>(program.srcs.size());
    for (uint32_t k = 0; k < step.n_srcs; ++k) program.srcs.push_back(plan::Ref(program.srcs[step.first_src + k]));
    step.first_src = first;
    return program.srcs[first + which];
  }

  std::optional<std::string> change_extent(plan::Program& program, plan::Step& step) {
    if (is_sync(step)) return {};
    plan::Ref& ref = drawn_ref(program, step);
    const plan::Ref before = ref;
    std::string what;
    switch (pick(4)) {
      case 0:
        ref.index = static_cast<uint16_t>(ref.index + 1);
        what = "next block or slot";
        break;
      case 1:
        if (ref.index == 0) return {};
        ref.index = static_cast<uint16_t>(ref.index - 1);
        what = "previous block or slot";
        break;
      case 2:
        if (ref.parts == 1) return {};
        ref.part = static_cast<uint16_t>((ref.part + 1) % ref.parts);
        what = "other part";
        break;
      case 3:
        ref.parts = static_cast<uint16_t>(ref.parts + 1);
        what = "finer parts";
        break;
    }
    if (ref.index == before.index && same_ranges(program, step, before, ref)) return {};
    return what;
  }

  const plan::Plan& plan_;
  std::vector<plan::Binding> bindings_;
  std::mt19937 random_;
};

}  // namespace moeccl::test
