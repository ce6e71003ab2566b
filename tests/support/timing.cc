// SPDX-License-Identifier: Apache-2.0
#include "tests/support/timing.h"

#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace moeccl::tests {
namespace {

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

// The helper process of a test. It lives from before main, when there are no threads yet, until the test's process
// ends.
class Meter {
 public:
  Meter() {
    void* page = mmap(nullptr, sizeof(*late_ns_), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return;
    late_ns_ = new (page) std::atomic<int64_t>(0);
    const pid_t test = getpid();
    if (fork() != 0) return;  // when fork fails there is no meter, and nothing counts as late
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int fd = 0; fd < 64; ++fd) close(fd);  // readers of the test's output wait for its end
    while (getppid() == test) {
      constexpr int64_t kNapNs = 2'000'000;
      const int64_t before = now_ns();
      const timespec t{0, kNapNs};
      nanosleep(&t, nullptr);
      const int64_t late = now_ns() - before - kNapNs;
      if (late > 1'000'000) late_ns_->fetch_add(late, std::memory_order_relaxed);
    }
    _exit(0);
  }
  int64_t late_ns() const { return late_ns_ == nullptr ? 0 : late_ns_->load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t>* late_ns_ = nullptr;
};
const Meter meter;

}  // namespace

int64_t now_ms() { return now_ns() / 1'000'000; }
int64_t fair_now_ms() { return (now_ns() - meter.late_ns()) / 1'000'000; }

bool sanitized() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return true;
#else
  return false;
#endif
}

double patience() {
  const char* text = getenv("MOECCL_TEST_PATIENCE");
  const double asked = text == nullptr ? 1.0 : atof(text);
  return (asked >= 1 ? asked : 1.0) * (sanitized() ? 5.0 : 1.0);
}
int64_t patient_ms(int64_t limit_ms) { return static_cast<int64_t>(static_cast<double>(limit_ms) * patience()); }
int32_t capped_ms(int32_t timeout_ms) {
  const char* text = getenv("MOECCL_TIMEOUT_MS");
  const int cap = text == nullptr ? 0 : atoi(text);
  return cap > 0 && cap < timeout_ms ? cap : timeout_ms;
}

int free_port() {
  // 20000..32767 is below Linux's ephemeral ports (32768..60999).
  for (uint64_t i = static_cast<uint64_t>(now_ns()) / 1000 + static_cast<uint64_t>(getpid()) * 7919;; i += 101) {
    const int port = 20'000 + static_cast<int>(i % 12'768);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    const bool free = bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    close(fd);
    if (free) return port;
  }
}

}  // namespace moeccl::tests
