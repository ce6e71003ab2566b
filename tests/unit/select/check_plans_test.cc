// SPDX-License-Identifier: Apache-2.0
// MOECCL_CHECK_PLANS=1: a plan is proved when it is chosen for the first time, and a wrong one is refused. The
// environment is read once per process, so this file runs twice: with the variable (tests/meson.build) and without it.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "src/algo/builder.h"
#include "src/base/env.h"
#include "src/comm/collective.h"
#include "src/select/selection.h"
#include "tests/support/timing.h"

namespace moeccl::comm {
namespace {

constexpr uint32_t kRanks = 4;

// During its lifetime, the algorithm's ranks lose the data that they get from rank 0, for threads that say so.
class Broken {
 public:
  explicit Broken(const algo::Algorithm* a) : algorithm_(const_cast<algo::Algorithm&>(*a)), steps_(a->steps) {
    whole_ = steps_;
    algorithm_.steps = [](algo::ProgramBuilder& b, const plan::Shape& shape, const plan::LevelTree& tree,
                          uint32_t rank) {
      if (!here) return whole_(b, shape, tree, rank);
      b.signal_all(0);
      b.wait_all(0);
      for (uint32_t p = 1; p < shape.n_ranks; ++p)
        b.copy({rank, plan::Buffer::kOutput, static_cast<uint16_t>(p), 0, 1}, {p, plan::Buffer::kInput, 0, 0, 1});
    };
  }
  ~Broken() { algorithm_.steps = steps_; }
  inline static thread_local bool here = true;
  Broken(const Broken&) = delete;
  Broken& operator=(const Broken&) = delete;

 private:
  algo::Algorithm& algorithm_;
  decltype(algo::Algorithm::steps) steps_;
  inline static decltype(algo::Algorithm::steps) whole_ = nullptr;
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

// Its peer has proved its own plan, and would wait for it.
TEST(CheckPlans, AWrongPlanOfOneRankEndsTheCallOfAll) {
  if (!env().check_plans) GTEST_SKIP() << "MOECCL_CHECK_PLANS is not set";
  const Broken broken(algo::find(moecclOpAllGather, "direct"));
  const auto id = bootstrap::make_unique_id();
  ASSERT_TRUE(id.ok()) << id.status().message();
  moecclConfig_t given = MOECCL_CONFIG_INIT;
  given.timeout_ms = given.init_timeout_ms = static_cast<int32_t>(tests::patient_ms(20'000));
  std::vector<std::thread> ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.emplace_back([&, r] {
      auto comm = Communicator::init(*id, 2, r, *Config::from(&given));
      ASSERT_TRUE(comm.ok()) << comm.status().message();
      ASSERT_TRUE((*comm)->force(moecclOpAllGather, "direct").ok());
      Broken::here = r == 1;
      std::vector<float> in(1000, 1), out(2000);
      CollectiveCall call;
      call.op = moecclOpAllGather;
      call.type = moecclFloat32;
      call.count = in.size();
      call.send = in.data();
      call.recv = out.data();
      const tests::Stopwatch watch;
      const Status status = run_collective(**comm, call);
      EXPECT_EQ(status.code(), r == 1 ? moecclInternalError : moecclRemoteError) << status.message();
      EXPECT_NE(status.message().find("the plan is wrong"), std::string::npos) << status.message();
      MOECCL_EXPECT_WITHIN(watch, 5000);
    });
  }
  for (std::thread& t : ranks) t.join();
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
