// SPDX-License-Identifier: Apache-2.0
#include "src/plan/hardware.h"

namespace moeccl::plan {

namespace {

constexpr const char* kVm = "one core of a 2-core EPYC virtual machine, measured (src/plan/profile.h)";
constexpr const char* kCopy =
    "HBM3 of an H100 SXM: 3350 GB/s by its data sheet, nine tenths in reach, each byte read and written";
constexpr const char* kRead = "the same memory, each byte read";
constexpr const char* kDirect = "peers' memory is read in place, at most as fast as one's own";
constexpr const char* kShared = "an engine of its own for every rank: nothing is shared and nothing takes turns";

constexpr Constant kHost[] = {
    {"copy_bytes_per_ns", &Profile::copy_bytes_per_ns, 8.7, kVm},
    {"reduce_bytes_per_ns", &Profile::reduce_bytes_per_ns, 14, kVm},
    {"signal_ns", &Profile::signal_ns, 68, kVm},
    {"step_ns", &Profile::step_ns, 40, kVm},
    {"start_ns", &Profile::start_ns, 300, kVm},
};

constexpr Constant kDevice[] = {
    {"copy_bytes_per_ns", &Profile::copy_bytes_per_ns, 1500, kCopy},
    {"stream_bytes_per_ns", &Profile::stream_bytes_per_ns, 1500, kCopy},
    {"cached_copy_bytes_per_ns", &Profile::cached_copy_bytes_per_ns, 1500, kCopy},
    {"reduce_bytes_per_ns", &Profile::reduce_bytes_per_ns, 3000, kRead},
    {"cached_reduce_bytes_per_ns", &Profile::cached_reduce_bytes_per_ns, 3000, kRead},
    {"read_bytes_per_ns", &Profile::read_bytes_per_ns, 1500, kDirect},
    {"read_call_ns", &Profile::read_call_ns, 0, kDirect},
    {"signal_ns", &Profile::signal_ns, 2000,
     "a flag in a peer's memory over NVLink, where the topology has no latency: a guess of the order that CUDA's "
     "p2pBandwidthLatencyTest prints"},
    {"step_ns", &Profile::step_ns, 300,
     "a step of a persistent kernel reads a flag in device memory: about 480 cycles of 1.7 GHz on an H100 (Luo et al., "
     "arXiv 2402.13499), and a barrier"},
    {"start_ns", &Profile::start_ns, 5000, "a kernel launch and its end as a stream sees them: a guess"},
    {"switch_ns", &Profile::switch_ns, 0, kShared},
};

}  // namespace

Hardware host_hardware() { return {"host core", kHost, {}}; }

Hardware device_hardware() {
  Hardware device{"GPU of the H100 class", kDevice, {}};
  for (const Constant& c : kDevice) device.profile.*c.member = c.value;
  device.profile.cores = kMaxRanks;  // each rank has its own
  device.profile.host_copy_bytes_per_ns = device.profile.copy_bytes_per_ns * kMaxRanks;
  return device;
}

Hardware hardware_of(const LevelTree& tree) {
  return tree.levels.back().name == "gpu" ? device_hardware() : host_hardware();
}

}  // namespace moeccl::plan
