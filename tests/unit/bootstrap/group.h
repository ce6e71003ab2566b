// SPDX-License-Identifier: Apache-2.0
// Ranks for bootstrap tests: threads, or forked children that are always reaped.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "src/base/clock.h"
#include "src/base/random.h"
#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/handshake.h"
#include "src/driver/socket.h"
#include "tests/support/sockets.h"
#include "tests/support/timing.h"

namespace moeccl::bootstrap {

using tests::patient_ms;
using tests::Stopwatch;

inline std::unique_ptr<Root> start_root(int64_t timeout_ms = patient_ms(20'000), const std::string& socket_addr = "") {
  RootOptions options;
  options.timeout_ms = timeout_ms;
  options.socket_addr = socket_addr;
  Result<std::unique_ptr<Root>> root = Root::start(options);
  EXPECT_TRUE(root.ok()) << root.status().message();
  return root.ok() ? std::move(*root) : nullptr;
}

inline std::pair<Fd, Fd> make_pair_of_sockets() {
  Result<std::pair<Fd, Fd>> pair = tests::socket_pair();
  EXPECT_TRUE(pair.ok()) << pair.status().message();
  return std::move(*pair);
}

// The server's side over a connected socket. Blocks.
inline Result<Authenticated> server_handshake(int fd, const Key& key, const Party& self, Role expected,
                                              Deadline deadline) {
  Nonce nonce;
  MOECCL_TRY(random_bytes(nonce.data(), nonce.size()));
  ServerHandshake server(key, self, nonce);
  HandshakeFrame frame;
  MOECCL_TRY(driver::recv_exact(fd, frame, deadline));
  const ServerHandshake::Answer answer = server.on_hello(frame, expected);
  if (answer.verdict == ServerHandshake::Verdict::kStranger) {
    return Status(moecclInvalidUsage, "a stranger without the key tried to connect");
  }
  MOECCL_TRY(driver::send_all(fd, answer.reply, deadline));
  if (answer.verdict == ServerHandshake::Verdict::kSkew) {
    return error(moecclUnsupported, "the other side speaks {}, this rank {}: use one version on all ranks",
                 version_text(server.result().peer), version_text(self));
  }
  MOECCL_TRY(driver::recv_exact(fd, frame, deadline));
  if (!server.on_proof(frame)) return Status(moecclInvalidUsage, "a stranger failed to prove that it holds the key");
  return server.result();
}

// Runs one thread for each rank and returns their results.
inline std::vector<Status> run_threads(int n_ranks, const std::function<Status(int rank)>& body) {
  std::vector<Status> results(static_cast<size_t>(n_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n_ranks; ++rank) {
    threads.emplace_back([&, rank] { results[static_cast<size_t>(rank)] = body(rank); });
  }
  for (std::thread& t : threads) t.join();
  return results;
}

// Children that run `body` and exit with its result. They are killed when this object is destroyed.
class Children {
 public:
  ~Children() {
    for (const pid_t pid : pids_) {
      if (pid > 0) ::kill(pid, SIGKILL);
    }
    for (size_t i = 0; i < pids_.size(); ++i) wait(i, 5000);
  }
  void start(const std::function<int()>& body) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::alarm(static_cast<unsigned>(patient_ms(60)));  // an orphan does not stay
      ::_exit(body());
    }
    pids_.push_back(pid);
  }
  pid_t pid(size_t i) const { return pids_[i]; }
  void kill(size_t i) { ::kill(pids_[i], SIGKILL); }
  // Returns the exit code, or -1 for a death by signal or at the timeout.
  int wait(size_t i, int64_t ms = patient_ms(30'000)) {
    if (pids_[i] <= 0) return -1;
    const Deadline deadline = Deadline::after_ms(ms);
    int state = 0;
    while (::waitpid(pids_[i], &state, WNOHANG) == 0) {
      if (deadline.passed()) return -1;
      ::usleep(1000);
    }
    pids_[i] = 0;
    return WIFEXITED(state) ? WEXITSTATUS(state) : -1;
  }
  size_t size() const { return pids_.size(); }

 private:
  std::vector<pid_t> pids_;
};

inline std::vector<std::byte> blob_of(int rank, size_t n_bytes) {
  std::vector<std::byte> blob(n_bytes);
  for (size_t i = 0; i < n_bytes; ++i) blob[i] = static_cast<std::byte>((static_cast<size_t>(rank) * 31 + i) & 0xff);
  return blob;
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Waits until `done` is true, but at most `ms`. Returns its last value.
inline bool eventually(const std::function<bool()>& done, int64_t ms = patient_ms(5000)) {
  const Deadline deadline = Deadline::after_ms(ms);
  while (!done()) {
    if (deadline.passed()) return false;
    ::usleep(1000);
  }
  return true;
}

}  // namespace moeccl::bootstrap
