// What a link of the network that MOECCL_NET names moves between the two hosts of tools/rdma-vm, without plans and
// without the executor: tests/rdma/rates compares it with rdma-core's own programs.
//   link_rates bandwidth BYTES N    MB/s of N puts of BYTES, from the first until all have come; MB = 2^20 as perftest
//   counts link_rates latency BYTES N      microseconds of a put of BYTES with its signal, half of a round trip, the
//   median of N
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "tests/support/hosts.h"
#include "transport/shm/segment.h"
#include "transport/transport.h"

namespace moeccl {
namespace {

using transport::PutState;

constexpr uint64_t kStaging = 16 << 20;
constexpr int kLimitMs = 60'000;
constexpr uint32_t kSignal = 1;

// What the two processes tell each other beside the network.
struct Meeting {
  std::atomic<int> arrived;
  size_t offer_bytes[2];
  std::byte offers[2][1 << 16];
};

[[noreturn]] void fail(const std::string& why) {
  fprintf(stderr, "link_rates: %s\n", why.c_str());
  _exit(1);
}

class Rank {
 public:
  Rank(const transport::Network& network, uint32_t rank, Meeting& meeting) : rank_(rank), meeting_(meeting) {
    transport::NetworkOptions o;
    o.rank = rank;
    o.host_of = {0, 1};
    o.key[0] = std::byte{42};
    o.timeout_ms = kLimitMs;
    o.deadline = Deadline::after_ms(kLimitMs);
    auto segment = transport::shm::Segment::create({2, rank, kStaging, 4096}, false);
    if (!segment.ok()) fail(std::string(segment.status().message()));
    segment_ = std::move(*segment);
    auto endpoint = network.open(o);
    if (!endpoint.ok()) fail(std::string(endpoint.status().message()));
    if (const Status s = (*endpoint)->register_memory(segment_->memory(rank), {}); !s.ok())
      fail(std::string(s.message()));
    auto offer = (*endpoint)->offer();
    if (!offer.ok() || offer->size() > sizeof(meeting.offers[0])) fail("no offer");
    meeting.offer_bytes[rank] = offer->size();
    std::memcpy(meeting.offers[rank], offer->data(), offer->size());
    meet();
    std::vector<std::vector<std::byte>> offers;
    for (int r = 0; r < 2; ++r) offers.emplace_back(meeting.offers[r], meeting.offers[r] + meeting.offer_bytes[r]);
    auto links = (*endpoint)->connect(segment_->memory(rank), {}, offers);
    if (!links.ok()) fail(std::string(links.status().message()));
    links_ = std::move(*links);
    meet();
    if (links_.engine != nullptr) links_.engine->begin();
  }
  ~Rank() {
    meet();
    if (links_.engine != nullptr) links_.engine->end();
  }

  void put(uint64_t offset, const void* src, size_t bytes) {
    until("a put", [&] {
      const Result<PutState> state = link().put(offset, src, bytes);
      if (!state.ok()) fail(std::string(state.status().message()));
      return *state == PutState::kDone;
    });
  }
  // As the executor does it where it can: the source stays as it is, so that one put need not wait for another.
  void post(uint64_t offset, const void* src, size_t bytes) {
    transport::PostedPuts* posted = link().posted_puts();
    if (posted == nullptr) return put(offset, src, bytes);
    until("a put", [&] {
      const Result<PutState> state = posted->post(offset, src, bytes);
      if (!state.ok()) fail(std::string(state.status().message()));
      return *state == PutState::kDone;
    });
  }
  void signal() {
    const Status status = link().signal(kSignal, ++sent_, 0);
    if (!status.ok()) fail(std::string(status.message()));
  }
  void wait_signal() {
    ++received_;
    const auto& word = segment_->signal(1 - rank_, kSignal).word;
    until("a signal", [&] { return static_cast<uint32_t>(word.load(std::memory_order_acquire)) == received_; });
  }

