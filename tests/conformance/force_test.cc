// SPDX-License-Identifier: Apache-2.0
// Forced algorithms that do not apply, either to this call or at all.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

moecclPlanInfo_t ask(moecclComm_t comm, moecclOp_t op, size_t count) {
  moecclPlanInfo_t info{};
  info.size = sizeof(info);
  MOECCL_EXPECT_COMM_OK(moecclPlanQuery(comm, op, count, moecclFloat32, &info), comm);
  return info;
}

std::string page_of(moecclComm_t comm, moecclOp_t op, size_t count) {
  size_t needed = 0;
  MOECCL_EXPECT_COMM_OK(moecclPlanExplain(comm, op, count, moecclFloat32, nullptr, 0, &needed), comm);
  std::string text(needed, '\0');
  MOECCL_EXPECT_COMM_OK(moecclPlanExplain(comm, op, count, moecclFloat32, text.data(), needed, nullptr), comm);
  return text;
}

// Returns the lines that this process writes to stderr during `body`.
template <class Body>
std::string log_of(Body&& body) {
  std::FILE* const kept = std::tmpfile();
  const int before = dup(STDERR_FILENO);
  dup2(fileno(kept), STDERR_FILENO);
  body();
  dup2(before, STDERR_FILENO);
  close(before);
  std::string text(static_cast<size_t>(std::ftell(kept) >= 0 ? lseek(fileno(kept), 0, SEEK_END) : 0), '\0');
  EXPECT_EQ(pread(fileno(kept), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  std::fclose(kept);
  return text;
}

size_t times(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

TEST(Force, WhatDoesNotApplyToACallIsSaidWithTheReason) {
  run_ranks(2,
            [](int rank, moecclComm_t comm) {
              constexpr size_t kLarge = 1 << 20;
              std::vector<float> in(kLarge, 1), out(kLarge);
              MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllReduce, "direct"), comm);
              const moecclPlanInfo_t info = ask(comm, moecclOpAllReduce, kLarge);
              EXPECT_STREQ(info.forced, "direct");
              EXPECT_STRNE(info.algorithm, "direct") << "these are ordinary buffers of two processes";
              EXPECT_NE(std::string(info.note).find("moecclMemAlloc"), std::string::npos) << info.note;
              const std::string page = page_of(comm, moecclOpAllReduce, kLarge);
              EXPECT_NE(page.find("direct is forced but does not apply: needs buffers"), std::string::npos) << page;
              const std::string log = log_of([&] {
                MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllReduce, "direct"), comm);
                // Sizes of one class, then of another.
                for (const size_t count : {kLarge, kLarge, kLarge - 1000, kLarge, kLarge / 4})
                  MOECCL_ASSERT_COMM_OK(
                      moecclAllReduce(in.data(), out.data(), count, moecclFloat32, moecclSum, comm, nullptr), comm);
              });
              EXPECT_EQ(times(log, "direct is forced for allreduce but does not apply"), rank == 0 ? 3u : 0u) << log;
              // An algorithm that applies runs, and nothing is noted.
              MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllReduce, "ring"), comm);
              EXPECT_STREQ(ask(comm, moecclOpAllReduce, kLarge).algorithm, "ring");
              EXPECT_STREQ(ask(comm, moecclOpAllReduce, kLarge).forced, "ring");
              EXPECT_STREQ(ask(comm, moecclOpAllReduce, kLarge).note, "");
              EXPECT_NE(page_of(comm, moecclOpAllReduce, kLarge).find("forced by moecclPlanForce"), std::string::npos);
              MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllReduce, nullptr), comm);
              EXPECT_STREQ(ask(comm, moecclOpAllReduce, kLarge).forced, "");
              // "oneshot" applies to small sizes but not to large ones.
              MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllToAll, "oneshot"), comm);
              EXPECT_STREQ(ask(comm, moecclOpAllToAll, 16).algorithm, "oneshot");
              EXPECT_NE(std::string(ask(comm, moecclOpAllToAll, 16 * kLarge).note).find("staging"), std::string::npos);
            },
            {.mode = RankMode::kProcesses});
}

TEST(Force, WhatCanNeverApplyIsRefused) {
  run_ranks(2, [](int, moecclComm_t comm) {
    MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllReduce, "ring"), comm);
    EXPECT_EQ(moecclPlanForce(comm, moecclOpAllReduce, "hier"), moecclUnsupported);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("groups of ranks"), std::string::npos);
    EXPECT_STREQ(ask(comm, moecclOpAllReduce, 1000).algorithm, "ring") << "what was forced before stays";
    struct Wrong {
      moecclOp_t op;
      const char *name, *part;
    };
    for (const Wrong& w :
         {Wrong{moecclOpDispatch, "nonsense", "hier:1"}, Wrong{moecclOpDispatch, "hier:12", "hier:1"},
          Wrong{moecclOpCombine, "flat", "dispatch"}, Wrong{moecclOpExpertAllReduce, "ring", "nodes"},
          Wrong{moecclOpSendRecv, "direct", "one plan"}, Wrong{moecclOpExpertGather, "direct", "one plan"}}) {
      EXPECT_EQ(moecclPlanForce(comm, w.op, w.name), moecclInvalidArgument) << w.name;
      EXPECT_NE(std::string(moecclGetLastError(comm)).find(w.part), std::string::npos) << moecclGetLastError(comm);
    }
    for (int op = 0; op < MOECCL_NUM_OPS; ++op)
      MOECCL_EXPECT_COMM_OK(moecclPlanForce(comm, static_cast<moecclOp_t>(op), nullptr), comm);
  });
}

// The variable is for all communicators of a process, so a communicator that it does not suit only warns.
TEST(Force, TheEnvironmentDoesNotKeepACommunicatorFromBeingMade) {
  setenv("MOECCL_PLAN", "allreduce:hier,alltoall:flat", 1);
  run_ranks(2, [](int, moecclComm_t comm) {
    EXPECT_STREQ(ask(comm, moecclOpAllToAll, 1000).algorithm, "flat");
    EXPECT_STREQ(ask(comm, moecclOpAllReduce, 1000).forced, "hier");
    EXPECT_NE(std::string(ask(comm, moecclOpAllReduce, 1000).note).find("groups of ranks"), std::string::npos);
    float one = 1;
    MOECCL_EXPECT_COMM_OK(moecclAllReduce(&one, &one, 1, moecclFloat32, moecclSum, comm, nullptr), comm);
    EXPECT_EQ(one, 2);
  });
  unsetenv("MOECCL_PLAN");
}

}  // namespace
}  // namespace moeccl::testing
