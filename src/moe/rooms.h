// SPDX-License-Identifier: Apache-2.0
// Buffers in host or CUDA memory that are used again and again.
#pragma once

#include <algorithm>
#include <vector>

#include "src/comm/communicator.h"

namespace moeccl::comm {

struct Room {
  std::vector<std::byte> host;
  driver::cuda::Memory device;
  bool cuda = false;
  std::byte* data() { return cuda ? device.data() : host.data(); }
  size_t capacity() const { return cuda ? device.bytes() : host.capacity(); }
};

class Rooms {
 public:
  // The communicator must outlive this object.
  explicit Rooms(Communicator& comm) : comm_(comm) {}
  // Returns at least this many bytes, never none, because the address tells the kind of memory.
  Result<Room> take(size_t bytes, bool cuda) {
    bytes = std::max<size_t>(bytes, 1);
    Room room;
    // The smallest that suffices: if a rank's own experts took the room of a domain's, all rooms would grow to that
    // size.
    auto best = spare_.end();
    for (auto s = spare_.begin(); s != spare_.end(); ++s)
      if (s->cuda == cuda && s->capacity() >= bytes && (best == spare_.end() || s->capacity() < best->capacity()))
        best = s;
    if (best != spare_.end()) {
      room = std::move(*best);
      spare_.erase(best);
    }
    room.cuda = cuda;
    if (!cuda) {
      room.host.resize(bytes);
    } else if (room.device.bytes() == 0) {
      MOECCL_ASSIGN_OR_RETURN(room.device, driver::cuda::Memory::device(comm_.cuda()->engine().context(), bytes));
    }
    return room;
  }
  void give_back(Room&& room) { spare_.push_back(std::move(room)); }

 private:
  Communicator& comm_;
  std::vector<Room> spare_;
};

}  // namespace moeccl::comm
