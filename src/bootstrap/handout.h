// SPDX-License-Identifier: Apache-2.0
// Where ranks of one host that a launcher gave nothing but a number find rank 0, and the unique id with it. Two places
// under one name: a socket in a folder that only this user can write, where no other user can be first; and an abstract
// socket, for ranks in containers that share the network but no folder, who look at the listener's user.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "moeccl/comm.h"
#include "src/base/clock.h"
#include "src/base/fd.h"
#include "src/base/status.h"

namespace moeccl::bootstrap {

// A socket where the id is given away; its file ends with it.
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
  std::string path_;  // empty: no file
};

// XDG_RUNTIME_DIR, /run/user/<uid> or /tmp/moeccl-<uid>, which is made: the first that belongs to this user alone.
// Empty: there is none.
std::string private_folder();

// InvalidUsage: this user's rank 0 of another communicator is still there.
Result<std::vector<HandoutListener>> listen_for_handouts(const std::string& name);

// The id of whoever listens there for this user.
Result<moecclUniqueId> ask_for_handout(const std::string& name, Deadline deadline);

}  // namespace moeccl::bootstrap
