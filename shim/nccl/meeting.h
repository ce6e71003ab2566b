// How some ranks of a communicator agree on the id of a new one without the others.
#pragma once

#include <moeccl/moeccl.h>

#include <string>
#include <vector>

#include "shim/nccl/comm.h"

namespace moeccl::shim {

// While the parent works, the first rank sends the id to the others through it. Once it was aborted or revoked, the
// ranks meet under a file whose name only they can know; that reaches one host.
class Meeting {
 public:
  Meeting() = default;
  ~Meeting();  // removes the file, if this rank wrote it: the others have joined by then
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  // `ranks`: ascending ranks of parent, the calling one among them. The same call on each of them.
  ncclResult_t agree(Comm& parent, const std::vector<int>& ranks, bool parent_works, moecclUniqueId* id);

 private:
  std::string written_;
};

}  // namespace moeccl::shim
