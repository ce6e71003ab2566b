// SPDX-License-Identifier: Apache-2.0
#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <set>
#include <type_traits>
#include <vector>

#include "tests/support/fake_net/fake_net_script.h"

// Which versions this build exports, and how.
#ifndef FAKE_OLDEST
#define FAKE_OLDEST 6
#endif
#ifndef FAKE_NEWEST
#define FAKE_NEWEST 12
#endif

namespace fake_net {
namespace {

using abi::Code;
using Clock = std::chrono::steady_clock;

struct Comm;
struct FakeRequest {
  Comm* comm = nullptr;
  char* data = nullptr;
  size_t size = 0, moved = 0;
  uint64_t head = 0;  // the size of the message, which precedes it on the wire
  size_t head_moved = 0;
  bool flush = false, breaks = false, finished = false;
  Clock::time_point at;
};
struct Region {
  char* base;
  size_t size;
};
struct Comm {
  int fd = -1;
  bool sends = false, broken = false, told_broken = false;
  size_t limit = 32;
  long calls = 0;
  std::deque<std::unique_ptr<FakeRequest>> requests;  // oldest first
  std::set<Region*> regions;
};
struct Listener {
  int fd = -1;
  size_t limit = 32;
};
struct WireHandle {
  sockaddr_in address;
  uint32_t state;  // of connect: 0 not begun, else descriptor + 1
};

void unblock(int fd) {
  const int one = 1;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  (void)fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

// Returns the addresses of the interfaces that are up, or loopback where there are no others.
std::vector<sockaddr_in> own_addresses() {
  std::vector<sockaddr_in> found;
  ifaddrs* all = nullptr;
  for (const ifaddrs* i = getifaddrs(&all) == 0 ? all : nullptr; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_INET || (i->ifa_flags & IFF_LOOPBACK) != 0) continue;
    if ((i->ifa_flags & IFF_UP) == 0) continue;
    found.emplace_back();
    std::memcpy(&found.back(), i->ifa_addr, sizeof(sockaddr_in));
  }
  freeifaddrs(all);
  if (found.empty()) {
    found.emplace_back();
    found.back().sin_family = AF_INET;
    found.back().sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  }
  return found;
}

int n_devices() {
  const Script s = now();
  return s.interfaces ? static_cast<int>(own_addresses().size()) : s.devices;
}

Code devices(int* n) {
  *n = n_devices();
  return abi::kSuccess;
}

char kName[] = "fake0";

template <class P>
Code properties(int dev, P* p) {
  const Script s = now();
  if (dev < 0 || dev >= n_devices()) return refuse(abi::kInternalError, "no such device");
  *p = {};
  p->name = kName;
  p->ptrSupport = abi::kPtrHost | (s.cuda ? abi::kPtrCuda : 0);
  p->speed = 10'000;
  p->maxComms = 65536;
  p->maxRecvs = 1;
  if constexpr (requires { p->netDeviceType; }) p->netDeviceType = s.gpu ? 1 : abi::kDeviceHost;
  if constexpr (requires { p->vProps; }) p->vProps.ndevs = 1;
  if constexpr (requires { p->maxP2pBytes; }) p->maxP2pBytes = size_t{1} << 30;
  if constexpr (requires { p->railId; }) p->railId = p->planeId = abi::kUndefined;
  return abi::kSuccess;
}

Code listen_at(int dev, size_t limit, void* handle, void** out) {
  count("listen");
  if (dev < 0 || dev >= n_devices()) return refuse(abi::kInternalError, "no such device");
  auto made = std::make_unique<Listener>();
  made->limit = limit;
  made->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const std::vector<sockaddr_in> addresses = own_addresses();
  sockaddr_in address = addresses[static_cast<size_t>(dev) % addresses.size()];
  socklen_t n = sizeof(address);
  if (bind(made->fd, reinterpret_cast<sockaddr*>(&address), n) != 0 || listen(made->fd, 16) != 0 ||
      getsockname(made->fd, reinterpret_cast<sockaddr*>(&address), &n) != 0)
    return refuse(abi::kSystemError, "listen");
  unblock(made->fd);
  WireHandle h = {address, 0};
  std::memcpy(handle, &h, sizeof(h));
  *out = made.release();
  return abi::kSuccess;
}

Code connect_to(size_t limit, void* handle, void** out) {
  count("connect");
  const Script s = now();
  *out = nullptr;
  if (s.refuse) return refuse(abi::kSystemError, "connection refused by script");
  if (s.never) return abi::kSuccess;
  WireHandle h;
  std::memcpy(&h, handle, sizeof(h));
  if (h.state == 0) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    unblock(fd);
    if (connect(fd, reinterpret_cast<sockaddr*>(&h.address), sizeof(h.address)) != 0 && errno != EINPROGRESS) {
      close(fd);
      return refuse(abi::kSystemError, "connect");
    }
    h.state = static_cast<uint32_t>(fd) + 1;
    std::memcpy(handle, &h, sizeof(h));
    return abi::kSuccess;  // not connected at the first call, as with RDMA
  }
  const int fd = static_cast<int>(h.state) - 1;
  sockaddr_in peer;
  socklen_t n = sizeof(peer);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &n) != 0) return abi::kSuccess;
  count("connected");
  auto* made = new Comm;
  made->fd = fd;
  made->sends = true;
  made->limit = limit;
  *out = made;
  return abi::kSuccess;
}

