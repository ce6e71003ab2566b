// SPDX-License-Identifier: Apache-2.0
// Measures one link between two processes, below all collectives: the rate of puts and the latency of a small put with
// its signal, like ib_write_bw and ib_write_lat for a write.
//
//   bench_link NETWORK [DEVICE0 DEVICE1]    a row of transport/networks.cc; MOECCL_IB_HCA of each process
//
// Puts come from registered memory (a heap's) and from memory that the network must copy. The received bytes are
// compared once per size before it is timed.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "src/base/env.h"
#include "src/exec/fabric.h"
#include "transport/shm/segment.h"
#include "transport/transport.h"

namespace {

using namespace moeccl;
using transport::PutState;

constexpr uint64_t kStaging = 16 << 20;
constexpr size_t kMost = 4 << 20;

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "bench_link: %s\n", why.c_str());
  std::exit(1);
}
void must(const Status& s) {
  if (!s.ok()) fail(s.message());
}

// Pipes from and to the other process.
struct Peer {
  int in, out;
  std::vector<std::byte> exchange(std::span<const std::byte> mine) const {
    uint64_t n = mine.size();
    if (write(out, &n, 8) != 8 || write(out, mine.data(), n) != static_cast<ssize_t>(n) || read(in, &n, 8) != 8)
      fail("the other process has gone");
    std::vector<std::byte> theirs(n);
    for (size_t at = 0; at < n;) {
      const ssize_t got = read(in, theirs.data() + at, n - at);
      if (got <= 0) fail("the other process has gone");
      at += static_cast<size_t>(got);
    }
    return theirs;
  }
  void meet() const { (void)exchange(std::vector<std::byte>(1)); }
};

struct Rank {
  uint32_t me;
  Peer peer;
  std::shared_ptr<transport::shm::Segment> own;
  transport::NetworkLinks made;
  std::byte* heap = nullptr;
  transport::Link& link() { return *made.links[1 - me]; }
  void progress() { made.engine->progress(1 - me); }
  uint32_t seen(uint32_t sig) const {
    return static_cast<uint32_t>(own->signal(1 - me, sig).word.load(std::memory_order_acquire));
  }
  void wait_for(uint32_t sig, uint32_t number) {
    for (uint64_t polls = 0; seen(sig) != number; ++polls) {
      progress();
      if (polls % 4096 == 4095) must(link().check_peer());
    }
  }
  void put(uint64_t offset, const std::byte* src, size_t bytes) {
    transport::PostedPuts* const posts = link().posted_puts();
    for (uint64_t polls = 0;; ++polls) {
      Result<PutState> s = posts != nullptr ? posts->post(offset, src, bytes) : link().put(offset, src, bytes);
      must(s.status());
      if (*s == PutState::kDone) return;
      progress();
      if (polls % 4096 == 4095) must(link().check_peer());
    }
  }
  void drain() {
    transport::PostedPuts* const posts = link().posted_puts();
    while (posts != nullptr && !posts->taken(posts->posted())) progress();
  }
};

