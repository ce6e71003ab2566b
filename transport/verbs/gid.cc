// SPDX-License-Identifier: Apache-2.0
#include "transport/verbs/gid.h"

#include <algorithm>
#include <tuple>

namespace moeccl::transport::verbs {

using driver::ibv_abi::Gid;

bool is_ipv4(const Gid& gid) {
  return std::all_of(gid.raw, gid.raw + 10, [](uint8_t b) { return b == 0; }) && gid.raw[10] == 0xff &&
         gid.raw[11] == 0xff;
}

bool is_link_local(const Gid& gid) {
  if (is_ipv4(gid)) return gid.raw[12] == 169 && gid.raw[13] == 254;
  return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80;
}

bool is_empty(const Gid& gid) {
  return std::all_of(gid.raw + 8, gid.raw + 16, [](uint8_t b) { return b == 0; });
}

std::string text_of(const Gid& gid) {
  if (is_ipv4(gid)) return format("{}.{}.{}.{}", gid.raw[12], gid.raw[13], gid.raw[14], gid.raw[15]);
  std::string text;
  for (size_t i = 0; i < 16; i += 2) text += format("{}{:x}", i == 0 ? "" : ":", gid.raw[i] << 8 | gid.raw[i + 1]);
  return text;
}

const char* text_of(GidKind kind) {
  switch (kind) {
    case GidKind::kInfiniband:
      return "InfiniBand";
    case GidKind::kRoceV1:
      return "RoCE v1";
    case GidKind::kRoceV2:
      return "RoCE v2";
    case GidKind::kUnknown:
      break;
  }
  return "unknown kind";
}

Result<GidChoice> choose_gid(std::span<const GidChoice> table, bool ethernet, int32_t wanted) {
  if (wanted >= 0) {
    for (const GidChoice& g : table)
      if (g.index == static_cast<uint32_t>(wanted) && !is_empty(g.gid)) return g;
    std::string there;
    for (const GidChoice& g : table)
      if (!is_empty(g.gid))
        there += format("{}{} ({}, {})", there.empty() ? "" : ", ", g.index, text_of(g.gid), text_of(g.kind));
    return error(moecclInvalidArgument, "MOECCL_IB_GID_INDEX is {}, and that entry is empty; there are: {}", wanted,
                 there.empty() ? "none" : there);
  }
  const auto rank = [&](const GidChoice& g) {
    const int kind = g.kind == GidKind::kRoceV2 ? 0 : g.kind == GidKind::kUnknown ? 1 : 2;
    if (!ethernet) return std::tuple(0, 0, 0, g.index);
    return std::tuple(kind, is_link_local(g.gid) ? 1 : 0, is_ipv4(g.gid) ? 0 : 1, g.index);
  };
  const GidChoice* best = nullptr;
  for (const GidChoice& g : table) {
    if (!is_empty(g.gid) && (best == nullptr || rank(g) < rank(*best))) best = &g;
  }
  if (best != nullptr) return *best;
  return error(moecclUnsupported, "its table of GIDs is empty: {}",
               ethernet ? "give the interface behind it an IP address" : "is a subnet manager running?");
}

}  // namespace moeccl::transport::verbs
