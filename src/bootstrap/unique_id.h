// SPDX-License-Identifier: Apache-2.0
// What a moecclUniqueId holds: where the ranks meet and the key that admits them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "moeccl/comm.h"
#include "src/base/status.h"
#include "src/driver/socket.h"

namespace moeccl::bootstrap {

inline constexpr size_t kKeyBytes = 32;
using Key = std::array<std::byte, kKeyBytes>;

struct UniqueId {
  driver::SocketAddress address;
  Key key = {};  // secret: never printed
  uint64_t host_hash =
      0;  // of the host that made it, so that a UNIX address used elsewhere is named as such; 0: unknown
};

// The bytes: "MOECCLid", layout u16, kind u16, port u16, address length u16, address[32], key[32], host u64, zeros,
// checksum u64 over all before it. The checksum finds accidents (truncation, text-mode copies), not attackers.
Result<moecclUniqueId> encode_unique_id(const UniqueId& id);
// InvalidArgument, saying what is wrong, for everything that encode_unique_id() cannot have made.
Result<UniqueId> decode_unique_id(const moecclUniqueId& id);

Result<Key> random_key();

}  // namespace moeccl::bootstrap
