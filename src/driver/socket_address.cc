// SPDX-License-Identifier: Apache-2.0
// Socket addresses: parsing, printing, and finding out which of them belong to this host.
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <future>
#include <memory>

#include "src/driver/socket.h"
#include "src/driver/thread.h"

namespace moeccl::driver {
namespace {

const sockaddr_in& as_v4(const SocketAddress& a) { return reinterpret_cast<const sockaddr_in&>(a.storage); }
const sockaddr_in6& as_v6(const SocketAddress& a) { return reinterpret_cast<const sockaddr_in6&>(a.storage); }

bool parse_port(std::string_view text, uint16_t* port) {
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), *port);
  return code == std::errc() && end == text.data() + text.size();
}

bool same_ip(const SocketAddress& a, const sockaddr* b) {
  if (b == nullptr || a.storage.ss_family != b->sa_family) return false;
  if (b->sa_family == AF_INET) {
    return as_v4(a).sin_addr.s_addr == reinterpret_cast<const sockaddr_in*>(b)->sin_addr.s_addr;
  }
  if (b->sa_family == AF_INET6) {
    return std::memcmp(&as_v6(a).sin6_addr, &reinterpret_cast<const sockaddr_in6*>(b)->sin6_addr, 16) == 0;
  }
  return false;
}

SocketAddress from_raw(const sockaddr* address, socklen_t length) {
  SocketAddress result;
  std::memcpy(&result.storage, address, length);
  result.length = length;
  return result;
}

using Addresses = std::vector<SocketAddress>;

// Blocks. `flags` are of addrinfo.
Result<Addresses> ask_system(const std::string& host, int flags) {
  const bool in_brackets = host.starts_with('[') && host.ends_with(']');
  const std::string name = in_brackets ? host.substr(1, host.size() - 2) : host;
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(name.c_str(), nullptr, &hints, &found);
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(found, &::freeaddrinfo);
  if (code != 0 || found == nullptr) {
    return error(moecclSystemError, "looking up host \"{}\": {}", host, ::gai_strerror(code));
  }
  Addresses all;
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    // A hosts file may name one address twice.
    const bool known = std::any_of(all.begin(), all.end(), [&](const auto& a) { return same_ip(a, at->ai_addr); });
    if (!known) all.push_back(from_raw(at->ai_addr, at->ai_addrlen));
  }
  return all;
}

// Asks in a thread, which nothing can end: a name server that is silent takes seconds for each try.
Result<Addresses> ask_name_service(const std::string& host, Deadline deadline) {
  const auto answer = std::make_shared<std::promise<Result<Addresses>>>();
  std::future<Result<Addresses>> said = answer->get_future();
  MOECCL_ASSIGN_OR_RETURN(std::thread thread, start_thread("moeccl-name", [answer, host] {
                            Result<Addresses> all = Addresses();
                            const Status status = contained([&] { return (all = ask_system(host, 0)), Status(); });
                            answer->set_value(status.ok() ? std::move(all) : status);
                          }));
  thread.detach();
  while (said.wait_for(std::chrono::milliseconds(deadline.remaining_ms())) != std::future_status::ready) {
    if (!deadline.passed()) continue;
    return error(moecclTimeout,
                 "looking up host \"{}\": the name service has not answered in time: check the name servers in "
                 "/etc/resolv.conf, or give an IP address",
                 host);
  }
  return said.get();
}

}  // namespace

bool SocketAddress::is_any() const {
  if (storage.ss_family == AF_INET) return as_v4(*this).sin_addr.s_addr == htonl(INADDR_ANY);
  if (storage.ss_family != AF_INET6) return false;
  const in6_addr& ip = as_v6(*this).sin6_addr;
  if (IN6_IS_ADDR_UNSPECIFIED(&ip)) return true;
  // ::ffff:0.0.0.0 listens everywhere, too.
  return IN6_IS_ADDR_V4MAPPED(&ip) && std::memcmp(ip.s6_addr + 12, "\0\0\0\0", 4) == 0;
}

