// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/launcher.h"

#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <map>

#include "src/bootstrap/unique_id.h"
#include "src/driver/interface.h"
#include "src/driver/process.h"
#include "tests/unit/bootstrap/group.h"

namespace moeccl::bootstrap {
namespace {

Deadline soon() { return Deadline::after_ms(patient_ms(20'000)); }

using Variables = std::map<std::string, std::string>;

Result<LauncherInfo> detect(const Variables& variables) {
  return detect_launcher([&variables](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

TEST(Launcher, HalfOfTheVariablesIsNamed) {
  EXPECT_NE(detect({{"RANK", "3"}}).status().message().find("RANK is set and WORLD_SIZE is not"), std::string::npos);
  EXPECT_NE(detect({{"WORLD_SIZE", "8"}}).status().message().find("WORLD_SIZE is set and RANK is not"),
            std::string::npos);
  EXPECT_NE(detect({}).status().message().find("no launcher"), std::string::npos);
  EXPECT_TRUE(detect({{"RANK", "3"}, {"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "4"}}).ok());
}

TEST(Launcher, EachDialectIsUnderstood) {
  Result<LauncherInfo> torch = detect({{"RANK", "3"},
                                       {"WORLD_SIZE", "8"},
                                       {"LOCAL_RANK", "1"},
                                       {"LOCAL_WORLD_SIZE", "2"},
                                       {"MASTER_ADDR", "10.0.0.1"},
                                       {"MASTER_PORT", "29500"},
                                       {"TORCHELASTIC_RUN_ID", "job"},
                                       {"TORCHELASTIC_RESTART_COUNT", "2"}});
  ASSERT_TRUE(torch.ok()) << torch.status().message();
  EXPECT_EQ(torch->launcher, "torchrun");
  EXPECT_EQ(torch->rank, 3);
  EXPECT_EQ(torch->n_ranks, 8);
  EXPECT_EQ(torch->local_rank, 1);
  EXPECT_EQ(torch->n_local, 2);
  EXPECT_EQ(torch->master_addr, "10.0.0.1");
  EXPECT_EQ(torch->master_port, 29500);
  EXPECT_EQ(torch->job, "job");
  EXPECT_EQ(torch->restarts, "2");
  EXPECT_TRUE(torch->several_hosts_known());

  Result<LauncherInfo> ompi = detect({{"OMPI_COMM_WORLD_RANK", "0"},
                                      {"OMPI_COMM_WORLD_SIZE", "4"},
                                      {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                      {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                                      {"PMIX_NAMESPACE", "prterun-1"},
                                      {"PMIX_SERVER_URI21", "1.0;tcp4://127.0.0.1:5000"}});
  ASSERT_TRUE(ompi.ok());
  EXPECT_EQ(ompi->job, "prterun-1");
  EXPECT_EQ(ompi->contact, "1.0;tcp4://127.0.0.1:5000");
  EXPECT_TRUE(ompi->one_host_known());

  Result<LauncherInfo> hydra = detect({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}});
  ASSERT_TRUE(hydra.ok());
  EXPECT_EQ(hydra->launcher, "hydra");
  EXPECT_FALSE(hydra->several_hosts_known() || hydra->one_host_known());

  Result<LauncherInfo> slurm = detect({{"SLURM_PROCID", "5"},
                                       {"SLURM_NTASKS", "64"},
                                       {"SLURM_STEP_NUM_TASKS", "6"},
                                       {"SLURM_LOCALID", "2"},
                                       {"SLURM_NNODES", "2"},
                                       {"SLURM_JOB_ID", "17"},
                                       {"SLURM_STEP_ID", "0"}});
  ASSERT_TRUE(slurm.ok());
  EXPECT_EQ(slurm->n_ranks, 6);
  EXPECT_EQ(slurm->job, "17.0");
  EXPECT_TRUE(slurm->several_hosts_known());
}

TEST(Launcher, NoneIsSaidAndNonsenseIsNamed) {
  EXPECT_EQ(detect({}).status().code(), moecclInvalidUsage);
  EXPECT_EQ(detect({{"RANK", "1"}}).status().code(), moecclInvalidUsage);
  const std::pair<Variables, const char*> bad[] = {
      {{{"RANK", "4"}, {"WORLD_SIZE", "4"}}, "RANK: \"4\""},
      {{{"RANK", "-1"}, {"WORLD_SIZE", "4"}}, "RANK: \"-1\""},
      {{{"RANK", "0"}, {"WORLD_SIZE", "many"}}, "WORLD_SIZE: \"many\""},
      {{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "70000"}}, "MASTER_PORT: \"70000\""},
      {{{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "3"}}, "MPI_LOCALNRANKS: \"3\""},
  };
  for (const auto& [variables, sentence] : bad) {
    const Status s = detect(variables).status();
    EXPECT_EQ(s.code(), moecclInvalidArgument);
    EXPECT_TRUE(contains(s.message(), sentence)) << s.message();
  }
}

// RANK and WORLD_SIZE of a shell's earlier job would make mpirun's ranks jobs of their own.
TEST(Launcher, ContradictoryLaunchersAreNamed) {
  const Variables left_over = {{"RANK", "0"}, {"WORLD_SIZE", "1"}};
  const auto both = [](Variables a, const Variables& b) { return a.insert(b.begin(), b.end()), a; };
  const auto ompi = [](const char* rank, const char* n) {
    return Variables{{"OMPI_COMM_WORLD_RANK", rank}, {"OMPI_COMM_WORLD_SIZE", n}};
  };
  const auto srun = [](const char* rank, const char* n) {
    return Variables{{"SLURM_PROCID", rank}, {"SLURM_STEP_NUM_TASKS", n}, {"SLURM_NTASKS", n}};
  };
  const auto of_ranks = [](const char* rank, const char* n) { return Variables{{"RANK", rank}, {"WORLD_SIZE", n}}; };
  for (const Variables& other : {ompi("0", "2"), srun("1", "2"), Variables{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}}) {
    const Result<LauncherInfo> info = detect(both(left_over, other));
    ASSERT_TRUE(info.ok()) << info.status().message();
    const Status s = meet_from_environment(*info, Deadline::after_ms(200)).status();
    EXPECT_EQ(s.code(), moecclInvalidUsage);
    for (const char* part : {"RANK is 0 and WORLD_SIZE is 1", " of 2 (", "unset RANK"})
      EXPECT_TRUE(contains(s.message(), part)) << s.message();
  }
  const auto contradicts = [](const Variables& all) { return !detect(all)->contradiction.empty(); };
  EXPECT_TRUE(contradicts(both(of_ranks("0", "2"), ompi("1", "2")))) << "another rank of as many";
  EXPECT_FALSE(contradicts(both(of_ranks("1", "2"), srun("1", "2")))) << "a program that sets them from Slurm's";
  EXPECT_FALSE(contradicts(both(of_ranks("5", "8"), srun("0", "1")))) << "a shell that srun --pty started";
  EXPECT_FALSE(contradicts(both(of_ranks("5", "8"), srun("1", "2")))) << "one process per host that starts four ranks";
  EXPECT_TRUE(contradicts(both(of_ranks("0", "8"), srun("1", "2")))) << "all eight on both hosts";
  EXPECT_FALSE(contradicts(both(of_ranks("5", "8"), {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}))) << "sbatch";
  const auto at = [&](Variables all) { return all["MASTER_ADDR"] = "node1", all; };
  EXPECT_FALSE(contradicts(at(both(of_ranks("0", "4"), srun("3", "4"))))) << "agents that sort the hosts otherwise";
  EXPECT_FALSE(contradicts(at(both(of_ranks("2", "3"), srun("3", "4"))))) << "agents on some of the hosts";
  EXPECT_TRUE(contradicts(at(both(left_over, srun("1", "2"))))) << "two jobs of one rank";
  Variables elastic = both(left_over, ompi("1", "2"));
  elastic["TORCHELASTIC_RUN_ID"] = "none";
  EXPECT_FALSE(contradicts(elastic));
  EXPECT_EQ(detect(elastic)->launcher, "torchrun");
}

LauncherInfo job(int rank, int n_ranks, const std::string& name) {
  LauncherInfo info;
  info.launcher = "torchrun";
  info.rank = rank;
  info.n_ranks = n_ranks;
  info.n_local = n_ranks;
  info.job = name + std::to_string(::getppid());
  info.master_addr = "127.0.0.1";
  info.master_port = 29500;
  return info;
}

TEST(Launcher, ProcessesMeetAgainAndAgain) {
  Children children;
  for (int rank = 0; rank < 5; ++rank) {
    children.start([rank] {
      for (int comm = 0; comm < 3; ++comm) {
        if (rank == 0) ::usleep(30'000);  // the others arrive before the rank that they ask
        const Deadline deadline = Deadline::after_ms(patient_ms(20'000));
        Result<moecclUniqueId> id = meet_from_environment(job(rank, 5, "again"), deadline);
        if (!id.ok()) return 1;
        Result<std::unique_ptr<Session>> session =
            Session::join(*id, rank, 5, deadline, {.wait_for_root = true, .others_alive = {}, .gone = {}});
        if (!session.ok()) return 2;
        if (!(*session)->barrier(deadline).ok()) return 3;
        (*session)->close();
      }
      return 0;
    });
  }
  for (size_t i = 0; i < children.size(); ++i) EXPECT_EQ(children.wait(i), 0) << "rank " << i;
}

TEST(Launcher, AMeetingThatFailedIsRepeated) {
  Children children;
  for (int rank = 0; rank < 2; ++rank) {
    children.start([rank] {
      const LauncherInfo info = job(rank, 2, "repeated");
      // Rank 0 comes when rank 1 has given up once.
      if (rank == 0) ::usleep(600'000);
      if (rank == 1 && meet_from_environment(info, Deadline::after_ms(200)).ok()) return 1;
      const Deadline deadline = Deadline::after_ms(patient_ms(20'000));
      Result<moecclUniqueId> id = meet_from_environment(info, deadline);
      if (!id.ok()) return 2;
      return Session::join(*id, rank, 2, deadline).ok() ? 0 : 3;
    });
  }
  for (size_t i = 0; i < children.size(); ++i) EXPECT_EQ(children.wait(i), 0) << "rank " << i;
}

TEST(Launcher, AJobWithoutRankZeroEndsAtItsDeadline) {
  const Stopwatch watch;
  const Status s = meet_from_environment(job(1, 2, "alone"), Deadline::after_ms(200)).status();
  EXPECT_EQ(s.code(), moecclTimeout);
  EXPECT_TRUE(contains(s.message(), "rank 0")) << s.message();
  EXPECT_FALSE(contains(s.message(), "MASTER_ADDR")) << s.message();
  MOECCL_EXPECT_WITHIN(watch, 2000);
  LauncherInfo unnamed = job(1, 2, "");
  unnamed.job = unnamed.master_addr = "";
  const Status of_parent = meet_from_environment(unnamed, Deadline::after_ms(200)).status();
  EXPECT_TRUE(contains(of_parent.message(), "the same MASTER_ADDR")) << of_parent.message();
}

// A loopback address leads every host, and every container with a network of its own, to itself.
TEST(Launcher, LocalhostIsAdvisedOnlyWhereRanksShareANetwork) {
  const auto error_of = [](const LauncherInfo& info) {
    return meet_from_environment(info, Deadline::after_ms(200)).status().message();
  };
  LauncherInfo unnamed = job(1, 2, "");
  unnamed.job = unnamed.master_addr = "";
  const std::string of_parent = error_of(unnamed);
  for (const char* part : {"with --network=host do, set it to localhost", "networks of their own count as hosts",
                           "the address of rank 0's container", "MOECCL_SECRET"})
    EXPECT_TRUE(contains(of_parent, part)) << of_parent;
  for (const int n_local : {0, 1}) {  // unknown, as in containers that a user starts, and one of two
    LauncherInfo far = job(1, 2, "far");
    far.n_local = n_local;
    const std::string of_loopback = error_of(far);
    for (const char* part : {"MASTER_ADDR is \"127.0.0.1\", so each rank", "networks of their own", "MOECCL_SECRET"})
      EXPECT_TRUE(contains(of_loopback, part)) << of_loopback;
  }
}

// Meets the other rank. Returns 0 if that is of the same job.
int meet_own_job(const LauncherInfo& info, char tag) {
  const Deadline deadline = Deadline::after_ms(patient_ms(20'000));
  const Result<moecclUniqueId> id = meet_from_environment(info, deadline);
  if (!id.ok()) return 1;
  auto session = Session::join(*id, info.rank, 2, deadline, {.wait_for_root = true, .others_alive = {}, .gone = {}});
  if (!session.ok()) return 2;
  const auto tags = (*session)->all_gather(std::as_bytes(std::span(&tag, 1)), deadline);
  if (!tags.ok()) return 3;
  (*session)->close();
  for (const auto& of_rank : *tags)
    if (of_rank != (*tags)[0]) return 4;
  return 0;
}

// Runs two jobs of two ranks, whose ranks come so late that each rank 1 asks while only the other job's rank 0 listens.
// `body` runs in a container, that is as the first process of a pid namespace, and starts the job's ranks.
using Container = std::function<int(char tag, const int64_t (&late_ms)[2])>;
void run_two_containers(const Container& body) {
  constexpr int64_t kLateMs[2][2] = {{0, 500}, {800, 0}};
  Children jobs;
  for (int j = 0; j < 2; ++j) {
    jobs.start([&, j] {
      if (::unshare(CLONE_NEWPID) != 0) return 77;
      Children first;
      first.start([&, j] { return body(static_cast<char>('A' + j), kLateMs[j]); });
      return first.wait(0);
    });
  }
  const int codes[] = {jobs.wait(0), jobs.wait(1)};
  if (codes[0] == 77) GTEST_SKIP() << "this user may not make pid namespaces";
  EXPECT_EQ(codes[0], 0);
  EXPECT_EQ(codes[1], 0);
}

int start_ranks(char tag, const int64_t (&late_ms)[2], const std::function<LauncherInfo(int rank)>& info_of) {
  Children ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.start([&, rank] {
      ::usleep(static_cast<useconds_t>(patient_ms(late_ms[rank]) * 1000));
      return meet_own_job(info_of(rank), tag);
    });
  }
  const int codes[] = {ranks.wait(0), ranks.wait(1)};
  return codes[0] != 0 ? codes[0] : codes[1];
}

// Containers of one network: the same entry point has the same number in each, and so have the ranks' parents.
TEST(Launcher, JobsOfTwoPidNamespacesDoNotMeet) {
  run_two_containers([](char tag, const int64_t(&late_ms)[2]) {
    if (::getpid() != 1) return 5;
    return start_ranks(tag, late_ms, [](int rank) {
      LauncherInfo info = job(rank, 2, "");
      info.job = info.master_addr = "";
      return info;
    });
  });
}

// Open MPI makes the job's number from host name and process number, but its server has a port of its own.
TEST(Launcher, JobsOfTwoMpirunsDoNotMeet) {
  run_two_containers([](char tag, const int64_t(&late_ms)[2]) {
    return start_ranks(tag, late_ms, [tag](int rank) {
      LauncherInfo info = job(rank, 2, "");
      info.launcher = "Open MPI";
      info.job = "1379794945";
      info.contact = std::string("1379794944.0;tcp://192.0.2.2:4000") + (tag == 'A' ? "1" : "2");
      info.master_addr = "";
      return info;
    });
  });
}

// Without the server's address, the numbers' namespace is all that tells the jobs apart.
TEST(Launcher, JobsOfTwoMpirunsWithoutAnAddressDoNotMeet) {
  run_two_containers([](char tag, const int64_t(&late_ms)[2]) {
    return start_ranks(tag, late_ms, [](int rank) {
      LauncherInfo info = job(rank, 2, "");
      info.launcher = "Open MPI";
      info.job = "1379794945";
      info.master_addr = "";
      return info;
    });
  });
}

// torchrun calls every job "none" and its own address 127.0.0.1, which the folder of the socket does not tell apart.
TEST(Launcher, JobsOfTwoNetworksThatShareAFolderDoNotMeet) {
  run_two_containers([](char tag, const int64_t(&late_ms)[2]) {
    if (::unshare(CLONE_NEWNET) != 0) return 6;
    return start_ranks(tag, late_ms, [](int rank) {
      LauncherInfo info = job(rank, 2, "");
      info.job = "none.0";
      return info;
    });
  });
}

TEST(Launcher, SeveralHostsNeedASecret) {
  LauncherInfo info = job(0, 4, "hosts");
  info.n_local = 2;
  info.master_addr = "192.0.2.77";
  const Status s = meet_from_environment(info, Deadline::after_ms(200)).status();
  EXPECT_EQ(s.code(), moecclInvalidUsage);
  EXPECT_TRUE(contains(s.message(), "MOECCL_SECRET")) << s.message();
}

// As on several hosts: through the address of an interface and a key from MOECCL_SECRET, which env() reads once, so
// this needs new processes.
void meet_far_ranks(const std::string& master) {
  Children children;
  const std::string port = std::to_string(tests::free_port());
  for (int rank = 0; rank < 4; ++rank) {
    children.start([rank, &master, &port] {
      // env() of the test's process may have been read already, and a secret counts only if it is set before that. exec
      // gives a fresh env().
      ::setenv("MOECCL_SECRET", "a secret of the test", 1);
      ::setenv("MOECCL_TEST_FAR_ADDR", master.c_str(), 1);
      ::setenv("MOECCL_TEST_FAR_PORT", port.c_str(), 1);
      ::setenv("MOECCL_TEST_FAR_RANK", std::to_string(rank).c_str(), 1);
      ::execl("/proc/self/exe", "self", "--gtest_also_run_disabled_tests", "--gtest_filter=*DISABLED_FarRank",
              static_cast<char*>(nullptr));
      return 1;
    });
  }
  for (size_t i = 0; i < children.size(); ++i) EXPECT_EQ(children.wait(i), 0) << "rank " << i;
}

Result<std::string> address_here() {
  LauncherInfo far = job(0, 4, "far");
  far.n_local = 2;
  far.master_addr.clear();
  return address_for_other_hosts(far, soon());
}

TEST(Launcher, RanksOfSeveralHostsMeetThroughTheSecret) {
  const Result<std::string> own = address_here();
  if (!own.ok()) GTEST_SKIP() << own.status().message();
  meet_far_ranks(*own);
}

// As a host's own name may on that host, this one leads to 127.0.1.1 without being a name of loopback.
constexpr const char* kNameOfThisHost = "0x7f000101";

bool is_loopback_here() {
  const auto all = driver::resolve_all(kNameOfThisHost, 0, soon());
  return all.ok() && all->front().is_loopback();
}

TEST(Launcher, ANameThatIsLoopbackHereLeadsToTheAddressOfThisHost) {
  if (!is_loopback_here()) GTEST_SKIP() << "this resolver takes no hexadecimal addresses";
  const Result<std::string> own = address_here();
  if (!own.ok()) GTEST_SKIP() << own.status().message();
  meet_far_ranks(kNameOfThisHost);
}

// The interface towards other hosts may be another than the one that they know this host by.
TEST(Launcher, MoecclSocketAddrSaysWhereAHostWhoseNameIsLoopbackIsMet) {
  if (!is_loopback_here()) GTEST_SKIP() << "this resolver takes no hexadecimal addresses";
  const Result<std::string> usual = address_here();
  const auto interfaces = driver::interfaces();
  std::string other;
  for (const driver::Interface& i : interfaces.ok() ? *interfaces : std::vector<driver::Interface>())
    if (!i.loopback && usual.ok() && i.address.host() != *usual) other = i.address.host();
  if (other.empty()) GTEST_SKIP() << "this host has no second address";
  Children children;
  children.start([&other] {
    ::setenv("MOECCL_SECRET", "a secret of the test", 1);
    ::setenv("MOECCL_SOCKET_ADDR", other.c_str(), 1);
    ::execl("/proc/self/exe", "self", "--gtest_also_run_disabled_tests", "--gtest_filter=*DISABLED_MeetsAtTheSetting",
            static_cast<char*>(nullptr));
    return 1;
  });
  EXPECT_EQ(children.wait(0), 0);
}

TEST(Launcher, DISABLED_MeetsAtTheSetting) {
  const char* wanted = std::getenv("MOECCL_SOCKET_ADDR");
  if (wanted == nullptr) GTEST_SKIP() << "a part of MoecclSocketAddrSaysWhereAHostWhoseNameIsLoopbackIsMet";
  LauncherInfo info = job(0, 4, "set");
  info.n_local = 2;
  info.master_addr = kNameOfThisHost;
  info.master_port = static_cast<uint16_t>(tests::free_port());
  const Result<moecclUniqueId> id = meet_from_environment(info, Deadline::after_ms(patient_ms(15'000)));
  ASSERT_TRUE(id.ok()) << id.status().message();
  EXPECT_EQ(decode_unique_id(*id)->address.host(), wanted);
  EXPECT_EQ(decode_unique_id(*id)->address.port(), info.master_port + 1);
}

// Debian gives a host's own name the address 127.0.1.1, at which no other host finds it.
TEST(Launcher, ALoopbackAddressOfTheMasterIsNotForOtherHosts) {
  LauncherInfo info;
  info.n_ranks = 4;
  info.n_local = 2;
  for (const char* name : {"localhost", "127.0.1.1"}) {
    info.master_addr = name;
    const Result<std::string> own = address_for_other_hosts(info, soon());
    const std::string text = own.ok() ? *own : own.status().message();
    EXPECT_TRUE(own.ok() ? !text.starts_with("127.") : text.find("MOECCL_SOCKET_ADDR") != std::string::npos) << text;
  }
}

// An id has no room for the interface that such an address needs, and other hosts may call theirs otherwise.
TEST(Launcher, ALinkLocalAddressOfTheMasterIsRefused) {
  for (const char* name : {"fe80::1%lo", "[fe80::1%lo]"}) {
    const Status s = place_of_rank_0("MASTER_ADDR", name, 29501, soon()).status();
    EXPECT_EQ(s.code(), moecclInvalidArgument) << s.message();
    for (const char* part : {"MASTER_ADDR", "link-local", "an address of another kind"})
      EXPECT_TRUE(contains(s.message(), part)) << s.message();
  }
}

TEST(Launcher, DISABLED_FarRank) {
  const char* rank_text = std::getenv("MOECCL_TEST_FAR_RANK");
  if (rank_text == nullptr) GTEST_SKIP() << "a part of RanksOfSeveralHostsMeetThroughTheSecret";
  const int rank = std::atoi(rank_text);
  const Result<LauncherInfo> detected = detect({{"RANK", rank_text},
                                                {"WORLD_SIZE", "4"},
                                                {"LOCAL_WORLD_SIZE", "2"},
                                                {"GROUP_WORLD_SIZE", "2"},
                                                {"MASTER_ADDR", std::getenv("MOECCL_TEST_FAR_ADDR")},
                                                {"MASTER_PORT", std::getenv("MOECCL_TEST_FAR_PORT")},
                                                {"TORCHELASTIC_RUN_ID", "far" + std::to_string(::getppid())},
                                                // The agent of each host counts its own restarts.
                                                {"TORCHELASTIC_RESTART_COUNT", std::to_string(rank / 2)}});
  ASSERT_TRUE(detected.ok()) << detected.status().message();
  const LauncherInfo& info = *detected;
  for (int comm = 0; comm < 2; ++comm) {
    const Deadline deadline = Deadline::after_ms(patient_ms(15'000));
    Result<moecclUniqueId> id = meet_from_environment(info, deadline);
    ASSERT_TRUE(id.ok()) << id.status().message();
    EXPECT_FALSE(decode_unique_id(*id)->address.is_loopback());
    Result<std::unique_ptr<Session>> session =
        Session::join(*id, rank, 4, deadline, {.wait_for_root = true, .others_alive = {}, .gone = {}});
    ASSERT_TRUE(session.ok()) << session.status().message();
    EXPECT_FALSE((*session)->over_unix());
    ASSERT_TRUE((*session)->barrier(deadline).ok());
    (*session)->close();
  }
}

TEST(UniqueIdOfThisProcess, IsMadeAndServed) {
  Result<moecclUniqueId> id = make_unique_id();
  ASSERT_TRUE(id.ok()) << id.status().message();
  Result<std::unique_ptr<Session>> session = Session::join(*id, 0, 1, Deadline::after_ms(patient_ms(5000)));
  ASSERT_TRUE(session.ok()) << session.status().message();
  (*session)->close();
}

}  // namespace
}  // namespace moeccl::bootstrap
