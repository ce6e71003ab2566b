// SPDX-License-Identifier: Apache-2.0
// Ranks that were started by torchrun, mpirun, hydra or srun meet without an id in the application's hands.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "moeccl/comm.h"
#include "src/base/clock.h"
#include "src/base/status.h"

namespace moeccl::bootstrap {

struct LauncherInfo {
  std::string launcher;  // "torchrun", "Open MPI", "hydra", "Slurm"
  int rank = -1;
  int n_ranks = 0;
  int local_rank = -1;  // -1: unknown
  int n_local = 0;      // ranks on this host; 0: unknown
  int n_hosts = 0;      // 0: unknown
  std::string job;      // the same for all ranks of a job, different for jobs that run at the same time
  std::string master_addr;
  uint16_t master_port = 0;  // 0: unknown

  bool several_hosts_known() const { return n_hosts > 1 || (n_local > 0 && n_local < n_ranks); }
  bool one_host_known() const { return n_ranks == 1 || n_hosts == 1 || n_local == n_ranks; }
};

// name -> value, or null. Pure readers take it as an argument.
using EnvironmentReader = std::function<const char*(const char* name)>;

// The first of torchrun, Open MPI, hydra, Slurm whose rank and size are set. InvalidUsage: none is; InvalidArgument:
// one is, with a value that makes no sense (named).
Result<LauncherInfo> detect_launcher(const EnvironmentReader& read);
Result<LauncherInfo> detect_launcher();

// "ip" of this host's interface that ranks on other hosts can reach: MASTER_ADDR if it is this host's, else the one
// towards it, else the one of the default route.
Result<std::string> address_for_other_hosts(const LauncherInfo& info);

// The id of this process's next launcher-made communicator, for Session::join(..., wait_for_root = true). Every rank
// calls it the same number of times.
//
// On one host rank 0 starts the root and hands the id out over an abstract UNIX socket, named after user and job, to
// processes of the same user. Between hosts the root listens at MASTER_ADDR, port MASTER_PORT + 1, and all derive the
// key from MOECCL_SECRET; without it, InvalidUsage: nothing else tells a rank from a stranger.
Result<moecclUniqueId> meet_from_environment(const LauncherInfo& info, Deadline deadline);

}  // namespace moeccl::bootstrap
