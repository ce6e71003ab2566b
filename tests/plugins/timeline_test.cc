// SPDX-License-Identifier: Apache-2.0
// The timeline plugin, opened as NCCL does and as MoECCL does, and the trace that it writes.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "src/profiler/abi.h"
#include "tests/support/namespaces.h"
#include "tests/support/ranks.h"
#include "tests/support/variables.h"

namespace moeccl::testing {
namespace {

namespace abi = profiler::abi;
using nlohmann::json;

constexpr int64_t kAxis_ns = 1'767'225'600'000'000'000;  // the beginning of 2026

int64_t unix_ns() {
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

std::string logged;
void log(int, unsigned long, const char*, int, const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  logged += text;
}

const char* plugin_file() { return std::getenv("MOECCL_TEST_TIMELINE"); }

// A folder for the files of one test.
class Timeline : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path(const char* name = "trace") const { return folder_ + "/" + name; }
  std::vector<json> traces() const {
    std::vector<json> all;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      std::ifstream in(entry.path());
      all.push_back(json::parse(in));
    }
    return all;
  }

 private:
  const std::string folder_ = "/tmp/moeccl_timeline_" + std::to_string(getpid());
};

std::vector<json> with(const json& trace, const char* key, const char* value) {
  std::vector<json> found;
  for (const json& event : trace)
    if (event.at(key) == value) found.push_back(event);
  return found;
}
std::vector<json> bars(const json& trace) { return with(trace, "ph", "X"); }

// One version of the plugin, with one communicator. Its functions are called as NCCL calls them.
class Host {
 public:
  explicit Host(int version, const char* name = "world")
      : version_(version),
        library_(dlopen(plugin_file(), RTLD_NOW | RTLD_LOCAL)),
        plugin_(
            static_cast<const abi::Plugin*>(dlsym(library_, ("ncclProfiler_v" + std::to_string(version)).c_str()))) {
    int mask = 0;
    const abi::Code code =
        version == 4 ? reinterpret_cast<abi::Init4>(plugin_->init)(&context_, &mask, name, kGroup, 2, 8, 3, log)
                     : reinterpret_cast<abi::Init5>(plugin_->init)(&context_, kGroup, &mask, name, 2, 8, 3, log);
    // A host may end without finalize. The sanitizer's search for leaks finds its context here.
    static auto* const contexts = new std::vector<void*>;
    contexts->push_back(context_);
    EXPECT_EQ(code, abi::kSuccess);
    EXPECT_NE(context_, nullptr);
    EXPECT_EQ(mask, abi::kColl | abi::kP2p | abi::kKernelCh);
  }
  void* coll(uint64_t sequence, uint8_t n_channels, const char* type = "ncclFloat32") {
    abi::Descriptor d = {};
    d.type = version_ == 4 ? abi::kColl | 0xab00 : abi::kColl;  // v4 has one byte and leaves the next ones unset
    d.coll = {sequence, "AllReduce", nullptr, nullptr, 1024, 0, type, n_channels, 16, "RING", "LL128", nullptr};
    return start(d);
  }
  void* kernel(void* parent, uint8_t channel, int64_t at_ns) {
    abi::Descriptor d = {};
    d.type = abi::kKernelCh;
    d.parentObj = parent;
    d.kernelCh = {channel, static_cast<uint64_t>(at_ns)};
    return start(d);
  }
  void* start(abi::Descriptor& d) {
    void* event = nullptr;
    EXPECT_EQ(plugin_->startEvent(context_, &event, &d), abi::kSuccess);
    return event;
  }
  void stop(void* event) { EXPECT_EQ(plugin_->stopEvent(event), abi::kSuccess); }
  void kernel_ended(void* event, int64_t at_ns) {
    abi::KernelChArgs args{static_cast<uint64_t>(at_ns)};
    EXPECT_EQ(plugin_->recordEventState(event, abi::kKernelChStop, &args), abi::kSuccess);
    stop(event);
  }
  void finalize() { EXPECT_EQ(plugin_->finalize(context_), abi::kSuccess); }
  void close() { EXPECT_EQ(dlclose(library_), 0); }

  static constexpr uint64_t kGroup = 0x28eb72c3'00000000;