Code accept_from(void* listener, void** out) {
  count("accept");
  *out = nullptr;
  auto* l = static_cast<Listener*>(listener);
  for (;;) {
    const int fd = accept4(l->fd, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd >= 0) {
      unblock(fd);
      count("accepted");
      auto* made = new Comm;
      made->fd = fd;
      made->limit = l->limit;
      *out = made;
      return abi::kSuccess;
    }
    if (errno != EAGAIN && errno != EINTR) return refuse(abi::kSystemError, "accept");
    if (!now().block_accept) return abi::kSuccess;
    usleep(1000);
  }
}

Code reg_mr(void* comm, void* data, size_t size, int type, void** mhandle) {
  if (!may_register()) return refuse(abi::kSystemError, "too much locked memory");
  count("regMr");
  if (type == abi::kPtrCuda && !now().cuda) return refuse(abi::kInternalError, "no CUDA memory here");
  auto* r = new Region{static_cast<char*>(data), size};
  static_cast<Comm*>(comm)->regions.insert(r);
  *mhandle = r;
  return abi::kSuccess;
}
[[maybe_unused]] Code reg_mr_int(void* comm, void* data, int size, int type, void** mhandle) {
  return reg_mr(comm, data, static_cast<size_t>(size), type, mhandle);
}
Code dereg_mr(void* comm, void* mhandle) {
  count("deregMr");
  if (static_cast<Comm*>(comm)->regions.erase(static_cast<Region*>(mhandle)) != 1)
    return refuse(abi::kInternalError, "deregMr of what is not registered");
  delete static_cast<Region*>(mhandle);
  return abi::kSuccess;
}

Code post(void* comm, void* data, size_t size, void* mhandle, void** request, bool sends) {
  auto* c = static_cast<Comm*>(comm);
  *request = nullptr;
  const Script s = now();
  if (is_aborted()) return refuse(abi::kInternalError, "the endpoint was aborted");
  if (c->told_broken) count("retried");
  if (c->sends != sends) return refuse(abi::kInternalError, "a comm of the other direction");
  if (s.null > 1 && ++c->calls % s.null != 0) return abi::kSuccess;
  if (c->requests.size() >= c->limit) return refuse(abi::kInternalError, "too many requests");
  const auto* r = static_cast<Region*>(mhandle);
  const char* at = static_cast<char*>(data);
  if (!c->regions.contains(static_cast<Region*>(mhandle)) || at < r->base || at + size > r->base + r->size)
    return refuse(abi::kInternalError, "memory that is not registered with this comm");
  auto made = std::make_unique<FakeRequest>();
  made->comm = c;
  made->data = static_cast<char*>(data);
  made->size = size;
  made->head = size;
  count(sends ? "isend" : "irecv");
  made->breaks = sends && s.fail > 0 && breaks_a_send();
  *request = made.get();
  c->requests.push_back(std::move(made));
  most("requests", static_cast<long>(c->requests.size()));
  return abi::kSuccess;
}

// Returns false when the connection is broken.
bool move(Comm& c, FakeRequest& r) {
  auto* head = reinterpret_cast<char*>(&r.head);
  while (!r.finished) {
    const bool in_head = r.head_moved < sizeof(r.head);
    char* at = in_head ? head + r.head_moved : r.data + r.moved;
    size_t n = in_head ? sizeof(r.head) - r.head_moved : r.size - r.moved;
    if (r.breaks && !in_head && r.moved >= r.size / 2) {
      if (!now().quiet) (void)shutdown(c.fd, SHUT_RDWR);
      return false;
    }
    if (r.breaks && !in_head) n = std::min(n, std::max<size_t>(1, r.size / 2 - r.moved));
    if (n > 0) {
      const ssize_t went = c.sends ? send(c.fd, at, n, MSG_NOSIGNAL) : recv(c.fd, at, n, 0);
      if (went < 0 && (errno == EAGAIN || errno == EINTR)) return true;
      if (went <= 0) return false;
      (in_head ? r.head_moved : r.moved) += static_cast<size_t>(went);
    }
    if (in_head && r.head_moved == sizeof(r.head) && !c.sends) {
      if (r.head > r.size) return false;  // larger than the posted receive
      r.size = r.head;
    }
    if (r.head_moved == sizeof(r.head) && r.moved == r.size) {
      r.finished = true;
      r.at = Clock::now();
    }
  }
  return true;
}

