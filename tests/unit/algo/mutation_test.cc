// SPDX-License-Identifier: Apache-2.0
// Shows that the proofs are meaningful: a plan without any one synchronisation, move or rotation is rejected. This also
// shows that algorithms contain no unnecessary steps.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "src/plan/checker.h"
#include "tests/unit/algo/shapes.h"

namespace moeccl::algo::testing {
namespace {

using plan::Plan;
using plan::Program;
using plan::Step;
using plan::StepKind;

bool is_sync(const Step& step) { return step.kind == StepKind::kSignal || step.kind == StepKind::kWait; }

// A signal to the rank itself orders lanes only where no peer does so, which differs from rank to rank in `hier`.
bool may_be_spare(const Algorithm& a, const Program& program, const Step& step) {
  return std::string(a.name) == "hier" && is_sync(step) && step.peer == program.rank;
}

// Removes a signal of `from` and its wait.
Plan without_signal(Plan plan, uint32_t from, const Step& signal) {
  for (Program& program : plan.programs) {
    for (plan::Lane& lane : program.lanes) {
      std::erase_if(lane.steps, [&](const Step& s) {
        if (s.sig != signal.sig || s.ordinal != signal.ordinal) return false;
        return (s.kind == StepKind::kSignal && program.rank == from && s.peer == signal.peer) ||
               (s.kind == StepKind::kWait && program.rank == signal.peer && s.peer == from);
      });
    }
    program.finalize();
  }
  return plan;
}

Plan without_step(Plan plan, uint32_t rank, uint32_t lane, size_t index) {
  auto& steps = plan.programs[rank].lanes[lane].steps;
  steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(index));
  return plan;
}

Plan with_lag(Plan plan, uint32_t rank, uint32_t lane, size_t index) {
  ++plan.programs[rank].lanes[lane].steps[index].lag;
  return plan;
}

Plan with_less_depth(Plan plan) {
  for (Program& program : plan.programs) --program.depth;
  return plan;
}

// Returns whether the algorithm's programs depend on in_place. Only this one's do.
bool looks_at_in_place(moecclOp_t op, const std::string& algorithm) {
  return op == moecclOpAllToAll && algorithm == "direct";
}

// Some steps are needed only by ranks in place, or only by the others, so a mutant must fail in one of the two cases.
bool accepted(Plan plan) {
  if (!plan::check(plan).ok()) return false;
  if (plan.shape.op == moecclOpAllToAllv || plan.shape.op == moecclOpTensorAllToAll ||
      looks_at_in_place(plan.shape.op, plan.algorithm))
    return true;
  plan.shape.in_place = true;
  return plan::check(plan).ok();
}

class Mutation : public ::testing::TestWithParam<const Algorithm*> {};

struct Setting {
  plan::Reach reach;
  bool in_place = false;
  plan::LongLine long_line = {};
};

void reject_mutants(const Algorithm& a, const Setting& setting) {
  const std::string name = a.name;
  const bool two_levels = name == "2dh" || name == "hier";
  const bool far = setting.long_line.bytes > 0;
  // TensorAllToAll: uses even nodes, where no credit is implied by another.
  const plan::LevelTree tree = a.op == moecclOpTensorAllToAll ? nodes({2, 2})
                               : two_levels                   ? nodes({2, 3})
                               : far && name == "rd"          ? plan::LevelTree::flat(4)
                                                              : plan::LevelTree::flat(5);
  plan::Shape shape = shape_of(a.op, tree.n_ranks, 1 << 20);
  shape.reach = setting.reach;
  shape.long_line = setting.long_line;
  if (far) {
    shape.element_bytes = 8 << 20;  // a block of one element is longer than any usual chunk
    shape.staging_bytes = uint64_t{1} << 50;
  }
  if (!a.applies(shape, tree).ok()) return;
  shape.root = has_root(a.op) ? 1 : 0;
  shape.in_place = setting.in_place;
  // Enough chunks for every slot to be reused, with a short last one; one chunk where plans have no more.
  const uint64_t chunk = 23;
  const uint32_t n_chunks = a.chunking(shape, tree).n_chunks == 1 || name == "oneshot" ? 1 : 10 + 6 * far;
  shape.count = n_chunks == 1 ? chunk : chunk * n_chunks - 14;
  const Plan plan = plan_of(a, shape, tree, chunk, n_chunks);
  ASSERT_TRUE(plan::check(plan).ok()) << plan::check(plan).message();

  for (const Program& program : plan.programs) {
    for (uint32_t l = 0; l < program.lanes.size(); ++l) {
      const auto& steps = program.lanes[l].steps;
      for (size_t i = 0; i < steps.size(); ++i) {
        const std::string what = "rank " + std::to_string(program.rank) + ", lane " + std::to_string(l) + ", step " +
                                 std::to_string(i) + " (" + step_kind_name(steps[i].kind) + ")";
        EXPECT_FALSE(accepted(without_step(plan, program.rank, l, i))) << "without " << what;
        if (may_be_spare(a, program, steps[i])) continue;
        if (steps[i].kind == StepKind::kSignal) {
          EXPECT_FALSE(accepted(without_signal(plan, program.rank, steps[i]))) << "without both ends of " << what;
        }
        if (steps[i].kind == StepKind::kWait && steps[i].when == plan::When::kEvery && n_chunks > 1) {
          EXPECT_FALSE(accepted(with_lag(plan, program.rank, l, i))) << "later: " << what;
        }
      }
    }
  }
  if (plan.programs[0].depth > 1) {
    EXPECT_FALSE(accepted(with_less_depth(plan)));
  }
}

TEST_P(Mutation, IsRejected) {
  for (const plan::Reach& reach : {plan::Reach{true, true, true}, plan::Reach{true, false, true}}) {
    reject_mutants(*GetParam(), {reach});
    if (looks_at_in_place(GetParam()->op, GetParam()->name)) reject_mutants(*GetParam(), {reach, true});
  }
}

TEST_P(Mutation, IsRejectedOnALongLine) {
  if (GetParam()->op == moecclOpTensorAllToAll) return;  // its plans are those of any line
  reject_mutants(*GetParam(), {{false, false, false}, false, {0, uint64_t{50} << 20}});
}

std::string name_of(const ::testing::TestParamInfo<const Algorithm*>& info) {
  return operation_name(info.param->op) + "_" + info.param->name;
}

INSTANTIATE_TEST_SUITE_P(All, Mutation, ::testing::ValuesIn(all_algorithms()), name_of);

}  // namespace
}  // namespace moeccl::algo::testing
