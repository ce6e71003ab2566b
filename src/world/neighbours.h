// SPDX-License-Identifier: Apache-2.0
// Facts about all ranks that connect() collects before it sets up CUDA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/handshake.h"
#include "src/driver/process.h"
#include "src/plan/levels.h"
#include "src/profiler/session.h"
#include "src/world/config.h"
#include "src/world/hosts.h"
#include "transport/shm/segment.h"
#include "transport/transport.h"

namespace moeccl::comm {

struct Neighbours {
  uint32_t rank = 0, n_ranks = 1;
  uint64_t key = 0;                                                  // of the communicator; unique within a process
  std::vector<uint64_t> process;                                     // [n_ranks]
  std::vector<int> pid;                                              // [n_ranks]
  std::vector<std::shared_ptr<const driver::ProcessWatch>> watches;  // [n_ranks], of other processes of this host
  const Hosts* hosts = nullptr;
  const transport::Network* network = nullptr;  // between hosts; null if there is one host
  bootstrap::Key link_key = {};                 // of the communicator
  int host_level = -1;                          // the tree's level whose groups are hosts
  transport::shm::SegmentShape shape;           // of this rank; the others' differ only in the rank
  std::vector<uint64_t> message_bytes;          // Fabric::message_bytes
  const Config* config = nullptr;
  std::shared_ptr<profiler::Session> profiler;
  const plan::LevelTree* tree = nullptr;
  Deadline deadline;

  bool same_process(uint32_t r) const { return process[r] == process[rank]; }
  // Returns whether all ranks of this rank's host are threads of this process.
  bool one_process() const {
    const auto& here = hosts->around(rank);
    return std::all_of(here.begin(), here.end(), [this](uint32_t r) { return same_process(r); });
  }
  bootstrap::Key cuda_link_key() const { return bootstrap::derive_key(link_key, "moeccl cuda links"); }
};

}  // namespace moeccl::comm