bool SocketAddress::is_loopback() const {
  if (storage.ss_family == AF_INET) return (ntohl(as_v4(*this).sin_addr.s_addr) >> 24) == 127;
  return storage.ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&as_v6(*this).sin6_addr);
}

bool SocketAddress::is_link_local() const {
  return storage.ss_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&as_v6(*this).sin6_addr);
}

uint16_t SocketAddress::port() const {
  if (storage.ss_family == AF_INET) return ntohs(as_v4(*this).sin_port);
  return storage.ss_family == AF_INET6 ? ntohs(as_v6(*this).sin6_port) : uint16_t{0};
}

void SocketAddress::set_port(uint16_t port) {
  if (storage.ss_family == AF_INET) reinterpret_cast<sockaddr_in&>(storage).sin_port = htons(port);
  if (storage.ss_family == AF_INET6) reinterpret_cast<sockaddr_in6&>(storage).sin6_port = htons(port);
}

std::string SocketAddress::host() const {
  const std::string text = str();
  return is_unix() ? text : text.substr(0, text.rfind(':'));
}

std::string SocketAddress::str() const {
  char text[INET6_ADDRSTRLEN] = {};
  switch (storage.ss_family) {
    case AF_INET:
      ::inet_ntop(AF_INET, &as_v4(*this).sin_addr, text, sizeof(text));
      return format("{}:{}", text, port());
    case AF_INET6:
      ::inet_ntop(AF_INET6, &as_v6(*this).sin6_addr, text, sizeof(text));
      return format("[{}]:{}", text, port());
    case AF_UNIX: {
      const auto& un = reinterpret_cast<const sockaddr_un&>(storage);
      if (un.sun_path[0] != '\0') return "unix:" + std::string(un.sun_path);
      const size_t used = length > offsetof(sockaddr_un, sun_path) ? length - offsetof(sockaddr_un, sun_path) : 0;
      return "unix:@" + std::string(un.sun_path + 1, used > 0 ? used - 1 : 0);
    }
    default:
      return "no address";
  }
}

std::span<const std::byte> SocketAddress::host_bytes() const {
  const auto* raw = reinterpret_cast<const std::byte*>(&storage);
  constexpr size_t kNameAt = offsetof(sockaddr_un, sun_path) + 1;
  switch (storage.ss_family) {
    case AF_UNIX:
      return {raw + kNameAt, length > kNameAt ? length - kNameAt : 0};
    case AF_INET:
      return {raw + offsetof(sockaddr_in, sin_addr), 4};
    case AF_INET6:
      return {raw + offsetof(sockaddr_in6, sin6_addr), 16};
    default:
      return {};
  }
}

Result<SocketAddress> ip_address(std::span<const std::byte> bytes, uint16_t port) {
  SocketAddress result;
  if (bytes.size() == 4) {
    auto& v4 = reinterpret_cast<sockaddr_in&>(result.storage);
    v4.sin_family = AF_INET;
    std::memcpy(&v4.sin_addr, bytes.data(), 4);
    result.length = sizeof(v4);
  } else if (bytes.size() == 16) {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(result.storage);
    v6.sin6_family = AF_INET6;
    std::memcpy(&v6.sin6_addr, bytes.data(), 16);
    result.length = sizeof(v6);
  } else {
    return error(moecclInvalidArgument, "an IP address of {} bytes", bytes.size());
  }
  result.set_port(port);
  return result;
}

SocketAddress unix_address(std::string_view name) {
  SocketAddress result;
  auto& un = reinterpret_cast<sockaddr_un&>(result.storage);
  un.sun_family = AF_UNIX;
  const size_t n = std::min(name.size(), size_t{100});
  std::memcpy(un.sun_path + 1, name.data(), n);  // the leading zero byte selects the abstract namespace
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
  return result;
}