 private:
  const int version_;
  void* const library_;
  const abi::Plugin* plugin_;
  void* context_ = nullptr;
};

// Runs `body` in a process of its own, which ends as programs do.
void in_process(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
}

// NCCL ends an operation's event when it has launched its kernels, whose channels tell when they run, by the GPU's
// clock.
TEST_F(Timeline, ShowsWhenTheKernelsRan) {
  const Variables set = {{"MOECCL_TIMELINE_FILE", path()}};
  constexpr int64_t kGpuAhead_ns = 77'000'000'000;
  const int64_t before = unix_ns();
  in_process([] {
    Host host(4);
    void* const coll = host.coll(5, 2);
    ASSERT_NE(coll, nullptr);
    host.stop(coll);
    const int64_t now = unix_ns() + kGpuAhead_ns;
    void* const first = host.kernel(coll, 0, now - 3'000'000);
    void* const second = host.kernel(coll, 1, now - 2'000'000);
    host.kernel_ended(second, now);
    host.kernel_ended(first, now - 1'000'000);
    host.finalize();
  });
  const int64_t after = unix_ns();
  ASSERT_EQ(traces().size(), 1u);
  const json trace = traces()[0];
  ASSERT_EQ(bars(trace).size(), 1u) << trace.dump(1);
  const json bar = bars(trace)[0];
  EXPECT_EQ(bar["name"], "AllReduce");
  EXPECT_NEAR(bar["dur"].get<double>(), 3000, 0.1);
  const double end_us = bar["ts"].get<double>() + bar["dur"].get<double>();
  EXPECT_GE(end_us, static_cast<double>(before - kAxis_ns) / 1e3);
  EXPECT_LE(end_us, static_cast<double>(after - kAxis_ns) / 1e3) << "by the host's clock";
  const json expected = {{"count", 1024},       {"type", "ncclFloat32"}, {"bytes", 4096},
                         {"root", 0},           {"clock", "kernel"},     {"sequence", 5},
                         {"algorithm", "RING"}, {"protocol", "LL128"},   {"channels", 2}};
  EXPECT_EQ(bar["args"], expected);
  const auto tracks = with(trace, "name", "thread_name");
  ASSERT_EQ(tracks.size(), 1u);
  EXPECT_EQ(tracks[0]["args"]["name"], "world, rank 3 of 8");
  EXPECT_EQ(tracks[0]["tid"], bar["tid"]);
}

TEST_F(Timeline, CountsTheBytesOfTheTypeThatNcclHasNoNameFor) {
  const Variables set = {{"MOECCL_TIMELINE_FILE", path()}};
  in_process([] {
    Host host(6, "world");
    host.stop(host.coll(5, 1, "Unknown"));  // NCCL's uint8
    host.finalize();
  });
  EXPECT_EQ(bars(traces().at(0)).at(0)["args"]["bytes"], 1024);
}

TEST_F(Timeline, GivesOperationsThatOverlapTracksOfTheirOwn) {
  const Variables set = {{"MOECCL_TIMELINE_FILE", path()}};
  in_process([] {
    for (const int version : {5, 6}) {
      Host host(version, nullptr);
      void* const outer = host.coll(1, 1);
      void* const inner = host.coll(2, 1);
      host.stop(inner);
      host.stop(outer);
      usleep(10);
      host.stop(host.coll(3, 1));
      if (version == 6) host.finalize();
    }
  });
  const json trace = traces().at(0);
  std::map<std::pair<int, int>, double> ended;  // of each track
  for (const json& bar : bars(trace)) {
    double& end = ended[{bar["pid"], bar["tid"]}];
    EXPECT_GE(bar["ts"].get<double>(), end) << trace.dump(1);
    end = bar["ts"].get<double>() + bar["dur"].get<double>();
    EXPECT_EQ(bar["args"]["clock"], "host");
  }
  EXPECT_EQ(ended.size(), 4u) << "two for each communicator: " << trace.dump(1);
  std::set<std::string> names;
  for (const json& track : with(trace, "name", "thread_name")) names.insert(track["args"]["name"]);
  EXPECT_EQ(names,
            (std::set<std::string>{"communicator 28eb72c3, rank 3 of 8", "communicator 28eb72c3, rank 3 of 8 (2)"}));
}

TEST_F(Timeline, KeepsTheNewestOperationsInBoundedMemory) {
  const Variables set = {{"MOECCL_TIMELINE_FILE", path()}, {"MOECCL_TIMELINE_EVENTS", "100"}};
  in_process([] {
    Host host(6);
    void* const old = host.coll(0, 1);
    for (uint64_t i = 1; i <= 1000; ++i) host.stop(host.coll(i, 1));
    // Events of an operation that is forgotten by now change no other one.
    EXPECT_EQ(host.kernel(old, 0, 1), nullptr);
    host.stop(old);
    host.finalize();
  });
  const json trace = traces().at(0);
  ASSERT_EQ(bars(trace).size(), 100u);
  for (size_t i = 0; i < 100; ++i) EXPECT_EQ(bars(trace)[i]["args"]["sequence"], 901 + i);
  EXPECT_EQ(with(trace, "name", "process_labels").at(0)["args"]["labels"], "901 older operations are left out");
}

TEST_F(Timeline, SaysWhichNumberOfOperationsItCannotKeep) {
  const Variables set = {{"MOECCL_TIMELINE_FILE", path()}, {"MOECCL_TIMELINE_EVENTS", "64K"}};
  in_process([] {
    Host host(6);
    host.stop(host.coll(1, 1));
    host.finalize();
    EXPECT_NE(logged.find("MOECCL_TIMELINE_EVENTS=64K is no number from 1 to 10000000: 65536 are kept"),
              std::string::npos)
        << logged;
  });
}

TEST_F(Timeline, IsWrittenAtExitToo) {
  const Variables set = {{"MOECCL_TIMELINE_FILE", path("%h-%p.trace")}};
  in_process([] {
    Host host(6);
    host.stop(host.coll(1, 1));
    (void)host.coll(2, 1);
  });
  const json trace = traces().at(0);
  ASSERT_EQ(bars(trace).size(), 2u);
  EXPECT_FALSE(bars(trace)[0]["args"].contains("state"));
  EXPECT_EQ(bars(trace)[1]["args"]["state"], "running");
}

std::vector<int> sequences(const json& trace) {
  std::vector<int> found;
  for (const json& bar : bars(trace)) found.push_back(bar["args"]["sequence"]);
  return found;
}

// The program's destructors have run by then.
TEST_F(Timeline, IsWrittenAtExitAfterAnEarlierWrite) {
  const Variables set = {{"MOECCL_TIMELINE_FILE", path()}};
  in_process([] {
    mallopt(M_PERTURB, 0xa5);  // what is freed no longer looks as before
    Host first(6);
    first.stop(first.coll(1, 1));
    first.finalize();
    Host second(6);
    second.stop(second.coll(2, 1));
  });
  ASSERT_EQ(traces().size(), 1u);
  EXPECT_EQ(sequences(traces()[0]), (std::vector<int>{1, 2}));
  EXPECT_EQ(bars(traces()[0])[1]["args"]["bytes"], 4096);
}

// NCCL closes the library with its last communicator, and opens it again for the next one.
TEST_F(Timeline, OfALibraryThatIsClosedAndOpenedAgainIsOneTrace) {
  const Variables set = {{"MOECCL_TIMELINE_FILE", path()}};
  in_process([] {
    for (const uint64_t i : {1u, 2u}) {
      Host host(5);
      host.stop(host.coll(i, 1));
      host.finalize();
      host.close();
    }
  });
  ASSERT_EQ(traces().size(), 1u);
  EXPECT_EQ(sequences(traces()[0]), (std::vector<int>{1, 2}));
}

// Processes of several containers may have the same number.
TEST_F(Timeline, ReplacesNoFileOfAnotherProcess) {
  const Variables set = {{"MOECCL_TIMELINE_FILE", path("%h.%p.json")}, {"MOECCL_HOST_ID", "rack/7"}};
  in_process([&] {
    const std::string number = std::to_string(getpid());
    std::ofstream(path(("rack_7." + number + ".json").c_str())) << "[]";
    for (const uint64_t i : {1u, 2u}) {
      Host host(5);
      host.stop(host.coll(i, 1));
      host.finalize();
    }
    EXPECT_TRUE(std::filesystem::exists(path(("rack_7." + number + "-2.json").c_str())));
  });
  ASSERT_EQ(traces().size(), 2u);
  std::vector<int> all;
  for (const json& trace : traces())
    for (const int i : sequences(trace)) all.push_back(i);
  EXPECT_EQ(all, (std::vector<int>{1, 2})) << "in one file, which its process replaces";
}

// Runs `body` in a process that has the number 1 in a pid namespace of its own, which the process that this returns
// keeps. The kernel would give the number of a namespace that has ended to the next one.
pid_t in_namespace(const std::function<void()>& body) {
  int done[2];
  EXPECT_EQ(pipe(done), 0);
  const pid_t keeper = fork();
  if (keeper == 0) {
    const bool ok = unshare(CLONE_NEWPID) == 0;
    if (ok) in_process(body);
    const char text = ok && !::testing::Test::HasFailure() ? 'y' : 'n';
    if (write(done[1], &text, 1) == 1) pause();
    _exit(1);
  }
  char text = 0;
  EXPECT_EQ(read(done[0], &text, 1), 1);
  EXPECT_EQ(text, 'y');
  close(done[0]);
  close(done[1]);
  return keeper;
}

// Machines that were made from one image have one name, and start the same program with the same number.
TEST_F(Timeline, KeepsProcessesOfHostsWithTheSameNameApart) {
  if (!may_unshare(CLONE_NEWPID)) GTEST_SKIP() << "this user may not make process numbers equal";
  const Variables set = {{"MOECCL_TIMELINE_FILE", path()}};
  std::vector<pid_t> keepers;
  for (uint64_t i = 1; i <= 4; ++i) {
    keepers.push_back(in_namespace([&] {
      Host host(5);
      host.stop(host.coll(i, 1));
      host.finalize();
    }));
  }
  for (const pid_t keeper : keepers) {
    kill(keeper, SIGKILL);
    waitpid(keeper, nullptr, 0);
  }
  ASSERT_EQ(traces().size(), 4u);
  std::set<int> numbers, processes;
  for (const json& trace : traces()) {
    numbers.insert(bars(trace).at(0)["pid"].get<int>());
    processes.insert(bars(trace).at(0)["pid"].get<int>() & 0xff);
  }
  EXPECT_EQ(processes.size(), 1u) << "the test is to make them equal";
  EXPECT_GT(numbers.size(), 2u) << "the hosts have 512 numbers";
}

TEST_F(Timeline, OfMoecclsRanksJoinToOneTrace) {
  const Variables set = {{"MOECCL_TIMELINE_FILE", path()}, {"MOECCL_PROFILER_PLUGIN", plugin_file()}};
  RankOptions options{.mode = RankMode::kProcesses};
  options.config.name = "world";
  run_ranks(
      3,
      [](int rank, moecclComm_t comm) {
        std::vector<float> x(100'000, 1);
        for (int i = 0; i < 5; ++i)
          MOECCL_ASSERT_OK(moecclAllReduce(x.data(), x.data(), x.size(), moecclFloat32, moecclSum, comm, nullptr));
        if (rank == 2) return;
        MOECCL_ASSERT_OK(rank == 0 ? moecclSend(x.data(), 10, moecclFloat32, 1, comm, nullptr)
                                   : moecclRecv(x.data(), 10, moecclFloat32, 0, comm, nullptr));
      },
      options);
  ASSERT_EQ(traces().size(), 3u);
  json all = json::array();
  for (const json& trace : traces()) all.insert(all.end(), trace.begin(), trace.end());  // as jq -s add does
  std::map<int, std::vector<json>> of_process;
  for (const json& bar : bars(all)) of_process[bar["pid"]].push_back(bar);
  ASSERT_EQ(of_process.size(), 3u);
  std::set<std::string> processes;
  for (const json& p : with(all, "name", "process_name"))
    processes.insert(p["args"]["name"].get<std::string>().substr(0, 7));
  EXPECT_EQ(processes, (std::set<std::string>{"rank 0 ", "rank 1 ", "rank 2 "}));
  // All have the same axis: the n-th sum of any rank ends after that of any other begins.
  for (size_t i = 0; i < 5; ++i) {
    double last_begin = 0, first_end = 1e300;
    for (const auto& [pid, process_bars] : of_process) {
      ASSERT_GE(process_bars.size(), 5u);
      const json& bar = process_bars[i];
      EXPECT_EQ(bar["name"], "AllReduce");
      EXPECT_EQ(bar["args"]["bytes"], 400'000);
      EXPECT_EQ(bar["args"]["clock"], "kernel");
      EXPECT_TRUE(bar["args"].contains("algorithm"));
      last_begin = std::max(last_begin, bar["ts"].get<double>());
      first_end = std::min(first_end, bar["ts"].get<double>() + bar["dur"].get<double>());
    }
    EXPECT_LT(last_begin, first_end + 100) << i;
  }
  EXPECT_EQ(with(all, "name", "Send").size(), 1u);
  EXPECT_EQ(with(all, "name", "Recv").at(0)["args"]["peer"], 0);
}

}  // namespace
}  // namespace moeccl::testing
