// SPDX-License-Identifier: Apache-2.0
#include "src/base/env.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "src/base/log.h"
#include "src/base/nccl_files.h"
#include "tests/support/timing.h"

namespace moeccl {
namespace {

EnvParse parse(std::initializer_list<const char*> variables) {
  return parse_env(std::span<const char* const>(variables.begin(), variables.size()));
}

TEST(Env, NothingSetGivesTheDefaults) {
  const EnvParse p = parse({"PATH=/bin", "HOME=/root", "NOEQUALS"});
  EXPECT_TRUE(p.status.ok());
  EXPECT_TRUE(p.warnings.empty());
  EXPECT_EQ(p.env.timeout_ms, 600'000);
  EXPECT_EQ(p.env.init_timeout_ms, 60'000);
  EXPECT_EQ(p.env.staging_bytes, 0);
  EXPECT_EQ(p.env.moe_memory_cap, 0);
  EXPECT_EQ(p.env.log_level, LogLevel::kWarn);
  EXPECT_EQ(p.env.spin_us, -1);
  EXPECT_FALSE(p.env.no_cma);
}

TEST(Env, TestsAndShimsReadTheirOwnVariables) {
  const EnvParse p = parse({"MOECCL_TEST_SEED=1", "MOECCL_SHIM_MODE=auto", "MOECCL_TUNER_RAILS=8"});
  EXPECT_TRUE(p.warnings.empty());
}

TEST(Env, GoodValuesAreRead) {
  const EnvParse p = parse({"MOECCL_TIMEOUT_MS=1500", "MOECCL_INIT_TIMEOUT_MS=1", "MOECCL_STAGING_BYTES=4M",
                            "MOECCL_MOE_MEMORY_CAP=2G", "MOECCL_DEBUG=TRACE", "MOECCL_PLAN=ring", "MOECCL_KERNELS=avx2",
                            "MOECCL_TOPOLOGY=node:2(bw=1GB/s) gpu:4", "MOECCL_SECRET=0123456789abcdef",
                            "MOECCL_SOCKET_ADDR=10.0.0.1:80", "MOECCL_PORT_RANGE=30000-30015", "MOECCL_SPIN_US=0",
                            "MOECCL_NO_CMA=1", "MOECCL_HOST_ID=left"});
  EXPECT_TRUE(p.status.ok()) << p.status.message();
  EXPECT_TRUE(p.warnings.empty());
  EXPECT_EQ(p.env.timeout_ms, 1500);
  EXPECT_EQ(p.env.init_timeout_ms, 1);
  EXPECT_EQ(p.env.staging_bytes, 4 << 20);
  EXPECT_EQ(p.env.moe_memory_cap, int64_t{2} << 30);
  EXPECT_EQ(p.env.log_level, LogLevel::kTrace);
  EXPECT_EQ(p.env.plan, "ring");
  EXPECT_EQ(p.env.port_range.first, 30'000);
  EXPECT_EQ(p.env.port_range.last, 30'015);
  EXPECT_EQ(p.env.kernels, "avx2");
  EXPECT_EQ(p.env.topology, "node:2(bw=1GB/s) gpu:4");
  EXPECT_EQ(p.env.secret, "0123456789abcdef");
  EXPECT_EQ(p.env.socket_addr, "10.0.0.1:80");
  EXPECT_EQ(p.env.spin_us, 0);
  EXPECT_TRUE(p.env.no_cma);
  EXPECT_EQ(p.env.host_id, "left");
}

TEST(Env, BadValuesKeepTheDefaultAndNameVariableValueAndWhatIsAccepted) {
  const char* bad[] = {
      "MOECCL_TIMEOUT_MS=soon",     "MOECCL_TIMEOUT_MS=0",
      "MOECCL_TIMEOUT_MS=-1",       "MOECCL_TIMEOUT_MS=1.5",
      "MOECCL_TIMEOUT_MS= 1",       "MOECCL_TIMEOUT_MS=99999999999999999999",
      "MOECCL_INIT_TIMEOUT_MS=x",   "MOECCL_STAGING_BYTES=16T",
      "MOECCL_STAGING_BYTES=M",     "MOECCL_STAGING_BYTES=-1M",
      "MOECCL_STAGING_BYTES=1",     "MOECCL_STAGING_BYTES=99999999999G",
      "MOECCL_DEBUG=warn",          "MOECCL_DEBUG=2",
      "MOECCL_SPIN_US=-2",          "MOECCL_SPIN_US=1000001",
      "MOECCL_NO_CMA=yes",          "MOECCL_NO_CMA=2",
      "MOECCL_PLAN=\x01",           "MOECCL_MOE_MEMORY_CAP=12KB",
      "MOECCL_MOE_MEMORY_CAP=0x10", "MOECCL_PORT_RANGE=30000",
      "MOECCL_PORT_RANGE=9-8",      "MOECCL_PORT_RANGE=1-65536",
      "MOECCL_PORT_RANGE=0-9",      "MOECCL_PORT_RANGE=1-2-3",
  };
  for (const char* entry : bad) {
    const std::string text = entry;
    const size_t equals = text.find('=');
    const EnvParse p = parse({entry});
    EXPECT_EQ(p.status.code(), moecclInvalidArgument) << entry;
    EXPECT_NE(p.status.message().find(text.substr(0, equals)), std::string::npos) << p.status.message();
    EXPECT_NE(p.status.message().find(text.substr(equals + 1)), std::string::npos) << p.status.message();
    EXPECT_NE(p.status.message().find("give "), std::string::npos) << p.status.message();
    EXPECT_EQ(p.warnings.size(), 1u);
    EXPECT_EQ(p.env.timeout_ms, 600'000);
    EXPECT_EQ(p.env.staging_bytes, 0);
  }
}

// Tests every variable with meaningless values. Values that a variable accepts anyway, such as a file's name, are not
// counted.
TEST(Env, GarbageInAnyVariableIsNamedWithWhatIsAccepted) {
  const std::vector<std::string_view> names = variable_names();
  ASSERT_GT(names.size(), 30u);
  const std::string odd[] = {"soon",        "-2",
                             "1.5",         " 1",
                             "1 ",          "0x10",
                             "1e3",         "+1",
                             "++1",         "yes",
                             "true",        "2K2",
                             "-1M",         "K",
                             "NaN",         "99999999999999999999",
                             "\x01",        "1\n",
                             "\t",          "1,2",
                             "--",          "%n%n",
                             "9999999999G", "-",
                             "$(id)",       "''",
                             "\xff\xfe",    "1\x7f",
                             "1;true",      std::string(5000, '7')};
  int n_refused = 0;
  for (const std::string_view known : names) {
    const std::string name(known);
    for (const std::string& value : odd) {
      const std::string entry = name + "=" + value;
      const EnvParse p = parse({entry.c_str()});
      if (p.status.ok()) continue;
      ++n_refused;
      EXPECT_EQ(p.status.code(), moecclInvalidArgument) << entry;
      const std::string& sentence = p.status.message();
      EXPECT_TRUE(sentence.starts_with(name + ": ")) << sentence;
      EXPECT_NE(sentence.find("is not accepted; give "), std::string::npos) << sentence;
      if (name != "MOECCL_SECRET") {
        EXPECT_NE(sentence.find(value.substr(0, 64)), std::string::npos) << sentence;
      }
      EXPECT_EQ(p.warnings.size(), 1u) << entry;
    }
  }
  EXPECT_GE(n_refused, 500);
  printf("%d bad values of %zu variables: each is named with what is accepted\n", n_refused, names.size());
}

TEST(Env, ProgramsWithMoreRightsThanTheirUserOpenNoFilesThatTheUserNames) {
  const char* given[] = {"MOECCL_DEBUG_FILE=/etc/a",      "MOECCL_DUMP=/etc/b",          "MOECCL_PROFILE=/etc/c",
                         "MOECCL_TOPOLOGY=/etc/d",        "MOECCL_SECRET_FILE=/etc/e",   "MOECCL_CUDA_DRIVER=/tmp/f",
                         "MOECCL_NET_PLUGIN=/tmp/g",      "NCCL_NET_PLUGIN=/tmp/h",      "MOECCL_IB_LIBRARY=/tmp/i",
                         "MOECCL_PROFILER_PLUGIN=/tmp/j", "NCCL_PROFILER_PLUGIN=/tmp/k", "MOECCL_TIMEOUT_MS=1500"};
  for (const bool privileged : {false, true}) {
    const Env e = parse_env(given, privileged).env;
    for (const std::string& value : {e.log_file, e.dump, e.profile, e.topology, e.secret_file, e.cuda_driver,
                                     e.net_plugin, e.ib_library, e.profiler_plugin})
      EXPECT_EQ(value.empty(), privileged) << value;
    EXPECT_EQ(e.timeout_ms, 1500);
  }
}

TEST(Env, EmptyMeansUnset) {
  const EnvParse p = parse({"MOECCL_TIMEOUT_MS=", "MOECCL_DEBUG="});
  EXPECT_TRUE(p.status.ok());
  EXPECT_TRUE(p.warnings.empty());
}

TEST(Env, NcclsNameCountsWhereOursIsNotGiven) {
  EXPECT_EQ(parse({"NCCL_NET_PLUGIN=ucx"}).env.net_plugin, "ucx");
  EXPECT_EQ(parse({"MOECCL_NET_PLUGIN=ours", "NCCL_NET_PLUGIN=ucx"}).env.net_plugin, "ours");
  EXPECT_EQ(parse({"NCCL_NET_PLUGIN=ucx", "MOECCL_NET_PLUGIN="}).env.net_plugin, "ucx");
  EXPECT_EQ(parse({"NCCL_PROFILER_PLUGIN=inspector"}).env.profiler_plugin, "inspector");
  EXPECT_EQ(parse({"NCCL_SOCKET_IFNAME=^docker"}).env.socket_ifname, "^docker");
  EXPECT_EQ(parse({"NCCL_SOCKET_IFNAME=^docker", "MOECCL_SOCKET_IFNAME=eth0"}).env.socket_ifname, "eth0");
  EXPECT_FALSE(parse({"NCCL_GRAPH_MIXING_SUPPORT=0"}).env.cuda_graph_mixing);
  EXPECT_TRUE(parse({"NCCL_GRAPH_MIXING_SUPPORT=0", "MOECCL_CUDA_GRAPH_MIXING=1"}).env.cuda_graph_mixing);
  const EnvParse other = parse({"NCCL_NET_PLUGIN=\x01", "NCCL_DEBUG=INFO", "NCCL_NET_PLUGIN"});
  EXPECT_TRUE(other.status.ok() && other.warnings.empty() && other.env.net_plugin.empty());
}

TEST(Env, OfRdmaOursCountBeforeNcclsAndBothAreRead) {
  const EnvParse p =
      parse({"MOECCL_IB_TC=106", "NCCL_IB_TC=1", "NCCL_IB_GID_INDEX=3", "NCCL_IB_SL=5", "NCCL_IB_TIMEOUT=22",
             "NCCL_IB_RETRY_CNT=6", "NCCL_IB_PKEY=2", "NCCL_IB_HCA=mlx5_0:1", "NCCL_IB_QPS_PER_CONNECTION=4",
             "NCCL_IB_ADAPTIVE_ROUTING=1", "NCCL_IB_LIBRARY=/no/alias", "MOECCL_IB_SL="});
  ASSERT_TRUE(p.status.ok());
  EXPECT_EQ(p.env.ib_traffic_class, 106);
  EXPECT_EQ(p.env.ib_gid_index, 3);
  EXPECT_EQ(p.env.ib_service_level, 5);
  EXPECT_EQ(p.env.ib_timeout, 22);
  EXPECT_EQ(p.env.ib_retry_count, 6);
  EXPECT_EQ(p.env.ib_pkey_index, 2);
  EXPECT_EQ(p.env.ib_hca, "mlx5_0:1");
  EXPECT_EQ(p.env.ib_queue_pairs, 4u);
  EXPECT_EQ(p.env.ib_adaptive_routing, 1);
  EXPECT_EQ(p.env.ib_library + p.env.ib_refused, "");
  EXPECT_TRUE(p.notes.empty());
}

TEST(Env, OfNcclTurnsRdmaOff) {
  EXPECT_EQ(parse({"NCCL_IB_DISABLE=0"}).env.ib_library, "");
  EXPECT_EQ(parse({"NCCL_IB_DISABLE=1", "MOECCL_IB_LIBRARY="}).env.ib_library, "none");
  EXPECT_EQ(parse({"MOECCL_IB_LIBRARY=libibverbs.so.1", "NCCL_IB_DISABLE=1"}).env.ib_library, "libibverbs.so.1");
}

TEST(Env, BadValuesForRdmaNameTheVariable) {
  for (const char* entry : {"MOECCL_IB_TC=256", "MOECCL_IB_TC=0x6a", "MOECCL_IB_TIMEOUT=0", "MOECCL_IB_TIMEOUT=22 ",
                            "MOECCL_IB_RETRY_CNT=8", "MOECCL_IB_PKEY=-1", "MOECCL_IB_HCA=mlx5_0:x", "MOECCL_IB_HCA=:1",
                            "MOECCL_IB_HCA=mlx5_0:", "MOECCL_IB_QPS_PER_CONNECTION=9", "MOECCL_IB_GID_INDEX=256"})
    EXPECT_EQ(parse({entry}).status.code(), moecclInvalidArgument) << entry;
  EXPECT_EQ(parse({"MOECCL_IB_TIMEOUT=-1"}).env.ib_timeout, -1);
  // NCCL's are only a reason not to use RDMA.
  for (const auto& entry :
       {std::pair("NCCL_IB_SL=16", "NCCL_IB_SL: \"16\" is not accepted; give a service level, 0 to 15"),
        std::pair("NCCL_IB_GID_INDEX=x", "NCCL_IB_GID_INDEX: \"x\" is"),
        std::pair("NCCL_IB_HCA=^", "NCCL_IB_HCA: \"^\" is")}) {
    const EnvParse p = parse({entry.first});
    EXPECT_TRUE(p.status.ok() && p.warnings.empty());
    EXPECT_TRUE(p.env.ib_refused.starts_with(entry.second)) << p.env.ib_refused;
  }
  EXPECT_EQ(parse({"NCCL_IB_SL=16", "MOECCL_IB_SL=2"}).env.ib_refused, "") << "ours counts";
}

// What NCCL accepts is no reason to go without RDMA.
TEST(Env, NcclsValuesOutOfOurRangeCountAsTheNearest) {
  const EnvParse p = parse({"NCCL_IB_QPS_PER_CONNECTION=16", "NCCL_IB_TC=0x6a", "NCCL_IB_SL=-1", "NCCL_IB_TIMEOUT=0",
                            "NCCL_IB_RETRY_CNT=13", "NCCL_IB_GID_INDEX=-2", "NCCL_IB_ADAPTIVE_ROUTING=-2"});
  EXPECT_EQ(p.env.ib_refused, "");
  EXPECT_EQ(p.env.ib_queue_pairs, kMaxQueuePairs);
  EXPECT_EQ(p.env.ib_traffic_class, 0x6a);
  EXPECT_EQ(p.env.ib_service_level, 0);
  EXPECT_EQ(p.env.ib_timeout, 31) << "no limit, as far as the NIC can";
  EXPECT_EQ(p.env.ib_retry_count, 7);
  EXPECT_EQ(p.env.ib_gid_index, -1);
  EXPECT_EQ(p.env.ib_adaptive_routing, -1);
  ASSERT_EQ(p.notes.size(), 7u);
  EXPECT_EQ(p.notes.back(), "NCCL_IB_ADAPTIVE_ROUTING=-2 counts as -1");
  EXPECT_EQ(parse({"NCCL_IB_TC=-1", "NCCL_IB_ADAPTIVE_ROUTING=2"}).env.ib_adaptive_routing, 1);
  EXPECT_EQ(parse({"NCCL_IB_TIMEOUT=50"}).env.ib_timeout, 18) << "the NIC takes the lowest 5 bits";
  EXPECT_EQ(parse({"NCCL_IB_TIMEOUT=64"}).env.ib_timeout, 31) << "these are 0";
  EXPECT_EQ(parse({"NCCL_IB_RETRY_CNT=-1"}).env.ib_retry_count, 7);
  EXPECT_EQ(parse({"NCCL_IB_TIMEOUT=22 # as on the old cluster"}).env.ib_timeout, 22);
}

TEST(Env, SecretsAreNeverShown) {
  const EnvParse p = parse({"MOECCL_SECRET=hunter2"});
  EXPECT_EQ(p.status.code(), moecclInvalidArgument);
  EXPECT_EQ(p.status.message().find("hunter2"), std::string::npos);
  ASSERT_EQ(p.warnings.size(), 1u);
  EXPECT_EQ(p.warnings[0].find("hunter2"), std::string::npos);
}

TEST(Env, UnknownVariablesWarnOnceAndTheNearestNameIsSuggested) {
  const EnvParse p = parse({"MOECCL_NETS=tcp", "MOECCL_TIMEOUT=5", "MOECCL_FOO=1", "MOECCL_IB_HCAS=mlx5_0",
                            "MOECCL_SHIM_MODES=auto", "MOECCL_TEST_SEED=1"});
  EXPECT_TRUE(p.status.ok());
  ASSERT_EQ(p.warnings.size(), 1u);
  EXPECT_EQ(p.warnings[0],
            "unknown variables are ignored: MOECCL_NETS (did you mean MOECCL_NET?), MOECCL_TIMEOUT (did you mean "
            "MOECCL_TIMEOUT_MS?), MOECCL_FOO, MOECCL_IB_HCAS (did you mean MOECCL_IB_HCA?), MOECCL_SHIM_MODES (did you "
            "mean MOECCL_SHIM_MODE?); docs/variables.md lists all");
}

TEST(Env, AWarningOfABadValueSaysThatNoCommunicatorCanBeMade) {
  const EnvParse p = parse({"MOECCL_NET=tpc"});
  ASSERT_EQ(p.warnings.size(), 1u);
  EXPECT_EQ(p.warnings[0], p.status.message() + "; until then no communicator can be made");
}

TEST(Env, SuffixesArePowersOf1024AndOverflowIsRefused) {
  int64_t bytes = -1;
  EXPECT_TRUE(parse_bytes("0", &bytes));
  EXPECT_EQ(bytes, 0);
  EXPECT_TRUE(parse_bytes("3k", &bytes));
  EXPECT_EQ(bytes, 3072);
  EXPECT_TRUE(parse_bytes("8589934591G", &bytes));
  EXPECT_FALSE(parse_bytes("8589934592G", &bytes));
  EXPECT_FALSE(parse_bytes("", &bytes));
  EXPECT_FALSE(parse_bytes("K", &bytes));
  EXPECT_FALSE(parse_bytes("1KK", &bytes));
}

TEST(Log, OneWholeLineWithoutControlCharacters) {
  testing::internal::CaptureStderr();
  write_log_line(LogLevel::kWarn, "first\nsecond\x1b[31m");
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(text.find('\n'), text.size() - 1);
  EXPECT_TRUE(std::regex_search(text, std::regex("^moeccl: [^ ]+:" + std::to_string(getpid()) +
                                                 " 20\\d\\d-\\d\\d-\\d\\dT\\d\\d:\\d\\d:\\d\\d\\.\\d{3}Z WARN ")))
      << text;
  EXPECT_NE(text.find(" WARN first?second?[31m"), std::string::npos) << text;
}

// A process of its own, because env() reads the variables once.
TEST(Log, GoesToAFileOfEachProcess) {
  const std::string folder = testing::TempDir() + "/moeccl_log_" + std::to_string(getpid());
  ASSERT_EQ(mkdir(folder.c_str(), 0700), 0);
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  const std::string run =
      "MOECCL_DEBUG_FILE='" + folder + "/%p.log' '" + program +
      "' --gtest_also_run_disabled_tests --gtest_filter=Log.DISABLED_WritesAndForks > /dev/null 2> '" + folder +
      "/stderr'";
  ASSERT_EQ(std::system(run.c_str()), 0);
  std::multiset<std::string> lines;
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream in(entry.path());
    const std::string text((std::istreambuf_iterator<char>(in)), {});
    if (entry.path().filename() == "stderr") {
      EXPECT_EQ(text, "");
      continue;
    }
    ++files;
    lines.insert(text.substr(text.rfind("WARN")));
    EXPECT_NE(text.find(entry.path().stem().string()), std::string::npos) << "the process's own number: " << text;
  }
  EXPECT_EQ(files, 2u);
  EXPECT_EQ(lines, (std::multiset<std::string>{"WARN parent\n", "WARN child\n"}));
  std::filesystem::remove_all(folder);
  const std::string nowhere =
      "MOECCL_DEBUG_FILE=/nonexistent/log '" + program +
      "' --gtest_also_run_disabled_tests --gtest_filter=Log.DISABLED_WritesAndForks 2>&1 | grep -q "
      "'MOECCL_DEBUG_FILE: /nonexistent/log cannot be opened: No such file or directory'";
  EXPECT_EQ(std::system(nowhere.c_str()), 0);
}
// A disk that is full must not swallow what says so.
TEST(Log, LinesThatTheFileHasNoRoomForGoToStderr) {
  if (access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full here";
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  const std::string out = testing::TempDir() + "/moeccl_full_" + std::to_string(getpid());
  const std::string run =
      "MOECCL_DEBUG_FILE=/dev/full '" + program +
      "' --gtest_also_run_disabled_tests --gtest_filter=Log.DISABLED_WritesAndForks > /dev/null 2> '" + out + "'";
  ASSERT_EQ(std::system(run.c_str()), 0);
  std::ifstream in(out);
  const std::string text((std::istreambuf_iterator<char>(in)), {});
  for (const char* line :
       {"WARN parent\n", "WARN child\n", "MOECCL_DEBUG_FILE: a line could not be written: No space left on device"})
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
  std::filesystem::remove(out);
}
TEST(Log, DISABLED_WritesAndForks) {
  write_log_line(LogLevel::kWarn, "parent");
  const pid_t child = fork();
  if (child == 0) {
    write_log_line(LogLevel::kWarn, "child");
    _exit(0);
  }
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
}

// The first thing that a process reads of the environment may itself be what is reported.
TEST(Log, VariablesThatAreUnknownOrBadAreSaidOnceAndEndNothing) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  const std::string file = testing::TempDir() + "/moeccl_bad_" + std::to_string(getpid());
  for (const std::string& where : {std::string("/dev/stdout"), file}) {
    const std::string run = "MOECCL_SPIN_USS=1 MOECCL_SPIN_US=abc " +
                            (where == file ? "MOECCL_DEBUG_FILE='" + file + "' '" : "'") + program +
                            "' --gtest_also_run_disabled_tests --gtest_filter=Log.DISABLED_AsksWhatIsLogged > '" +
                            file + ".out' 2>&1";
    ASSERT_EQ(std::system(run.c_str()), 0) << where;
    std::ifstream in(where == file ? file : file + ".out");
    const std::string text((std::istreambuf_iterator<char>(in)), {});
    for (const char* word : {"MOECCL_SPIN_US: \"abc\"", "MOECCL_SPIN_USS (did you mean MOECCL_SPIN_US?)"}) {
      const size_t at = text.find(word);
      EXPECT_NE(at, std::string::npos) << where << ": " << text;
      EXPECT_EQ(text.find(word, at + 1), std::string::npos) << text;
    }
  }
  for (const char* end : {"", ".out"}) std::filesystem::remove(file + end);
}
TEST(Log, DISABLED_AsksWhatIsLogged) {
  EXPECT_FALSE(log_enabled(LogLevel::kInfo));
  EXPECT_TRUE(log_enabled(LogLevel::kWarn));
}

// As in NCCL: the environment, then the file that NCCL_CONF_FILE names.
TEST(Env, NcclsVariablesMayStandInItsFiles) {
  const std::string file = "/tmp/moeccl-nccl-conf-" + std::to_string(getpid());
  std::ofstream(file) << "#NCCL_A=0\nNCCL_SOCKET_IFNAME=eth7\r\nNCCL_SOCKET_IFNAME=eth8\nMOECCL_DEBUG=INFO\nNCCL_NONE\n"
                      << "NCCL_MOECCL_TEST=here\nNCCL_MOECCL_EMPTY=x\n";
  setenv("NCCL_CONF_FILE", file.c_str(), 1);
  setenv("NCCL_MOECCL_TEST", "there", 1);
  setenv("NCCL_MOECCL_EMPTY", "", 1);
  std::vector<std::string> lines;
  add_nccl_lines(file, &lines);
  EXPECT_EQ(lines, std::vector<std::string>{"NCCL_SOCKET_IFNAME=eth7"}) << "the first one of each that is set nowhere";
  const std::vector<std::string> all = read_nccl_files();
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(all[0], lines[0]);
  const char* const variables[] = {all[0].c_str()};
  EXPECT_EQ(parse_env(variables).env.socket_ifname, "eth7");
  for (const char* name : {"NCCL_CONF_FILE", "NCCL_MOECCL_TEST", "NCCL_MOECCL_EMPTY"}) unsetenv(name);
  std::filesystem::remove(file);
}

// A launcher that was stopped, or a script that waits, does not read its pipe.
TEST(Log, APipeThatNobodyReadsDoesNotHoldUpTheProgram) {
  int log[2], went_on[2];
  ASSERT_EQ(pipe2(log, O_CLOEXEC | O_NONBLOCK), 0);
  ASSERT_EQ(pipe2(went_on, O_CLOEXEC), 0);
  char bytes[4096] = {};
  while (write(log[1], bytes, sizeof(bytes)) > 0) {
  }
  // Blocking, as a program's stderr is.
  ASSERT_EQ(fcntl(log[1], F_SETFL, 0), 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(log[1], STDERR_FILENO);
    // A profiler's timer interrupts waits.
    struct sigaction quiet = {};
    quiet.sa_handler = [](int) {};
    sigaction(SIGALRM, &quiet, nullptr);
    const itimerval tick = {{0, 5000}, {0, 5000}};
    setitimer(ITIMER_REAL, &tick, nullptr);
    for (int i = 0; i < 3; ++i) write_log_line(LogLevel::kError, "lost");
    (void)!write(went_on[1], bytes, 1);
    // Until the parent has read something.
    for (int i = 0; i < 1000; ++i) {
      pollfd room = {STDERR_FILENO, POLLOUT, 0};
      if (poll(&room, 1, 10) > 0) break;
    }
    write_log_line(LogLevel::kError, "read");
    _exit(0);
  }
  pollfd goes_on = {went_on[0], POLLIN, 0};
  const bool in_time = poll(&goes_on, 1, static_cast<int>(tests::patient_ms(3000))) > 0;
  EXPECT_TRUE(in_time) << "it waits for its log";
  if (!in_time) kill(child, SIGKILL);
  const auto drain = [&] {
    std::string text;
    for (ssize_t n = 0; (n = read(log[0], bytes, sizeof(bytes))) > 0;) text.append(bytes, static_cast<size_t>(n));
    return text;
  };
  std::string text = drain();
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  text += drain();
  EXPECT_EQ(text.find("ERROR lost"), std::string::npos);
  EXPECT_NE(text.find("ERROR read\n"), std::string::npos);
  EXPECT_NE(text.find("WARN before this, 3 log lines were lost"), std::string::npos);
  for (const int fd : {log[0], log[1], went_on[0], went_on[1]}) close(fd);
}

TEST(Log, AFloodIsCutAndErrorsAreNot) {
  testing::internal::CaptureStderr();
  for (int i = 0; i < 5000; ++i) write_log_line(LogLevel::kWarn, "flood");
  write_log_line(LogLevel::kError, "the end");
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_LT(std::count(text.begin(), text.end(), '\n'), 2000);
  EXPECT_NE(text.find("the end"), std::string::npos);
}

}  // namespace
}  // namespace moeccl