Rank connect(const transport::Network& network, uint32_t me, Peer peer) {
  Rank r{me, peer, *transport::shm::Segment::create({2, me, kStaging, 4096}, false), {}, nullptr};
  r.heap = static_cast<std::byte*>(mmap(nullptr, kStaging, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  transport::NetworkOptions o;
  o.rank = me;
  o.host_of = {0, 1};
  o.timeout_ms = 20'000;
  o.deadline = Deadline::after_ms(20'000);
  o.same_network = {true, true};
  o.encrypt = env().encrypt;
  auto endpoint = network.open(o);
  must(endpoint.status());
  const transport::Region regions[] = {{r.heap, kStaging, nullptr}};
  must((*endpoint)->register_memory(r.own->memory(me), regions));
  auto mine = (*endpoint)->offer();
  must(mine.status());
  std::vector<std::vector<std::byte>> offers(2);
  offers[1 - me] = peer.exchange(*mine);
  offers[me] = std::move(*mine);
  auto made = (*endpoint)->connect(r.own->memory(me), regions, offers);
  must(made.status());
  r.made = std::move(*made);
  peer.meet();
  r.made.engine->begin();
  // Two processes that poll on one core would measure the scheduler.
  if (std::thread::hardware_concurrency() >= 2) {
    cpu_set_t core;
    CPU_ZERO(&core);
    CPU_SET(me, &core);
    (void)sched_setaffinity(0, sizeof(core), &core);
  }
  return r;
}

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

uint32_t number = 0;  // of the last signal

// Rank 0 puts. Returns the rate in MB/s, until the last byte has arrived.
double rate(Rank& r, const std::byte* src, size_t bytes, uint32_t times) {
  double best = 0;
  for (int round = 0; round < 3; ++round) {
    ++number;
    r.peer.meet();
    const double start = now_us();
    if (r.me == 0) {
      for (uint32_t i = 0; i < times; ++i) r.put(i % 2 * kMost, src, bytes);
      must(r.link().signal(0, number, 0));
      r.wait_for(1, number);
      r.drain();
    } else {
      r.wait_for(0, number);
      must(r.link().signal(1, number, 0));
    }
    best = std::max(best, static_cast<double>(bytes) * times / (now_us() - start));
  }
  return best;
}

// Returns the median over batches, because a clock that is slow to read (an emulated machine's) must not be read each
// time. bytes: size of the put before each signal; 0: there is none.
double latency(Rank& r, uint32_t batches, size_t bytes) {
  constexpr uint32_t kBatch = 20;
  std::vector<double> times;
  for (uint32_t b = 0; b < batches; ++b) {
    const double start = now_us();
    for (uint32_t i = 0; i < kBatch; ++i) {
      ++number;
      if (r.me == 1) r.wait_for(2, number);
      if (bytes > 0) r.put(0, r.heap, bytes);
      must(r.link().signal(2, number, 0));
      if (r.me == 0) r.wait_for(2, number);
    }
    times.push_back((now_us() - start) / 2 / kBatch);
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

void check(Rank& r, const std::byte* src, size_t bytes) {
  ++number;
  if (r.me == 0) {
    r.put(kMost, src, bytes);
    must(r.link().signal(0, number, 0));
    r.wait_for(1, number);
    r.drain();
    return;
  }
  r.wait_for(0, number);
  if (std::memcmp(r.own->staging() + kMost, src, bytes) != 0) fail("wrong bytes");
  must(r.link().signal(1, number, 0));
}

}  // namespace

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const transport::Network* const network = argc > 1 ? transport::find_network(argv[1]) : nullptr;
  if (network == nullptr || (argc != 2 && argc != 4)) {
    std::string names;
    for (const transport::Network& known : transport::networks())
      names += (names.empty() ? "" : "|") + std::string(known.name);
    fail("usage: bench_link " + names + " [DEVICE0 DEVICE1]");
  }
  int up[2], down[2];
  if (pipe(up) != 0 || pipe(down) != 0) fail("no pipe");
  const pid_t child = fork();
  const uint32_t me = child == 0 ? 1 : 0;
  if (argc == 4) setenv("MOECCL_IB_HCA", (std::string("=") + argv[2 + me]).c_str(), 1);
  Rank r = connect(*network, me, me == 0 ? Peer{up[0], down[1]} : Peer{down[0], up[1]});
  std::vector<std::byte> other(kMost);
  for (size_t i = 0; i < kMost; ++i) other[i] = r.heap[i] = static_cast<std::byte>(i * 7 + i / 256);
  (void)latency(r, 10, 8);
  const double alone_us = latency(r, 100, 0), small_us = latency(r, 100, 8), page_us = latency(r, 100, 4096);
  if (me == 0) {
    std::printf("%s: signal alone: %.2f us\n%s: put of 8 bytes and signal: %.2f us\n", argv[1], alone_us, argv[1],
                small_us);
    std::printf("%s: put of 4096 bytes and signal: %.2f us\n%10s %14s %14s MB/s\n", argv[1], page_us, "bytes",
                "registered", "copied");
  }
  for (size_t bytes = 4 << 10; bytes <= kMost; bytes *= 4) {
    check(r, r.heap, bytes);
    check(r, other.data(), bytes);
    const auto times = static_cast<uint32_t>(std::clamp<size_t>((8u << 20) / bytes, 4, 1000));
    const double registered = rate(r, r.heap, bytes, times), copied = rate(r, other.data(), bytes, times);
    if (me == 0) std::printf("%10zu %14.1f %14.1f\n", bytes, registered, copied);
  }
  r.peer.meet();
  r.made.engine->end();
  r.made.engine = nullptr;
  if (me == 1) _exit(0);
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? 0 : 1;
}