Code test(void* request, int* done, int* sizes) {
  auto* r = static_cast<FakeRequest*>(request);
  Comm& c = *r->comm;
  const Script s = now();
  *done = 0;
  if (is_aborted()) return refuse(abi::kInternalError, "the endpoint was aborted");
  if (c.told_broken) count("retried");
  if (c.requests.empty() || c.requests.front().get() != r) return refuse(abi::kInternalError, "not the oldest request");
  for (const auto& each : c.requests) {
    if (c.broken || each->finished) continue;
    if (each->flush) {
      each->finished = true;
      each->at = Clock::now();
    } else if (!move(c, *each)) {
      c.broken = !s.deaf;
    }
    if (!each->finished) break;
  }
  if (!r->finished && c.broken) {
    c.told_broken = true;
    return refuse(abi::kSystemError, "the connection broke");
  }
  if (!r->finished || Clock::now() - r->at < std::chrono::microseconds(s.late_us)) return abi::kSuccess;
  *done = 1;
  if (sizes != nullptr && !s.untold) *sizes = static_cast<int>(r->size);
  c.requests.pop_front();
  return abi::kSuccess;
}

Code flush(void* comm, int, void** data, int* sizes, void** mhandles, void** request) {
  auto* c = static_cast<Comm*>(comm);
  if (!c->regions.contains(static_cast<Region*>(mhandles[0]))) return refuse(abi::kInternalError, "flush of nothing");
  count("iflush");
  count("flushed", sizes[0]);
  auto made = std::make_unique<FakeRequest>();
  made->comm = c;
  made->data = static_cast<char*>(data[0]);
  made->flush = true;
  *request = made.get();
  c->requests.push_back(std::move(made));
  return abi::kSuccess;
}

