// SPDX-License-Identifier: Apache-2.0
// The place where ranks of one host to which the launcher gave only a number find rank 0, and with it the unique id.
// There are two sockets under one name. One is in a folder that only this user can write, so that no other user can
// take the name first. The other is an abstract socket, for ranks in containers that share the network but no folder;
// they check the listener's user.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "moeccl/comm.h"
#include "src/base/clock.h"
#include "src/base/fd.h"
#include "src/base/status.h"

namespace moeccl::bootstrap {

// A socket that hands out the id. Its file is removed with it.
class HandoutListener {
 public:
  HandoutListener(Fd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  HandoutListener(HandoutListener&& other) noexcept
      : fd_(std::move(other.fd_)), path_(std::exchange(other.path_, {})) {}
  HandoutListener& operator=(HandoutListener&&) = delete;
  ~HandoutListener();
  int fd() const { return fd_.get(); }

 private:
  Fd fd_;
  std::string path_;  // empty if it has no file
};

// Returns the first of XDG_RUNTIME_DIR, /run/user/<uid> and /tmp/moeccl-<uid> (which is created) that belongs to this
// user alone, or "" if there is none.
std::string private_folder();

// InvalidUsage: rank 0 of another communicator of this user still has the name.
Result<std::vector<HandoutListener>> listen_for_handouts(const std::string& name);

// Returns the id from the process of this user that listens under the name. With `from_these_pids`, a process of
// another pid namespace is refused.
Result<moecclUniqueId> ask_for_handout(const std::string& name, Deadline deadline, bool from_these_pids = false);
// Refuses, too, the id of a meeting at which this rank has failed: RemoteError.
Result<moecclUniqueId> ask_for_next_handout(const std::string& name, int rank, Deadline deadline,
                                            bool from_these_pids = false);

}  // namespace moeccl::bootstrap
