// SPDX-License-Identifier: Apache-2.0
// Chooses the entry of a port's GID table that the queue pairs use. A RoCE table holds each address several times: for
// RoCE v1 and for v2, link-local and routable ones. A queue pair with the wrong one connects and then exceeds its
// retries.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/base/status.h"
#include "src/driver/ibv_abi.h"

namespace moeccl::transport::verbs {

enum class GidKind : uint8_t { kUnknown, kInfiniband, kRoceV1, kRoceV2 };

struct GidChoice {
  uint32_t index = 0;
  driver::ibv_abi::Gid gid = {};
  GidKind kind = GidKind::kUnknown;
};

bool is_ipv4(const driver::ibv_abi::Gid& gid);         // ::ffff:a.b.c.d
bool is_link_local(const driver::ibv_abi::Gid& gid);   // fe80::/10, and 169.254.0.0/16
bool is_empty(const driver::ibv_abi::Gid& gid);        // zero, or a prefix alone
std::string text_of(const driver::ibv_abi::Gid& gid);  // "10.0.0.1", else "fe80:0:..." in groups
const char* text_of(GidKind kind);

// `wanted` is the setting's index, or -1 for an automatic choice: on Ethernet RoCE v2 before v1, then routable before
// link-local, then IPv4 before IPv6, then the lowest index; on InfiniBand index 0, or the first that is there.
// Unsupported when there is none.
Result<GidChoice> choose_gid(std::span<const GidChoice> table, bool ethernet, int32_t wanted);

}  // namespace moeccl::transport::verbs