bool peer_is_gone(const Comm& c) {
  char byte = 0;
  const ssize_t n = recv(c.fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

// Like aws-ofi-nccl, which serves none of a process's comms any more after one was closed with requests under way. Here
// a rank may do so where its peer is gone, because nothing else is left to it.
Code close_comm(Comm* c) {
  const bool busy = !c->requests.empty() && !now().apart && !peer_is_gone(*c);
  if (!c->regions.empty()) count("leaked", static_cast<long>(c->regions.size()));
  close(c->fd);
  for (Region* r : c->regions) delete r;
  delete c;
  if (!busy) return abi::kSuccess;
  abort_all();
  return refuse(abi::kInternalError, "a comm was closed with requests under way");
}
Code close_send(void* comm) {
  count("closeSend");
  return close_comm(static_cast<Comm*>(comm));
}
Code close_receive(void* comm) {
  count("closeRecv");
  return close_comm(static_cast<Comm*>(comm));
}
Code close_listen(void* listener) {
  count("closeListen");
  auto* l = static_cast<Listener*>(listener);
  close(l->fd);
  delete l;
  return abi::kSuccess;
}

// NCCL lets no two calls of init and finalize run at the same time.
std::atomic<int> alone{0};
void take_a_while() {
  if (alone.fetch_add(1) != 0) count("overlapped");
  usleep(200);
  alone.fetch_sub(1);
}

Code init_all(abi::Logger to) {
  count("init");
  take_a_while();
  while (now().hold) usleep(1000);
  log_to(to);
  return now().init ? refuse(abi::kSystemError, "init fails by script") : abi::kSuccess;
}

// Fills the fields that are the same in all versions, and those that differ.
template <class Net, class Init>
bool fill(Net* net, Init init) {
  constexpr size_t kLimit = std::is_same_v<Net, abi::NetV6> ? 8 : 32;
  net->devices = devices;
  net->accept = [] {
    if constexpr (std::is_same_v<Net, abi::NetV6>) {
      return +[](void* l, void** c) { return accept_from(l, c); };
    } else {
      return +[](void* l, void** c, void**) { return accept_from(l, c); };
    }
  }();
  if constexpr (std::is_same_v<decltype(net->regMr), abi::TypesV6::RegMr*>) {
    net->regMr = reg_mr_int;
  } else {
    net->regMr = reg_mr;
  }
  net->deregMr = dereg_mr;
  net->iflush = flush;
  net->test = test;
  net->closeSend = close_send;
  net->closeRecv = close_receive;
  net->closeListen = close_listen;
  if constexpr (requires { net->finalize; }) {
    net->listen = [](void*, int dev, void* h, void** c) { return listen_at(dev, kLimit, h, c); };
    net->connect = [](void*, int, void* h, void** c, void**) { return connect_to(kLimit, h, c); };
    net->finalize = [](void* context) {
      count("finalize");
      take_a_while();
      delete static_cast<int*>(context);
      return abi::kSuccess;
    };
  } else {
    net->listen = [](int dev, void* h, void** c) { return listen_at(dev, kLimit, h, c); };
    if constexpr (std::is_same_v<Net, abi::NetV6>) {
      net->connect = [](int, void* h, void** c) { return connect_to(kLimit, h, c); };
    } else if constexpr (std::is_same_v<Net, abi::NetV10>) {
      net->connect = [](int, abi::CommConfig*, void* h, void** c, void**) { return connect_to(kLimit, h, c); };
    } else {
      net->connect = [](int, void* h, void** c, void**) { return connect_to(kLimit, h, c); };
    }
  }
  if constexpr (std::is_same_v<decltype(net->isend), abi::TypesV10::Isend*>) {
    net->isend = [](void* c, void* d, size_t n, int, void* m, void*, void** r) { return post(c, d, n, m, r, true); };
    net->irecv = [](void* c, int, void** d, size_t* n, int*, void** m, void**, void** r) {
      return post(c, d[0], n[0], m[0], r, false);
    };
  } else {
    using Size = std::conditional_t<std::is_same_v<Net, abi::NetV9>, size_t, int>;
    net->isend = [](void* c, void* d, Size n, int, void* m, void** r) {
      return post(c, d, static_cast<size_t>(n), m, r, true);
    };
    net->irecv = [](void* c, int, void** d, Size* n, int*, void** m, void** r) {
      return post(c, d[0], static_cast<size_t>(n[0]), m[0], r, false);
    };
  }
  net->name = "Fake";
  net->getProperties = [](int dev, auto* p) { return properties(dev, p); };
  net->init = init;
  return true;
}

[[maybe_unused]] Code init_contexts(void** context, uint64_t, abi::CommConfig*, abi::Logger to, abi::Profiler) {
  const Code code = init_all(to);
  if (code == abi::kSuccess) *context = new int(1);
  return code;
}

[[maybe_unused]] Code init_profiled(abi::Logger to, abi::Profiler) { return init_all(to); }

}  // namespace
}  // namespace fake_net

#define FAKE_HAS(version) (FAKE_OLDEST <= version && FAKE_NEWEST >= version)
// Exports the plugin's structure of a version.
#define FAKE_EXPORT(version, init)                                                                   \
  extern "C" {                                                                                       \
  __attribute__((visibility("default"))) fake_net::abi::NetV##version ncclNetPlugin_v##version = {}; \
  }                                                                                                  \
  namespace {                                                                                        \
  const bool filled_v##version = fake_net::fill(&ncclNetPlugin_v##version, init);                    \
  }

#if FAKE_HAS(6)
extern "C" {
__attribute__((visibility("default"))) volatile fake_net::abi::NetV6 ncclNetPlugin_v6 = {};
}
const bool filled_v6 = fake_net::fill(const_cast<fake_net::abi::NetV6*>(&ncclNetPlugin_v6), fake_net::init_all);
#endif
#if FAKE_HAS(7)
FAKE_EXPORT(7, fake_net::init_all)
#endif
#if FAKE_HAS(8)
// Like nccl-rdma-sharp, this structure has only a name and init, and init writes the rest.
extern "C" {
__attribute__((visibility("default"))) fake_net::abi::NetV8 ncclNetPlugin_v8 = {};
}
const bool filled_v8 = [] {
  ncclNetPlugin_v8.name = "Fake";
  ncclNetPlugin_v8.init = [](fake_net::abi::Logger to) {
    fake_net::fill(&ncclNetPlugin_v8, ncclNetPlugin_v8.init);
    ncclNetPlugin_v8.name = "FakeOverwritten";
    return fake_net::init_all(to);
  };
  return true;
}();
#endif
#if FAKE_HAS(9)
FAKE_EXPORT(9, fake_net::init_all)
#endif
#if FAKE_HAS(10)
FAKE_EXPORT(10, fake_net::init_profiled)
#endif
#if FAKE_HAS(11)
FAKE_EXPORT(11, fake_net::init_contexts)
#endif
#if FAKE_HAS(12)
FAKE_EXPORT(12, fake_net::init_contexts)
#endif
