// SPDX-License-Identifier: Apache-2.0
#include "src/world/introduction.h"

#include <algorithm>
#include <bit>

#include "src/base/env.h"
#include "src/base/hash.h"
#include "src/base/wire.h"
#include "src/driver/limits.h"
#include "src/world/hosts.h"

namespace moeccl::comm {
namespace {

constexpr size_t kMaxHostName = 64;  // Linux's limit, and MOECCL_HOST_ID's

// Rank 0 sends every introduction to every rank, so zero words at the end are left out.
void core_fields(auto& io, auto& cores) {
  size_t n = cores.size();
  while (n > 0 && cores[n - 1] == 0) --n;
  io.template as<uint8_t>(n);
  io.must(n <= cores.size());
  n = std::min(n, cores.size());
  for (size_t i = 0; i < n; ++i) io(cores[i]);
  io.must(n == 0 || cores[n - 1] != 0);
}

}  // namespace

Result<Introduction> Introduction::of_this_process(const Config& config, uint64_t heap_bytes) {
  const driver::ProcessIdentity self = driver::this_process();
  Introduction i;
  const driver::HostIdentity host = driver::host_identity();
  i.host = host.hash();
  i.network = host.network();
  i.host_name = host.name().substr(0, kMaxHostName);
  i.pid = self.pid;
  i.process = hash_combine(hash_combine(static_cast<uint64_t>(self.pid), self.start_time), self.random);
  i.heap_bytes = heap_bytes;
  MOECCL_ASSIGN_OR_RETURN(i.stamp, driver::process_stamp());
  if (env().no_cma) i.stamp.address = 0;
  i.cores = driver::usable_cores();
  i.cpu_quota = driver::cpu_quota();
  i.has_profile = !env().profile.empty();
  i.calibrate_ms = env().calibrate_ms;
  i.trials = env().trials;
  i.encrypt = env().encrypt;
  i.config = config;
  return i;
}

void Introduction::fields(auto& io, auto& self) {
  io(self.host);
  io(self.network);
  io.text(self.host_name, kMaxHostName);
  io(self.process);
  io(self.pid);
  io(self.heap_bytes);
  io(self.stamp.address);
  io(self.stamp.value);
  core_fields(io, self.cores);
  io(self.cpu_quota);
  io(self.has_profile);
  io(self.calibrate_ms);
  io(self.trials);
  io(self.encrypt);
  Config::agreed(io, self.config);
}

std::vector<std::byte> Introduction::encode() const { return encode_fields(*this); }

Result<Introduction> Introduction::decode(std::span<const std::byte> bytes, uint32_t rank) {
  Introduction i;
  if (decode_fields(bytes, &i)) return i;
  return error(moecclRemoteError, "rank {} sent an introduction that this MoECCL cannot read", rank);
}

uint32_t cores_of(std::span<const Introduction> all, std::span<const uint32_t> ranks) {
  driver::CoreSet any{};
  uint32_t quota = 0;
  bool limited = true;
  for (const uint32_t r : ranks) {
    for (size_t w = 0; w < any.size(); ++w) any[w] |= all[r].cores[w];
    quota = std::max(quota, all[r].cpu_quota);
    limited = limited && all[r].cpu_quota > 0;
  }
  uint32_t cores = 0;
  for (const uint64_t word : any) cores += static_cast<uint32_t>(std::popcount(word));
  return std::max(1u, limited ? std::min(cores, quota) : cores);
}

Status check_agreement(const Introduction& first, const Introduction& other, uint32_t rank) {
  if (other.encrypt != first.encrypt)
    return error(moecclMismatch, "rank 0 and rank {} disagree on MOECCL_ENCRYPT ({:d} and {:d}): set it alike", rank,
                 first.encrypt, other.encrypt);
  if (const std::string d = first.config.difference(other.config); !d.empty()) {
    return error(moecclMismatch, "rank 0 and rank {} disagree on the configuration's {}: give all ranks the same", rank,
                 d);
  }
  if (other.has_profile != first.has_profile)
    return error(moecclMismatch, "rank 0 and rank {} disagree on MOECCL_PROFILE: set it on all ranks or on none", rank);
  if (!other.has_profile && other.calibrate_ms != first.calibrate_ms)
    return error(moecclMismatch, "rank 0 and rank {} disagree on MOECCL_CALIBRATE ({} and {} ms): set it alike", rank,
                 first.calibrate_ms, other.calibrate_ms);
  if (other.trials != first.trials)
    return error(moecclMismatch, "rank 0 and rank {} disagree on MOECCL_TRIALS ({:d} and {:d}): set it alike", rank,
                 first.trials, other.trials);
  return {};
}

Status check_processes(std::span<const Introduction> all, std::span<const uint32_t> on_host, uint32_t rank,
                       const HostSession& session) {
  if (session.pid_of(rank) != all[rank].pid) return {};  // the meeting point is in another pid namespace, or unknown
  for (const uint32_t r : on_host) {
    const int32_t seen = session.pid_of(r);
    if (seen <= 0 || seen == all[r].pid) continue;
    return error(moecclRemoteError, "rank {} says that it is process {}, but process {} has connected for it", r,
                 all[r].pid, seen);
  }
  return {};
}

}  // namespace moeccl::comm
