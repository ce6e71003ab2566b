// SPDX-License-Identifier: Apache-2.0
// The contents of a moecclUniqueId: the address where the ranks meet and the key that admits them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "moeccl/comm.h"
#include "src/base/status.h"
#include "src/driver/socket.h"

namespace moeccl::bootstrap {

inline constexpr size_t kKeyBytes = 32;
using Key = std::array<std::byte, kKeyBytes>;

struct UniqueId {
  driver::SocketAddress address;
  // IP only: further addresses of the same place, with the same port. Not every rank may reach each of them.
  std::vector<driver::SocketAddress> others;
  Key key = {};            // secret, so it is never printed
  uint64_t host_hash = 0;  // of the id's host, to recognize a UNIX address used on another host; 0: unknown
  bool at_rank_0 = false;  // nothing listens there before rank 0 joins (place.h)
  bool derived = false;    // each rank has made the id by itself; the job's other communicators have the same one
};

// The bytes are: "MOECCLid", layout u16, kind u16 (with 256 added for at_rank_0 and 512 for derived), port u16, address
// length u16, address[32], key[32], host u64, others[32], checksum u64 over all before it. In others, each address
// follows its length u8, and zeros follow the last. The checksum detects accidents (truncation, text-mode copies), not
// attackers. Others that do not fit are left out.
Result<moecclUniqueId> encode_unique_id(const UniqueId& id);
// Returns InvalidArgument with the reason for any bytes that encode_unique_id() cannot have made.
Result<UniqueId> decode_unique_id(const moecclUniqueId& id);

Result<Key> random_key();

}  // namespace moeccl::bootstrap
