// SPDX-License-Identifier: Apache-2.0
#include "src/driver/netlink.h"

#include <linux/rtnetlink.h>
#include <net/if.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "src/base/fd.h"
#include "src/driver/interface.h"

namespace moeccl::driver {
namespace {

constexpr size_t kAnswerBytes = 64 << 10;  // the kernel fills at most 32 KiB at once
constexpr int kMostBelow = 8;              // the kernel's own limit for devices on devices

// Sends one request and passes each part of the answer on. Returns false if the kernel refuses it, or says nothing.
template <class Request, class Take>
bool ask(Request* request, const Take& take) {
  const Fd socket(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE));
  const timeval second = {1, 0};
  request->head.nlmsg_flags |= NLM_F_REQUEST;
  if (!socket || ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &second, sizeof(second)) != 0 ||
      ::send(socket.get(), request, request->head.nlmsg_len, 0) < 0)
    return false;
  const bool dump = (request->head.nlmsg_flags & NLM_F_DUMP) == NLM_F_DUMP;
  std::vector<std::byte> answer(kAnswerBytes);
  for (;;) {
    const ssize_t n = ::recv(socket.get(), answer.data(), answer.size(), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    auto left = static_cast<unsigned>(n);
    for (auto* m = reinterpret_cast<nlmsghdr*>(answer.data()); NLMSG_OK(m, left); m = NLMSG_NEXT(m, left)) {
      if (m->nlmsg_type == NLMSG_DONE) return true;
      if (m->nlmsg_type == NLMSG_ERROR) return false;
      take(*m);
      if (!dump) return true;
    }
  }
}

// Calls take(type, bytes) for each attribute.
template <class Take>
void each(std::span<const std::byte> attributes, const Take& take) {
  while (attributes.size() >= sizeof(rtattr)) {
    rtattr head;
    std::memcpy(&head, attributes.data(), sizeof(head));
    if (head.rta_len < RTA_LENGTH(0) || head.rta_len > attributes.size()) return;
    take(head.rta_type, attributes.subspan(RTA_LENGTH(0), head.rta_len - RTA_LENGTH(0)));
    attributes = attributes.subspan(std::min<size_t>(RTA_ALIGN(head.rta_len), attributes.size()));
  }
}

template <class Payload>
std::span<const std::byte> attributes_of(const nlmsghdr& m) {
  const size_t before = NLMSG_SPACE(sizeof(Payload));
  if (m.nlmsg_len < before) return {};
  return {reinterpret_cast<const std::byte*>(&m) + before, m.nlmsg_len - before};
}

std::string text_of(std::span<const std::byte> bytes) {
  const auto* text = reinterpret_cast<const char*>(bytes.data());
  return std::string(text, strnlen(text, bytes.size()));
}

int number_of(std::span<const std::byte> bytes) {
  int value = 0;
  if (bytes.size() == sizeof(value)) std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

// These have no line of their own: what they carry goes over the device below.
bool shares(const std::string& kind) {
  return kind == "vlan" || kind == "macvlan" || kind == "macvtap" || kind == "ipvlan" || kind == "ipvtap";
}

}  // namespace

Wires::Wires() {
  struct {
    nlmsghdr head;
    ifinfomsg all;
  } request = {};
  request.head.nlmsg_len = sizeof(request);
  request.head.nlmsg_type = RTM_GETLINK;
  request.head.nlmsg_flags = NLM_F_DUMP;
  (void)ask(&request, [&](const nlmsghdr& m) {
    if (m.nlmsg_type != RTM_NEWLINK || m.nlmsg_len < NLMSG_SPACE(sizeof(ifinfomsg))) return;
    Device d;
    each(attributes_of<ifinfomsg>(m), [&](unsigned short type, std::span<const std::byte> bytes) {
      if (type == IFLA_IFNAME) d.name = text_of(bytes);
      if (type == IFLA_LINK) d.below = number_of(bytes);
      if (type == IFLA_LINK_NETNSID) d.elsewhere = number_of(bytes);
      if (type != IFLA_LINKINFO) return;
      each(bytes, [&](unsigned short inner, std::span<const std::byte> kind) {
        if (inner == IFLA_INFO_KIND) d.kind = text_of(kind);
      });
    });
    devices_[static_cast<const ifinfomsg*>(NLMSG_DATA(&m))->ifi_index] = std::move(d);
  });
}

std::string Wires::of(const std::string& interface) const {
  const std::string name = interface.substr(0, interface.find(':'));
  auto at = std::find_if(devices_.begin(), devices_.end(), [&](const auto& d) { return d.second.name == name; });
  for (int i = 0; at != devices_.end() && i < kMostBelow && shares(at->second.kind); ++i) {
    const Device& d = at->second;
    if (d.elsewhere >= 0) return format("{} of namespace {}", d.below, d.elsewhere);
    const auto below = devices_.find(d.below);
    if (below == devices_.end()) break;
    at = below;
  }
  return at == devices_.end() || at->second.name == interface ? "" : at->second.name;
}

std::optional<bool> leaves_by(const std::string& interface, const SocketAddress& from, const SocketAddress& to) {
  struct {
    nlmsghdr head;
    rtmsg route;
    std::byte attributes[2 * RTA_SPACE(16)];
  } request = {};
  static_assert(offsetof(decltype(request), attributes) == NLMSG_SPACE(sizeof(rtmsg)));
  size_t used = 0;
  const auto add = [&](unsigned short type, std::span<const std::byte> address) {
    const rtattr head = {static_cast<unsigned short>(RTA_LENGTH(address.size())), type};
    std::memcpy(request.attributes + used, &head, sizeof(head));
    std::memcpy(request.attributes + used + RTA_LENGTH(0), address.data(), address.size());
    used += RTA_SPACE(address.size());
    return static_cast<unsigned char>(8 * address.size());
  };
  if (from.is_unix() || to.is_unix()) return {};
  request.route.rtm_family = static_cast<unsigned char>(to.storage.ss_family);
  request.route.rtm_src_len = add(RTA_SRC, from.host_bytes());
  request.route.rtm_dst_len = add(RTA_DST, to.host_bytes());
  request.head.nlmsg_type = RTM_GETROUTE;
  request.head.nlmsg_len = static_cast<unsigned>(offsetof(decltype(request), attributes) + used);
  int out = 0;
  const bool answered = ask(&request, [&](const nlmsghdr& m) {
    each(attributes_of<rtmsg>(m), [&](unsigned short type, std::span<const std::byte> bytes) {
      if (type == RTA_OIF) out = number_of(bytes);
    });
  });
  if (!answered || out == 0) return {};
  return static_cast<int>(::if_nametoindex(interface.substr(0, interface.find(':')).c_str())) == out;
}

}  // namespace moeccl::driver
