// SPDX-License-Identifier: Apache-2.0
// The facts that a rank sends about itself when the ranks of a communicator meet.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/driver/memory.h"
#include "src/driver/process.h"
#include "src/world/config.h"

namespace moeccl::comm {

class HostSession;

struct Introduction {
  uint64_t host = 0, process = 0;
  uint64_t network = 0;   // driver::HostIdentity::network()
  std::string host_name;  // for messages
  int32_t pid = 0;
  uint64_t heap_bytes = 0;
  driver::ProcessStamp stamp;  // address 0: other processes must not read this process's memory
  driver::CoreSet cores{};     // that this rank may use
  uint32_t cpu_quota = 0;      // driver::cpu_quota()
  bool has_profile = false;    // the contents are compared after the file has been read
  int64_t calibrate_ms = 0;
  bool trials = false;
  bool encrypt = false;
  Config config;

  static Result<Introduction> of_this_process(const Config& config, uint64_t heap_bytes);
  std::vector<std::byte> encode() const;
  static Result<Introduction> decode(std::span<const std::byte> bytes, uint32_t rank);
  static void fields(auto& io, auto& self);  // base/wire.h
};

// Returns how many cores the given ranks of a host have together. Launchers bind each rank to some cores, and a control
// group's quota is one for all ranks in it.
uint32_t cores_of(std::span<const Introduction> all, std::span<const uint32_t> ranks);

// Checks that rank 0 and another rank agree on everything that must be the same on all ranks.
Status check_agreement(const Introduction& first, const Introduction& other, uint32_t rank);

// Other ranks watch and read the process that a rank claims to be, so checks the claims of the ranks on the host of
// `rank` against the kernel's pids from the meeting point.
Status check_processes(std::span<const Introduction> all, std::span<const uint32_t> on_host, uint32_t rank,
                       const HostSession& session);

}  // namespace moeccl::comm
