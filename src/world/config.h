// SPDX-License-Identifier: Apache-2.0
// A communicator's configuration after defaults, environment and checks.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "moeccl/comm.h"
#include "src/base/status.h"
#include "src/plan/long_line.h"

namespace moeccl::comm {

struct Config {
  static constexpr size_t kMaxText = 4096;
  int64_t timeout_ms = 0, init_timeout_ms = 0;
  bool deterministic = false;
  bool pace = false;
  int priority = 0;
  std::string topology;        // synthetic; empty if discovered
  uint64_t staging_bytes = 0;  // 0: automatic, see staging_of()
  std::string name;
  std::string plan;              // from MOECCL_PLAN
  uint32_t cuda_sms = 0;         // 0: chosen automatically
  bool crowded = false;          // part of a communicator with more ranks than cores: counts as crowded, too
  void* cuda_context = nullptr;  // the calling thread's at init; this rank uses its device; null: host memory only
  bool graph_mixing = true;      // see MOECCL_CUDA_GRAPH_MIXING
  // Ends the making of this communicator, when true, as the shim asks (shim_requests.h). Null afterwards.
  const std::atomic<bool>* cancelled = nullptr;

  // Null: all defaults. `of_part`: MOECCL_TOPOLOGY, which describes the ranks of the communicator that this one comes
  // from, has no effect.
  static Result<Config> from(const moecclConfig_t* config, bool of_part = false);
  // Returns moecclConfig_t.staging_bytes after environment and checks; 0: automatic.
  static Result<uint64_t> staging_of(uint64_t given);
  // Returns a rank's staging where `staging` is what staging_of() returned. An MoE layer's hops between hosts need
  // blocks in proportion to the hosts, and a long line needs room for what is under way.
  struct Around {
    uint32_t n_hosts = 1, most_on_host = 1;  // hosts; ranks of the host that has the most
    plan::LongLine line = {};                // that the ranks' data crosses
    uint64_t room = UINT64_MAX;              // the most that each rank has room for; see room_for_staging()

    // For ranks that do not exist: their hosts are the groups of the last far level (LevelTree::n_far_levels), and all
    // ranks are on one host if there is none. They have room for everything.
    static Around of(const plan::LevelTree& tree, const plan::Profile& profile);
  };
  static uint64_t staging_on(uint64_t staging, const Around& around);
  // Returns the failure if the making of this communicator was cancelled.
  Status not_cancelled() const;
  // The fields that must be the same on all ranks, for the exchange at init (base/wire.h).
  static void agreed(auto& io, auto& self) {
    io(self.deterministic);
    io(self.pace);
    io.template as<uint8_t>(self.priority);
    io(self.graph_mixing);
    io(self.staging_bytes);
    io.text(self.topology, kMaxText);
    io.text(self.plan, kMaxText);
  }
  // Returns "", or the first agreed field that differs, with this one's value and the other's.
  std::string difference(const Config& other) const;
};

}  // namespace moeccl::comm
