// SPDX-License-Identifier: Apache-2.0
// What srun tells its tasks, beyond the numbers that all launchers give.
#pragma once

#include "src/bootstrap/launcher.h"

namespace moeccl::bootstrap {

// Returns true if the variable says how many ranks there are, and `rank` which one this is, as srun does. Another
// launcher's variables may be srun's doing, or be set by a program from srun's.
bool started_by_srun(const EnvironmentReader& read, const char* n_ranks, const char* rank = "SLURM_PROCID");

// Adds to what the dialect's variables say of the step: the host of rank 0, a port, and whether this is no step at all.
void read_slurm_step(const EnvironmentReader& read, LauncherInfo& info);

}  // namespace moeccl::bootstrap
