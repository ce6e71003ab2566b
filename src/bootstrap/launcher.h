// SPDX-License-Identifier: Apache-2.0
// Lets ranks that were started by torchrun, mpirun, hydra or srun meet without an id from the application.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "moeccl/comm.h"
#include "src/base/clock.h"
#include "src/base/status.h"
#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/unique_id.h"

namespace moeccl::bootstrap {

struct LauncherInfo {
  std::string launcher;  // "torchrun", "Open MPI", "hydra", "Slurm"
  int rank = -1;
  int n_ranks = 0;
  int local_rank = -1;   // -1: unknown
  int n_local = 0;       // ranks on this host; 0: unknown
  int n_hosts = 0;       // 0: unknown
  std::string job;       // the same for all ranks of a job, different for jobs that run at the same time
  std::string restarts;  // how often the launcher has restarted this host's ranks; may differ between hosts
  std::string contact;   // the address of the launcher's own server: the same for all ranks of one host
  // What another launcher says that cannot be true together with this: "RANK is 0 and ... but ..."; empty for nothing.
  std::string contradiction;
  std::string master_addr;
  uint16_t master_port = 0;  // 0: unknown
  std::string first_node;    // Slurm's name of rank 0's host; empty: it does not say, or there is one host

  bool several_hosts_known() const { return n_hosts > 1 || (n_local > 0 && n_local < n_ranks); }
  bool one_host_known() const { return n_ranks == 1 || n_hosts == 1 || n_local == n_ranks; }
};

// Maps a variable's name to its value or null. An argument, so that its readers are pure functions.
using EnvironmentReader = std::function<const char*(const char* name)>;

// Returns the first of torchrun, Open MPI, hydra and Slurm whose rank and size are set. InvalidUsage: none is set.
// InvalidArgument: one is set, but to a value that makes no sense (named). RANK and WORLD_SIZE may be left over from an
// earlier job, so LauncherInfo::contradiction says if the launcher that really started this process says otherwise.
Result<LauncherInfo> detect_launcher(const EnvironmentReader& read);
Result<LauncherInfo> detect_launcher();

// Returns the "ip" of an interface of this host that ranks on other hosts can reach: MASTER_ADDR if it belongs to this
// host, else the interface towards it, else that of the default route.
Result<std::string> address_for_other_hosts(const LauncherInfo& info, Deadline deadline);

// Returns true for a name by which every host means itself.
bool is_loopback_name(const std::string& host);

// Returns the address of rank 0's host, by which all ranks meet there, with its others; the id has no key yet. This
// host's own addresses come first. `said_by` names the variable in errors. InvalidArgument: no other host can reach any
// of them. Timeout: the name service does not answer.
Result<UniqueId> place_of_rank_0(const char* said_by, const std::string& host, uint16_t port, Deadline deadline);
// For rank 0: a root at those of the id's addresses that this host has. Refers to the id's key.
RootOptions root_at(const UniqueId& id, Deadline deadline);

// Returns the id of this process's next communicator made from launcher variables. Session::join() takes it with
// wait_for_root if it is derived, and otherwise, on ranks other than 0, with this function as ask_again. All ranks make
// their communicators in the same order; one that could not be made may be tried again.
//
// On one host, rank 0 starts the root and hands the id out over an abstract UNIX socket, named after user and job, to
// processes of the same user. Between hosts, the root listens at MASTER_ADDR (by default Slurm's first node), port
// MASTER_PORT + 1, at each of its addresses that this host has, and all ranks derive the key from MOECCL_SECRET
// (UniqueId::derived). A name that is not known yet is asked for until the deadline. Without that secret the call fails
// with InvalidUsage, because nothing else tells a rank from a stranger. It also fails so on a contradiction.
Result<moecclUniqueId> meet_from_environment(const LauncherInfo& info, Deadline deadline);

}  // namespace moeccl::bootstrap
