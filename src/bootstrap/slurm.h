// SPDX-License-Identifier: Apache-2.0
// What srun tells its tasks, beyond the numbers that all launchers give.
#pragma once

#include "src/bootstrap/launcher.h"

namespace moeccl::bootstrap {

// Returns true if the variable n_ranks has srun's number of tasks, and `rank` this task's. Another launcher's variables
// may be srun's doing, or be set by a program from srun's. Without `rank` the number of tasks alone is compared.
bool started_by_srun(const EnvironmentReader& read, const char* n_ranks, const char* rank = "SLURM_PROCID");

// Adds to what the dialect's variables say of the step: the host of rank 0, a port, and whether this is no step at all.
void read_slurm_step(const EnvironmentReader& read, LauncherInfo& info);

}  // namespace moeccl::bootstrap
