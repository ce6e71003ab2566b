// SPDX-License-Identifier: Apache-2.0
#include "src/driver/interface.h"

#include <ifaddrs.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>

#include "src/driver/netlink.h"

namespace moeccl::driver {
namespace {

// ARPHRD_IP6GRE, and ARPHRD_NONE (tun, wireguard), of linux/if_arp.h, which cannot be included beside net/if_arp.h.
constexpr unsigned short kIp6Gre = 823, kNone = 0xfffe;

// Counts the ones of a netmask.
uint32_t prefix_of(const sockaddr* mask) {
  if (mask == nullptr) return 0;
  uint32_t bits = 0;
  if (mask->sa_family == AF_INET) {
    bits = static_cast<uint32_t>(std::popcount(reinterpret_cast<const sockaddr_in*>(mask)->sin_addr.s_addr));
  } else if (mask->sa_family == AF_INET6) {
    for (const uint8_t b : reinterpret_cast<const sockaddr_in6*>(mask)->sin6_addr.s6_addr) {
      bits += static_cast<uint32_t>(std::popcount(b));
    }
  }
  return bits;
}

// Makes a request about an interface. /sys would not do, because it shows the network namespace in which it was
// mounted.
bool ask(int socket, const std::string& name, unsigned long what, ifreq* request) {
  std::memcpy(request->ifr_name, name.c_str(), std::min(name.size(), sizeof(request->ifr_name) - 1));
  return ::ioctl(socket, what, request) == 0;
}

template <class Command>
bool ethtool(int socket, const std::string& name, Command* command) {
  ifreq request = {};
  request.ifr_data = reinterpret_cast<char*>(command);
  return ask(socket, name, SIOCETHTOOL, &request);
}

int64_t rate_of(int socket, const std::string& name) {
  ethtool_cmd command = {};
  command.cmd = ETHTOOL_GSET;
  if (!ethtool(socket, name, &command)) return 0;
  const uint32_t rate = ethtool_cmd_speed(&command);
  return rate == static_cast<uint32_t>(SPEED_UNKNOWN) ? 0 : rate;
}

bool is_tunnel(int socket, const std::string& name) {
  ethtool_drvinfo info = {};
  info.cmd = ETHTOOL_GDRVINFO;
  if (ethtool(socket, name, &info)) {
    const std::string driver(info.driver, strnlen(info.driver, sizeof(info.driver)));
    for (const char* kind : {"vxlan", "geneve", "wireguard", "tun"})
      if (driver == kind) return true;
  }
  ifreq request = {};
  if (!ask(socket, name, SIOCGIFHWADDR, &request)) return false;
  const auto kind = request.ifr_hwaddr.sa_family;
  return kind == ARPHRD_TUNNEL || kind == ARPHRD_TUNNEL6 || kind == ARPHRD_SIT || kind == ARPHRD_IPGRE ||
         kind == kIp6Gre || kind == kNone;
}

}  // namespace

Result<std::vector<Interface>> interfaces() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return system_error("listing network interfaces", errno);
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  const Fd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));  // for rate queries; without it, rates are unknown
  const Wires wires;
  std::vector<Interface> found;
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || (i->ifa_flags & IFF_UP) == 0 || (i->ifa_flags & IFF_RUNNING) == 0) continue;
    Interface one;
    if (i->ifa_addr->sa_family == AF_INET) {
      one.address.length = sizeof(sockaddr_in);
    } else if (i->ifa_addr->sa_family == AF_INET6 &&
               !IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(i->ifa_addr)->sin6_addr)) {
      one.address.length = sizeof(sockaddr_in6);
    } else {
      continue;
    }
    std::memcpy(&one.address.storage, i->ifa_addr, one.address.length);
    one.address.set_port(0);
    one.name = i->ifa_name;
    one.prefix_bits = prefix_of(i->ifa_netmask);
    one.loopback = (i->ifa_flags & IFF_LOOPBACK) != 0;
    one.mbit_per_s = rate_of(socket.get(), one.name);
    one.tunnel = is_tunnel(socket.get(), one.name);
    one.wire = wires.of(one.name);
    found.push_back(std::move(one));
  }
  return found;
}

bool same_network(const SocketAddress& a, const SocketAddress& b, uint32_t prefix_bits) {
  const auto x = a.host_bytes(), y = b.host_bytes();
  if (a.is_unix() || x.size() != y.size() || prefix_bits > 8 * x.size()) return false;
  for (size_t i = 0; i < x.size() && prefix_bits > 8 * i; ++i) {
    const uint32_t left = prefix_bits - static_cast<uint32_t>(8 * i);
    const uint32_t mask = left >= 8 ? 0xffu : 0xffu << (8 - left) & 0xffu;
    if (((std::to_integer<uint32_t>(x[i]) ^ std::to_integer<uint32_t>(y[i])) & mask) != 0) return false;
  }
  return true;
}

}  // namespace moeccl::driver
