// SPDX-License-Identifier: Apache-2.0
// MOECCL_CHECK_PLANS=1: a plan is proved when it is chosen for the first time, and a wrong one is refused. The
// environment is read once per process, so this file runs twice: with the variable (tests/meson.build) and without it.
#include <gtest/gtest.h>

#include "src/algo/builder.h"
#include "src/base/env.h"
#include "src/select/selection.h"

namespace moeccl::comm {
namespace {

constexpr uint32_t kRanks = 4;

// During its lifetime, the algorithm's ranks lose the data that they get from rank 0.
class Broken {
 public:
  explicit Broken(const algo::Algorithm* a) : algorithm_(const_cast<algo::Algorithm&>(*a)), steps_(a->steps) {
    algorithm_.steps = [](algo::ProgramBuilder& b, const plan::Shape& shape, const plan::LevelTree&, uint32_t rank) {
      b.signal_all(0);
      b.wait_all(0);
      for (uint32_t p = 1; p < shape.n_ranks; ++p)
        b.copy({rank, plan::Buffer::kOutput, static_cast<uint16_t>(p), 0, 1}, {p, plan::Buffer::kInput, 0, 0, 1});
    };
  }
  ~Broken() { algorithm_.steps = steps_; }
  Broken(const Broken&) = delete;
  Broken& operator=(const Broken&) = delete;

 private:
  algo::Algorithm& algorithm_;
  decltype(algo::Algorithm::steps) steps_;
};

Status chosen(const char* algorithm) {
  Selector s(Selector::Setting{
      .rank = 1, .tree = plan::LevelTree::flat(kRanks), .reach = {true, true, true}, .staging_bytes = 1 << 20});
  MOECCL_TRY(s.force(moecclOpAllGather, algorithm));
  return s.get({moecclOpAllGather, 0, 1000, 4, false}).status();
}

TEST(CheckPlans, AWrongPlanIsRefusedWhereTheyAreChecked) {
  const algo::Algorithm* direct = algo::find(moecclOpAllGather, "direct");
  ASSERT_NE(direct, nullptr);
  const Broken broken(direct);
  const Status status = chosen("direct");
  EXPECT_EQ(status.code(), env().check_plans ? moecclInternalError : moecclSuccess) << status.message();
  if (env().check_plans) {
    EXPECT_NE(status.message().find("the plan is wrong, please report it"), std::string::npos) << status.message();
  }
}

TEST(CheckPlans, RightPlansPass) {
  for (const algo::Algorithm& a : algo::algorithms()) {
    if (a.op != moecclOpAllGather) continue;
    const Status status = chosen(a.name);
    EXPECT_TRUE(status.ok()) << a.name << ": " << status.message();
  }
}

}  // namespace
}  // namespace moeccl::comm
