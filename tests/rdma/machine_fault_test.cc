// SPDX-License-Identifier: Apache-2.0
// One of several machines loses its power, freezes, or loses its network in the middle of operations. Every rank that
// remains returns an error that names a rank beyond the break within the communicator's timeout plus 2 s, and the ranks
// shrink to those that still reach each other. Runs on each of the machines of `tools/rdma-vm --machines N`, over the
// network that MOECCL_NET names; MOECCL_TEST_HOSTS, such as 1+1, says how many ranks each has.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kTimeoutMs = 2000;
constexpr int kSlackMs = 2000;
constexpr size_t kCount = 3000;

class MachineFault : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* hosts = getenv("MOECCL_TEST_HOSTS");
    const char* machine = getenv("MOECCL_TEST_MACHINE");
    weights_ = parse_weights(hosts);
    if (machine == nullptr || weights_.size() < 2) GTEST_SKIP() << "only in tools/rdma-vm --machines";
    machine_ = atoi(machine);
    for (const int w : weights_) n_ += w;
  }
  // The last machine is the victim. `machine VICTIM BREAK` breaks it, `machine VICTIM MEND` mends it.
  void survive(const std::string& breaks, const std::string& mends);

  int victim() const { return static_cast<int>(weights_.size()) - 1; }
  bool is_victim(int rank) const { return rank >= n_ - weights_.back(); }
  bool of_machine(const std::string& verb) const {
    return system(("machine " + std::to_string(victim()) + " " + verb).c_str()) == 0;
  }

  std::vector<int> weights_;
  int n_ = 0, machine_ = 0;
};

moecclResult_t sum(moecclComm_t comm, const std::vector<float>& in, std::vector<float>& out) {
  return moecclAllReduce(in.data(), out.data(), kCount, moecclFloat32, moecclSum, comm, nullptr);
}

void MachineFault::survive(const std::string& breaks, const std::string& mends) {
  RankOptions options{.mode = RankMode::kProcesses};
  options.config.timeout_ms = static_cast<int32_t>(patient_ms(kTimeoutMs));
  run_ranks(
      n_,
      [&](int rank, moecclComm_t comm) {
        const std::vector<float> in(kCount, 1);
        std::vector<float> out(kCount);
        int64_t began = 0;
        moecclResult_t result = moecclSuccess;
        for (int i = 0; result == moecclSuccess; ++i) {
          ASSERT_TRUE(rank != 0 || i != 20 || of_machine(breaks));
          began = now_ms();
          result = sum(comm, in, out);
          ASSERT_TRUE(result != moecclSuccess || out[kCount - 1] == static_cast<float>(n_));
        }
        const int64_t took = now_ms() - began;
        const std::string said = moecclGetLastError(comm);
        bool named = false;
        for (int r = 0; r < n_; ++r)
          named =
              named || (is_victim(r) != is_victim(rank) && said.find("rank " + std::to_string(r)) != std::string::npos);
        EXPECT_TRUE(named) << said;
        // A machine that was frozen has no time of its own while it stood still.
        EXPECT_TRUE(is_victim(rank) || took <= patient_ms(kTimeoutMs + kSlackMs)) << took << " ms: " << said;

        moecclComm_t smaller = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclCommShrink(comm, nullptr, 0, &smaller, nullptr, MOECCL_SHRINK_ABORT), comm);
        const int left = is_victim(rank) ? weights_.back() : n_ - weights_.back();
        MOECCL_EXPECT_COMM_OK(sum(smaller, in, out), smaller);
        EXPECT_EQ(out[kCount - 1], static_cast<float>(left));
        MOECCL_EXPECT_OK(moecclCommDestroy(smaller));
        EXPECT_TRUE(rank != 0 || mends.empty() || of_machine(mends));
      },
      options);
}

// No rank is told: packets are lost from now on.
TEST_F(MachineFault, ItsNetworkIsCut) { survive("cut", "plug"); }

TEST_F(MachineFault, ItsCableIsPulled) { survive("unplug", "plug"); }

TEST_F(MachineFault, ItFreezes) { survive("freeze", "thaw"); }

// The last test, because the machine does not come back.
TEST_F(MachineFault, ItsPowerFails) { survive("kill", ""); }

}  // namespace
}  // namespace moeccl::testing
