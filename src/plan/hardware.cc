// SPDX-License-Identifier: Apache-2.0
#include "src/plan/hardware.h"

#include <array>

#include "src/base/format.h"

namespace moeccl::plan {

namespace {

constexpr const char* kVm = "one core of a 2-core EPYC virtual machine, measured (src/plan/profile.h)";
// Rates of a GPU are those of the multiprocessors that an engine takes by default.
constexpr const char* kCopy =
    "NVLink of an H100 by its data sheet, one direction, because most copies go to a peer; in its own memory, 16 "
    "multiprocessors of an H200 copy 1288, measured (docs/gpu-results.md, bench16.copy)";
constexpr const char* kReduce16 =
    "16 multiprocessors of an H200, measured: 2164 GB/s, of which two thirds are read (docs/gpu-results.md, "
    "bench16.reduce-2-fp32)";
constexpr const char* kReduce8 =
    "arithmetic: half of what 16 multiprocessors of an H200 read (docs/gpu-results.md, bench16.reduce-2-fp32), because "
    "16 blocks fit on 8";
constexpr const char* kCodec =
    "the codec's kernels on one expert of 32 MiB, an H200, measured: 1288 us to encode, 127 to decode "
    "(docs/gpu-results.md, bench.codec-encode)";
constexpr const char* kDirect = "peers' memory is read in place, at the rate of copies";
constexpr const char* kShared = "an engine of its own for every rank: nothing is shared and nothing takes turns";

constexpr Constant kHost[] = {
    {"copy_bytes_per_ns", &Profile::copy_bytes_per_ns, 8.7, kVm},
    {"reduce_bytes_per_ns", &Profile::reduce_bytes_per_ns, 14, kVm},
    {"encode_bytes_per_ns", &Profile::encode_bytes_per_ns, 5.4, kVm},
    {"decode_bytes_per_ns", &Profile::decode_bytes_per_ns, 10, kVm},
    {"signal_ns", &Profile::signal_ns, 68, kVm},
    {"step_ns", &Profile::step_ns, 40, kVm},
    {"start_ns", &Profile::start_ns, 300, kVm},
};

struct Engine {
  double reduce_bytes_per_ns;
  const char* reduce_is_from;
  Constant signal, step, start;
};

// The figures in which the engines differ, among those that they share.
constexpr std::array<Constant, 13> constants_of(const Engine& e) {
  return {
      {{"copy_bytes_per_ns", &Profile::copy_bytes_per_ns, 450, kCopy},
       {"stream_bytes_per_ns", &Profile::stream_bytes_per_ns, 450, kCopy},
       {"cached_copy_bytes_per_ns", &Profile::cached_copy_bytes_per_ns, 450, kCopy},
       {"reduce_bytes_per_ns", &Profile::reduce_bytes_per_ns, e.reduce_bytes_per_ns, e.reduce_is_from},
       {"cached_reduce_bytes_per_ns", &Profile::cached_reduce_bytes_per_ns, e.reduce_bytes_per_ns, e.reduce_is_from},
       {"encode_bytes_per_ns", &Profile::encode_bytes_per_ns, 26, kCodec},
       {"decode_bytes_per_ns", &Profile::decode_bytes_per_ns, 264, kCodec},
       {"read_bytes_per_ns", &Profile::read_bytes_per_ns, 450, kDirect},
       {"read_call_ns", &Profile::read_call_ns, 0, kDirect},
       e.signal,
       e.step,
       e.start,
       {"switch_ns", &Profile::switch_ns, 0, kShared}}};
}

constexpr std::array<Constant, 13> kStream = constants_of(
    {1443,
     kReduce16,
     {"signal_ns", &Profile::signal_ns, 3900,
      "a stream's store in host memory until the host sees it, on an H100, measured (docs/gpu-results.md, "
      "ladder.memfd)"},
     {"step_ns", &Profile::step_ns, 3000,
      "a launch: a thread that makes thousands gets one in 2.4 to 3.5 us on an H200, measured (docs/gpu-results.md, 27 "
      "November, What bounds the figures)"},
     {"start_ns", &Profile::start_ns, 5000,
      "the call, a thread that takes the operation, and the stream's end: a guess"}});

constexpr std::array<Constant, 13> kKernel = constants_of(
    {721,
     kReduce8,
     {"signal_ns", &Profile::signal_ns, 1000,
      "a flag in a peer's memory over NVLink, where the topology has no latency: a guess; on one H200, an exchange of "
      "two takes 850 (docs/gpu-results.md, ladder.handshake)"},
     {"step_ns", &Profile::step_ns, 805,
      "a meet of 16 blocks on an H200, measured (docs/gpu-results.md, ladder.latencies)"},
     {"start_ns", &Profile::start_ns, 4000, "a kernel launch and its end as a stream sees them: a guess"}});

Hardware device(const char* name, std::span<const Constant> constants) {
  Hardware made{name, constants, {}};
  for (const Constant& c : constants) made.profile.*c.member = c.value;
  made.profile.cores = kMaxRanks;  // each rank has its own
  made.profile.host_copy_bytes_per_ns = made.profile.copy_bytes_per_ns * kMaxRanks;
  made.profile.source = format("the constants of a {}", name);
  return made;
}

}  // namespace

Hardware host_hardware() { return {"host core", kHost, {}}; }

Hardware stream_hardware() { return device("GPU of the H100 class (a launch for each step)", kStream); }

Hardware kernel_hardware() { return device("GPU of the H100 class (persistent kernel)", kKernel); }

Hardware hardware_of(const LevelTree& tree) {
  return tree.levels.back().name == "gpu" ? kernel_hardware() : host_hardware();
}

}  // namespace moeccl::plan
