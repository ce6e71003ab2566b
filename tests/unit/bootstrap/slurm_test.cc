// SPDX-License-Identifier: Apache-2.0
// What srun says to its tasks, in variables as Slurm 22.05 sets them. tests/launchers/slurm.sh runs srun itself.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "src/bootstrap/launcher.h"
#include "tests/unit/bootstrap/group.h"

namespace moeccl::bootstrap {
namespace {

using Variables = std::map<std::string, std::string>;

LauncherInfo detect(const Variables& variables) {
  Result<LauncherInfo> info = detect_launcher([&variables](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
  EXPECT_TRUE(info.ok()) << info.status().message();
  return info.ok() ? *info : LauncherInfo();
}

// Task 2 of 3 on two nodes, and `more`.
Variables task(const Variables& more = {}) {
  Variables all = {{"SLURM_PROCID", "2"},         {"SLURM_LOCALID", "0"},
                   {"SLURM_NODEID", "1"},         {"SLURM_NTASKS", "3"},
                   {"SLURM_STEP_NUM_TASKS", "3"}, {"SLURM_NNODES", "2"},
                   {"SLURM_STEP_NUM_NODES", "2"}, {"SLURM_JOB_ID", "17"},
                   {"SLURM_STEP_ID", "4"},        {"SLURM_STEP_NODELIST", "node[1-2]"}};
  for (const auto& [name, value] : more) all[name] = value;
  return all;
}

std::string first_node(const Variables& more) { return detect(task(more)).first_node; }

TEST(Slurm, TheFirstNodeOfAStepIsThatOfRankZero) {
  const std::pair<const char*, const char*> lists[] = {
      {"node[1-2]", "node1"},
      {"gpu[007-9,12],login", "gpu007"},
      {"gpu[3,5]", "gpu3"},
      {"a-b.example,c", "a-b.example"},
      {"rack[1-2]gpu[04-7]", "rack1gpu04"},
      {"rack[2]-gpu[1,4]-ib", "rack2-gpu1-ib"},
      {"", ""},
      {"node[1-2", ""},
  };
  for (const auto& [list, first] : lists) EXPECT_EQ(first_node({{"SLURM_STEP_NODELIST", list}}), first) << list;
  EXPECT_EQ(first_node({{"SLURM_DISTRIBUTION", "cyclic"}}), "node1");
  EXPECT_EQ(first_node({{"SLURM_HET_SIZE", "1"}}), "node1");
}

// Slurm names the nodes in order, whatever the order of a step's parts or of the user's list.
TEST(Slurm, WhereTaskZeroMayBeAnywhereTheUserSaysWhere) {
  for (const Variables& more : {Variables{{"SLURM_DISTRIBUTION", "arbitrary"}}, Variables{{"SLURM_HET_SIZE", "2"}}})
    EXPECT_EQ(first_node(more), "") << more.begin()->first;
  EXPECT_EQ(detect(task({{"SLURM_HET_SIZE", "2"}, {"MASTER_ADDR", "node2"}})).master_addr, "node2");
}

TEST(Slurm, ATaskOfSrunWithPmiIsStillSlurms) {
  const LauncherInfo pmi2 = detect(task({{"PMI_RANK", "2"}, {"PMI_SIZE", "3"}, {"PMI_JOBID", "17.4"}}));
  EXPECT_EQ(pmi2.launcher, "Slurm");
  EXPECT_EQ(pmi2.job, "17.4");
  EXPECT_TRUE(pmi2.several_hosts_known());
  // In an allocation, hydra starts a process on each node by srun, which starts the ranks.
  const LauncherInfo hydra =
      detect(task({{"PMI_RANK", "2"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "1"}}));
  EXPECT_EQ(hydra.launcher, "hydra");
  EXPECT_EQ(detect(task({{"PMI_RANK", "5"}, {"PMI_SIZE", "6"}})).launcher, "hydra");
}

TEST(Slurm, AScriptOfAJobOfSeveralTasksIsNoRank) {
  const LauncherInfo script = detect({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "17"}});
  const Status s = meet_from_environment(script, Deadline::after_ms(200)).status();
  EXPECT_EQ(s.code(), moecclInvalidUsage);
  for (const char* part : {"4 tasks", "start it with srun"}) EXPECT_TRUE(contains(s.message(), part)) << s.message();
  EXPECT_EQ(detect({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_JOB_ID", "17"}}).contradiction, "");
}

// One that waits for a late rank keeps the others from no port.
TEST(Slurm, StepsOfAJobAndOfTheNextMeetAtDifferentPorts) {
  std::set<uint16_t> ports;
  for (const char* job : {"67108863", "67108864"}) {
    for (int step = 0; step < 61; ++step)
      ports.insert(detect(task({{"SLURM_JOB_ID", job}, {"SLURM_STEP_ID", std::to_string(step)}})).master_port);
  }
  EXPECT_EQ(ports.size(), 2u * 61u);
  EXPECT_GE(*ports.begin(), 20000);
  // The ranks meet at the next one.
  EXPECT_LT(*ports.rbegin() + 1, 29500);
  EXPECT_LT(detect(task({{"SLURM_JOB_ID", "155"}, {"SLURM_STEP_ID", "44"}})).master_port + 1, 29500);
  EXPECT_EQ(detect(task({{"MASTER_PORT", "4711"}})).master_port, 4711);
}

TEST(Slurm, AJobThatIsQueuedAgainIsAnother) {
  EXPECT_EQ(detect(task({{"SLURM_RESTART_COUNT", "1"}})).job, "17.4.1");
  EXPECT_EQ(detect(task()).job, "17.4");
}

TEST(Slurm, AProgramThatSetsRankFromSrunsVariablesNeedNotSayHowManyHosts) {
  const Variables set = {{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "node1"}};
  EXPECT_TRUE(detect(task(set)).several_hosts_known());
  EXPECT_FALSE(detect(set).several_hosts_known() || detect(set).one_host_known());
  Variables other = task(set);
  other["SLURM_STEP_NUM_TASKS"] = "1";
  EXPECT_FALSE(detect(other).several_hosts_known() || detect(other).one_host_known());
  Variables one_host = task(set);
  one_host["SLURM_STEP_NUM_NODES"] = "1";
  EXPECT_TRUE(detect(one_host).one_host_known());
}

}  // namespace
}  // namespace moeccl::bootstrap