 private:
  transport::Link& link() { return *links_.links[1 - rank_]; }
  void until(const char* what, const std::function<bool()>& done) {
    const Deadline limit = Deadline::after_ms(kLimitMs);
    for (uint32_t n = 1; !done(); ++n) {
      if (links_.engine != nullptr) links_.engine->progress(1 - rank_);
      if (n % 4096 != 0) continue;
      if (const Status status = link().check_peer(); !status.ok()) fail(std::string(status.message()));
      if (limit.passed()) fail(std::string(what) + " does not end");
    }
  }
  // Both are here.
  void meet() {
    const int round = meeting_.arrived.fetch_add(1) / 2;
    for (int ms = 0; meeting_.arrived.load() < 2 * (round + 1); ++ms) {
      if (ms > kLimitMs) fail("the other host does not come");
      usleep(1000);
    }
  }

  uint32_t rank_, sent_ = 0, received_ = 0;
  Meeting& meeting_;
  std::shared_ptr<transport::shm::Segment> segment_;
  transport::NetworkLinks links_;
};

void bandwidth(Rank& me, uint32_t rank, size_t bytes, int n) {
  // As far behind one another as the staging allows, so that a put that arrives finds cold memory as data does.
  const size_t slots = std::max<size_t>(1, std::min<size_t>(kStaging / bytes, 16));
  const std::vector<std::byte> source(slots * bytes, std::byte{7});
  for (int round = 0; round < 2; ++round) {  // the first warms up
    const int puts = round == 0 ? std::max(1, n / 10) : n;
    if (rank == 1) {
      me.wait_signal();
      me.signal();
      continue;
    }
    const int64_t start = now_ns();
    for (int i = 0; i < puts; ++i) {
      const size_t at = static_cast<size_t>(i) % slots * bytes;
      me.post(at, source.data() + at, bytes);
    }
    me.signal();
    me.wait_signal();  // the other has all: what perftest's last completion says
    if (round == 0) continue;
    const double seconds = static_cast<double>(now_ns() - start) * 1e-9;
    printf("%.2f\n", static_cast<double>(bytes) * puts / seconds / (1 << 20));
  }
}

void latency(Rank& me, uint32_t rank, size_t bytes, int n) {
  const std::vector<std::byte> source(bytes, std::byte{7});
  std::vector<double> us;
  for (int i = -n / 10; i < n; ++i) {
    const int64_t start = now_ns();
    if (rank == 1) me.wait_signal();
    me.put(0, source.data(), bytes);
    me.signal();
    if (rank == 0) me.wait_signal();
    if (i >= 0) us.push_back(static_cast<double>(now_ns() - start) / 2000);
  }
  std::nth_element(us.begin(), us.begin() + n / 2, us.end());
  if (rank == 0) printf("%.2f\n", us[static_cast<size_t>(n / 2)]);
}

int run(const transport::Network& network, bool is_bandwidth, size_t bytes, int n) {
  std::string why;
  const auto hosts = testing::TestHosts::create({.weights = {1, 1}}, &why);
  if (hosts == nullptr) fail(why);
  void* shared = mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) fail("no memory");
  auto* meeting = new (shared) Meeting();
  for (uint32_t rank = 0; rank < 2; ++rank) {
    if (fork() != 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (!hosts->enter(static_cast<int>(rank))) fail("no such host");
    {
      Rank me(network, rank, *meeting);
      (is_bandwidth ? bandwidth : latency)(me, rank, bytes, n);
    }
    fflush(stdout);
    _exit(0);
  }
  int failed = 0;
  for (int status; wait(&status) > 0;) {
    if (WIFSIGNALED(status)) fprintf(stderr, "link_rates: a rank ended with signal %d\n", WTERMSIG(status));
    failed += status != 0;
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace moeccl

int main(int argc, char** argv) {
  const char* name = getenv("MOECCL_NET");
  const auto* network = moeccl::transport::find_network(name != nullptr ? name : "tcp");
  const std::string what = argc == 4 ? argv[1] : "";
  if (network == nullptr || (what != "bandwidth" && what != "latency")) {
    fprintf(stderr, "usage: MOECCL_NET=NETWORK link_rates bandwidth|latency BYTES N\n");
    return 2;
  }
  const long bytes = atol(argv[2]), n = atol(argv[3]);
  if (bytes < 1 || bytes > (8 << 20) || n < 10) moeccl::fail("1 byte to 8 MiB, and 10 times or more");
  return moeccl::run(*network, what == "bandwidth", static_cast<size_t>(bytes), static_cast<int>(n));
}
