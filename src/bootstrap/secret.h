// SPDX-License-Identifier: Apache-2.0
// The secret that admits the ranks of a job on several hosts, and the key derived from it.
#pragma once

#include <string>

#include "src/base/status.h"
#include "src/bootstrap/unique_id.h"

namespace moeccl::bootstrap {

// Returns true if MOECCL_SECRET or MOECCL_SECRET_FILE is set.
bool has_secret();
// Reads the secret from a file that belongs to this user or to root and that others may not read. It has 16 to 4096
// characters, without the line's end. Errors name the file and the remedy, but never its contents.
Result<std::string> read_secret_file(const std::string& path);
// Derives the key by Argon2id with the job's name as salt. An attacker that overhears a handshake pays about 0.1 s and
// 64 MiB for each guess of the secret. This process pays the same once for each job name.
Result<Key> key_of_secret(const std::string& job);

}  // namespace moeccl::bootstrap
