// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/unique_id.h"

#include <algorithm>
#include <cstring>

#include "src/base/hash.h"
#include "src/base/random.h"
#include "src/base/wire.h"

namespace moeccl::bootstrap {
namespace {

constexpr std::string_view kMagic = "MOECCLid";
constexpr uint16_t kLayout = 1;
constexpr size_t kAddressBytes = 32;
constexpr size_t kChecksumAt = MOECCL_UNIQUE_ID_BYTES - 8;

enum Kind : uint16_t { kUnix = 1, kTcp4 = 2, kTcp6 = 3, kAtRank0 = 256, kDerived = 512 };

Status refused(const char* why) {
  return error(moecclInvalidArgument,
               "the unique id {}: pass on all {} bytes of what moecclGetUniqueId() gave, unchanged", why,
               MOECCL_UNIQUE_ID_BYTES);
}

Result<driver::SocketAddress> make_address(uint16_t kind, uint16_t port, std::span<const std::byte> bytes) {
  if (kind == kUnix) {
    if (bytes.empty() || port != 0) return refused("holds no address");
    return driver::unix_address({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  if ((kind != kTcp4 || bytes.size() != 4) && (kind != kTcp6 || bytes.size() != 16)) {
    return refused("holds an address of an unknown kind");
  }
  MOECCL_ASSIGN_OR_RETURN(const driver::SocketAddress address, driver::ip_address(bytes, port));
  if (port == 0 || address.is_any()) return refused("holds no address");
  return address;
}

bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

Result<std::vector<driver::SocketAddress>> read_others(const driver::SocketAddress& first,
                                                       std::span<const std::byte> bytes) {
  std::vector<driver::SocketAddress> others;
  while (!bytes.empty() && bytes[0] != std::byte{0}) {
    const size_t n = std::to_integer<size_t>(bytes[0]);
    const uint16_t kind = n == 4 ? kTcp4 : kTcp6;
    if (first.is_unix() || n + 1 > bytes.size()) return refused("is malformed");
    MOECCL_ASSIGN_OR_RETURN(others.emplace_back(), make_address(kind, first.port(), bytes.subspan(1, n)));
    bytes = bytes.subspan(1 + n);
  }
  if (!all_zero(bytes)) return refused("is malformed");
  return others;
}

}  // namespace

Result<moecclUniqueId> encode_unique_id(const UniqueId& id) {
  const std::span<const std::byte> address = id.address.host_bytes();
  if (address.empty() || address.size() > kAddressBytes) {
    return error(moecclInternalError, "address {} does not fit into a unique id", id.address.str());
  }
  uint16_t kind = kUnix;
  if (id.address.storage.ss_family == AF_INET) kind = kTcp4;
  if (id.address.storage.ss_family == AF_INET6) kind = kTcp6;
  Writer w;
  w.raw(std::as_bytes(std::span(kMagic.data(), kMagic.size())));
  w.u16(kLayout);
  w.u16(static_cast<uint16_t>(kind | (id.at_rank_0 ? kAtRank0 : 0) | (id.derived ? kDerived : 0)));
  w.u16(id.address.port());
  w.u16(static_cast<uint16_t>(address.size()));
  w.raw(address);
  for (size_t i = address.size(); i < kAddressBytes; ++i) w.u8(0);
  w.raw(id.key);
  w.u64(id.host_hash);
  for (const driver::SocketAddress& other : id.others) {
    const std::span<const std::byte> bytes = other.host_bytes();
    if (kind == kUnix || other.is_unix() || other.port() != id.address.port()) {
      return error(moecclInternalError, "address {} is no other one of {}", other.str(), id.address.str());
    }
    if (w.size() + 1 + bytes.size() > kChecksumAt) continue;
    w.u8(static_cast<uint8_t>(bytes.size()));
    w.raw(bytes);
  }
  while (w.size() < kChecksumAt) w.u8(0);
  w.u64(hash_bytes(w.view()));
  moecclUniqueId result;
  static_assert(sizeof(result.internal) == kChecksumAt + 8);
  std::memcpy(result.internal, w.view().data(), sizeof(result.internal));
  return result;
}

Result<UniqueId> decode_unique_id(const moecclUniqueId& id) {
  const std::span<const std::byte> all = std::as_bytes(std::span(id.internal));
  Reader r(all);
  if (std::memcmp(r.raw(kMagic.size()).data(), kMagic.data(), kMagic.size()) != 0) return refused("was never made");
  const uint16_t layout = r.u16();
  const uint16_t said = r.u16(), kind = static_cast<uint16_t>(said & ~(kAtRank0 | kDerived));
  const uint16_t port = r.u16();
  const uint16_t address_size = r.u16();
  const std::span<const std::byte> address = r.raw(kAddressBytes);
  UniqueId result;
  result.at_rank_0 = (said & kAtRank0) != 0;
  result.derived = (said & kDerived) != 0;
  const std::span<const std::byte> key = r.raw(kKeyBytes);
  std::copy(key.begin(), key.end(), result.key.begin());
  result.host_hash = r.u64();
  const std::span<const std::byte> others = r.raw(kChecksumAt - (all.size() - r.left()));
  if (r.u64() != hash_bytes(all.first(kChecksumAt))) return refused("was changed on its way");
  if (layout != kLayout) {
    return error(moecclUnsupported, "the unique id has layout {}, this library knows {}: use one version on all ranks",
                 layout, kLayout);
  }
  if (address_size > kAddressBytes || !all_zero(address.subspan(address_size))) return refused("is malformed");
  MOECCL_ASSIGN_OR_RETURN(result.address, make_address(kind, port, address.first(address_size)));
  MOECCL_ASSIGN_OR_RETURN(result.others, read_others(result.address, others));
  return result;
}

Result<Key> random_key() {
  Key key;
  MOECCL_TRY(random_bytes(key.data(), key.size()));
  return key;
}

}  // namespace moeccl::bootstrap
