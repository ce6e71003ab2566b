// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/slurm.h"

#include <string_view>

#include "src/base/text.h"

namespace moeccl::bootstrap {
namespace {

// Each step has a port of its own, below 29500, torchrun's (docs/decisions/157-srun.md).
constexpr uint64_t kFirstPort = 20000, kPorts = 9499, kPortsOfAJob = 61;

// Returns "gpu007" for "gpu[007-9,12],login", and "rack1gpu1" for "rack[1-2]gpu[1-4]".
std::string first_of_nodes(std::string_view nodes) {
  std::string name;
  for (size_t i = 0; i < nodes.size() && nodes[i] != ','; ++i) {
    if (nodes[i] != '[') {
      name += nodes[i];
      continue;
    }
    const std::string_view numbers = nodes.substr(i + 1);
    name += numbers.substr(0, numbers.find_first_of("-,]"));
    i = nodes.find(']', i);
    if (i == nodes.npos) return "";
  }
  return name;
}

// Slurm sorts a step's nodes by name, and places task 0 on the first, except in these steps.
bool first_task_may_be_anywhere(const EnvironmentReader& read) {
  const char* distribution = read("SLURM_DISTRIBUTION");
  const char* components = read("SLURM_HET_SIZE");
  return (distribution != nullptr && std::string_view(distribution).starts_with("arbitrary")) ||
         (components != nullptr && std::string_view(components) != "1");
}

bool same_text(const EnvironmentReader& read, const char* one, const char* other) {
  return read(one) != nullptr && read(other) != nullptr && std::string_view(read(one)) == read(other);
}

uint64_t number(const EnvironmentReader& read, const char* name) {
  return read(name) != nullptr ? parse_number<uint32_t>(read(name)).value_or(0) : 0;
}

}  // namespace

bool started_by_srun(const EnvironmentReader& read, const char* n_ranks, const char* rank) {
  return same_text(read, n_ranks, "SLURM_STEP_NUM_TASKS") && same_text(read, rank, "SLURM_PROCID");
}

void read_slurm_step(const EnvironmentReader& read, LauncherInfo& info) {
  if (read("SLURM_STEP_NUM_TASKS") == nullptr && info.n_ranks > 1) {
    info.contradiction = format(
        "srun did not start this process, which is the script of a Slurm job of {} tasks (SLURM_NTASKS) or was started "
        "by it: start it with srun, or set RANK and WORLD_SIZE",
        info.n_ranks);
  }
  const uint64_t step = kPortsOfAJob * number(read, "SLURM_JOB_ID") + number(read, "SLURM_STEP_ID");
  if (info.master_port == 0) info.master_port = static_cast<uint16_t>(kFirstPort + step % kPorts);
  const char* nodes = read("SLURM_STEP_NODELIST");
  if (nodes != nullptr && info.several_hosts_known() && !first_task_may_be_anywhere(read))
    info.first_node = first_of_nodes(nodes);
}

}  // namespace moeccl::bootstrap
