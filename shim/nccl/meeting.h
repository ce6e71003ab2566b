// SPDX-License-Identifier: Apache-2.0
// How some ranks of a communicator agree on the id of a new one without the others.
#pragma once

#include <moeccl/moeccl.h>

#include <string>
#include <vector>

#include "shim/nccl/comm.h"

namespace moeccl::shim {

// While the parent works, the first rank sends the id to the others through it. Once it was aborted or revoked, the
// ranks meet under a name in the file system that only they can know; that reaches one host.
class Meeting {
 public:
  Meeting() = default;
  ~Meeting();  // removes the name, if this rank made it: the others have joined by then
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  // `ranks`: ascending ranks of parent, the calling one among them. The same call on each of them.
  ncclResult_t agree(Comm& parent, const std::vector<int>& ranks, bool parent_works, moecclUniqueId* id);

 private:
  std::string shown_;
  int memory_ = -1;  // the leader's, with the id
};

}  // namespace moeccl::shim
