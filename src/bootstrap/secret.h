// SPDX-License-Identifier: Apache-2.0
// The secret that admits the ranks of a job to several hosts, and the key that it gives.
#pragma once

#include <string>

#include "src/base/status.h"
#include "src/bootstrap/unique_id.h"

namespace moeccl::bootstrap {

// MOECCL_SECRET or MOECCL_SECRET_FILE is set.
bool has_secret();
// Of a file that belongs to this user or to root and that others may not read; 16 to 4096 characters, without the
// line's end. Errors name the file and what to do, and never its contents.
Result<std::string> read_secret_file(const std::string& path);
// By Argon2id with the job's name as salt: whoever overhears a handshake pays some 0.1 s and 64 MiB for each guess of
// the secret. So does this process, once for each job's name.
Result<Key> key_of_secret(const std::string& job);

}  // namespace moeccl::bootstrap
