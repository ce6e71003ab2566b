// SPDX-License-Identifier: Apache-2.0
// Chrome's trace format: an array of events, one in each line. A process of the machine is a process of the trace, and
// each of its ranks a track; operations of a rank that overlap have further tracks, because the bars of one track must
// not.
#include <unistd.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "plugins/timeline/timeline.h"
#include "src/base/clock.h"
#include "src/base/format.h"
#include "src/driver/process.h"

namespace moeccl::timeline {
namespace {

using nlohmann::json;

// Microseconds from the beginning of 2026, so that the files of all ranks share one axis. Since 1970 it would be too
// many digits for a double.
constexpr int64_t kAxis_ns = 1'767'225'600'000'000'000;
double us(int64_t ns) { return static_cast<double>(ns) / 1e3; }

constexpr int kLanes = 1000;  // tracks of a rank, which keep their numbers apart

struct Bar {
  int64_t begin_ns = 0, end_ns = 0;
  const Operation* operation = nullptr;
  bool measured = false;  // by the kernels' clock
  bool running = false;
};

Bar bar_of(const Operation& o, int64_t now_ns) {
  const int64_t shift_ns = o.rank->host_minus_kernel_ns;
  if (o.kernel_ended_ns > 0) return {o.kernel_began_ns + shift_ns, o.kernel_ended_ns + shift_ns, &o, true, false};
  const bool running = o.ended_ns == 0;
  return {o.began_ns, running ? std::max(now_ns, o.began_ns) : o.ended_ns, &o, false, running};
}

// Processes of several hosts may have the same number, and hosts the same name. Perfetto reads 32 bits.
int64_t process_number(uint64_t host) {
  constexpr uint64_t kPidBits = 22;  // of Linux, at most
  return static_cast<int64_t>((host & 0x1ff) << kPidBits) | getpid();
}

class Writer {
 public:
  Writer(int64_t pid, std::FILE* file) : pid_(pid), file_(file) {}

  void name(const char* what, int track, json args) {
    add({{"name", what}, {"ph", "M"}, {"pid", pid_}, {"tid", track}, {"args", std::move(args)}});
  }
  void bar(const Bar& b, int track) {
    const Operation& o = *b.operation;
    json args{{"count", o.count},
              {"type", o.type},
              {"bytes", plugins::bytes_of(o.type, o.count)},
              {o.is_message ? "peer" : "root", o.with},
              {"clock", b.measured ? "kernel" : "host"}};
    if (!o.is_message) args["sequence"] = o.sequence;
    if (o.algorithm[0] != 0) args["algorithm"] = o.algorithm;
    if (o.protocol[0] != 0) args["protocol"] = o.protocol;
    if (o.n_channels > 1) args["channels"] = o.n_channels;
    if (b.running) args["state"] = "running";
    add({{"name", o.func},
         {"cat", o.is_message ? "message" : "collective"},
         {"ph", "X"},
         {"ts", us(b.begin_ns - kAxis_ns)},
         {"dur", us(b.end_ns - b.begin_ns)},
         {"pid", pid_},
         {"tid", track},
         {"args", std::move(args)}});
  }
  void done() { put("\n]\n"); }

 private:
  void add(const json& event) {
    put(std::exchange(is_first_, false) ? "[\n" : ",\n");
    put(event.dump(-1, ' ', false, json::error_handler_t::replace));
  }
  void put(std::string_view text) { (void)std::fwrite(text.data(), 1, text.size(), file_); }

  const int64_t pid_;
  std::FILE* const file_;
  bool is_first_ = true;
};

}  // namespace

void write_trace(const std::vector<const Operation*>& operations, const std::string& process, uint64_t older,
                 std::FILE* file) {
  const int64_t now_ns = unix_ns();
  std::vector<const Rank*> ranks;  // in the order of their first operations
  std::map<const Rank*, std::vector<Bar>> bars;
  for (const Operation* const o : operations) {
    std::vector<Bar>& of_rank = bars[o->rank.get()];
    if (of_rank.empty()) ranks.push_back(o->rank.get());
    of_rank.push_back(bar_of(*o, now_ns));
  }
  const driver::HostIdentity identity = driver::host_identity();
  const std::string& host = identity.name();
  Writer out(process_number(identity.hash()), file);
  out.name("process_name", 0, {{"name", format("{} ({}:{})", process, host, getpid())}});
  if (older > 0) out.name("process_labels", 0, {{"labels", format("{} older operations are left out", older)}});
  for (size_t i = 0; i < ranks.size(); ++i) {
    std::vector<Bar>& of_rank = bars[ranks[i]];
    std::stable_sort(of_rank.begin(), of_rank.end(),
                     [](const Bar& a, const Bar& b) { return a.begin_ns < b.begin_ns; });
    std::vector<int64_t> free_from_ns;  // of each track
    for (const Bar& b : of_rank) {
      auto lane = std::find_if(free_from_ns.begin(), free_from_ns.end(), [&](int64_t at) { return at <= b.begin_ns; });
      if (lane == free_from_ns.end() && free_from_ns.size() == kLanes) --lane;
      if (lane == free_from_ns.end()) lane = free_from_ns.insert(lane, 0);
      *lane = b.end_ns;
      out.bar(b, static_cast<int>(i) * kLanes + static_cast<int>(lane - free_from_ns.begin()) + 1);
    }
    for (size_t lane = 0; lane < free_from_ns.size(); ++lane) {
      const int track = static_cast<int>(i) * kLanes + static_cast<int>(lane) + 1;
      out.name("thread_name", track,
               {{"name", lane == 0 ? ranks[i]->title() : format("{} ({})", ranks[i]->title(), lane + 1)}});
      out.name("thread_sort_index", track, {{"sort_index", track}});
    }
  }
  out.done();
}

}  // namespace moeccl::timeline