SocketAddress unix_file_address(std::string_view path) {
  SocketAddress result;
  auto& un = reinterpret_cast<sockaddr_un&>(result.storage);
  static_assert(sizeof(un.sun_path) == kMaxSocketPath + 1);
  un.sun_family = AF_UNIX;
  std::memcpy(un.sun_path, path.data(), std::min(path.size(), kMaxSocketPath));  // a zero byte follows
  result.length = sizeof(un);
  return result;
}

Result<SocketAddress> parse_ip_address(const std::string& text) {
  const auto refused = [&text] {
    return error(moecclInvalidArgument, "\"{}\" is not an address: give ip or ip:port, [ip6]:port for IPv6", text);
  };
  std::string ip = text;
  std::string_view port_text;
  if (text.starts_with('[')) {
    const size_t end = text.find(']');
    if (end == std::string::npos) return refused();
    ip = text.substr(1, end - 1);
    if (end + 1 < text.size()) {
      if (text[end + 1] != ':') return refused();
      port_text = std::string_view(text).substr(end + 2);
      if (port_text.empty()) return refused();
    }
  } else if (const size_t colon = text.find(':'); colon != std::string::npos && text.rfind(':') == colon) {
    ip = text.substr(0, colon);
    port_text = std::string_view(text).substr(colon + 1);
    if (port_text.empty()) return refused();
  }
  uint16_t port = 0;
  if (!port_text.empty() && !parse_port(port_text, &port)) return refused();

  SocketAddress result;
  auto& v4 = reinterpret_cast<sockaddr_in&>(result.storage);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(result.storage);
  if (::inet_pton(AF_INET, ip.c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    result.length = sizeof(v4);
  } else if (::inet_pton(AF_INET6, ip.c_str(), &v6.sin6_addr) == 1) {
    v6.sin6_family = AF_INET6;
    result.length = sizeof(v6);
  } else {
    return refused();
  }
  result.set_port(port);
  return result;
}

Result<std::vector<SocketAddress>> resolve_all(const std::string& host, uint16_t port, Deadline deadline) {
  if (host == "localhost") {  // RFC 6761: loopback, even if no hosts file says so
    MOECCL_ASSIGN_OR_RETURN(SocketAddress loopback, parse_ip_address("127.0.0.1"));
    loopback.set_port(port);
    return std::vector<SocketAddress>{loopback};
  }
  Result<Addresses> all = ask_system(host, AI_NUMERICHOST);
  if (!all.ok()) all = ask_name_service(host, deadline);
  if (all.ok()) std::for_each(all->begin(), all->end(), [port](SocketAddress& a) { a.set_port(port); });
  return all;
}

bool is_local_address(const SocketAddress& address) {
  if (address.is_loopback()) return true;
  ifaddrs* found = nullptr;
  if (::getifaddrs(&found) != 0) return false;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> list(found, &::freeifaddrs);
  for (const ifaddrs* at = found; at != nullptr; at = at->ifa_next) {
    if (same_ip(address, at->ifa_addr)) return true;
  }
  return false;
}

Result<SocketAddress> source_address_towards(const SocketAddress& peer) {
  // connect() on a datagram socket only looks up the route.
  const Fd fd(::socket(peer.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd) return system_error("socket", errno);
  SocketAddress target = peer;
  if (target.port() == 0) target.set_port(9);  // the discard port, because some kernels refuse port 0
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&target.storage), target.length) != 0) {
    return system_error("finding the route to " + target.str(), errno);
  }
  MOECCL_ASSIGN_OR_RETURN(SocketAddress result, local_address(fd.get()));
  result.set_port(0);
  return result;
}

Result<SocketAddress> local_address(int fd) {
  SocketAddress result;
  result.length = sizeof(result.storage);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&result.storage), &result.length) != 0) {
    return system_error("getsockname", errno);
  }
  return result;
}

Result<SocketAddress> peer_address(int fd) {
  SocketAddress result;
  result.length = sizeof(result.storage);
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&result.storage), &result.length) != 0) {
    return system_error("getpeername", errno);
  }
  return result;
}

}  // namespace moeccl::driver
