// SPDX-License-Identifier: Apache-2.0
#include "shim/mpi/join.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "shim/mpi/progress.h"
#include "src/base/blocked_signals.h"
#include "src/base/shim_requests.h"

namespace moeccl::shim {
namespace {

void announce(const Served& served) {
  static std::once_flag once;
  if (!gives_notices()) return;
  std::call_once(once, [&] {
    int v = 0;
    (void)moecclGetVersion(&v);
    std::fprintf(
        stderr,
        "moeccl-mpi: MoECCL %d.%d.%d has taken over Allreduce, Reduce, Reduce_scatter_block, Bcast, Allgather, "
        "Alltoall and Alltoallv (%d ranks); MOECCL_SHIM_MPI=off leaves them to MPI, MOECCL_SHIM_QUIET=1 hides "
        "this line\n",
        v / 10000, v / 100 % 100, v % 100, served.n_ranks);
  });
}

// The default staging is 16 MiB on each rank, which suits one communicator. Programs make others for rows, columns and
// libraries. With this size, Bcasts of 8 MiB and more took up to a third longer there, and AllReduces no longer.
constexpr uint64_t kLaterStaging = uint64_t{4} << 20;
std::atomic<int> n_full{0};  // communicators of this process that have the default
// A communicator costs each rank memory and connections, so a process has at most these, and after a failure, which the
// next one would share, no more.
constexpr int kMostJoined = 16;
std::atomic<int> n_joined{0};
std::atomic<bool> failed{false};
// Taking a communicator over costs up to 20 ms where ranks share cores, and a served call saves some microseconds: so
// many calls earn it back. A rank that waits for as many calls first loses no more than it would by a useless join.
constexpr uint32_t kEarns = 1024;
std::atomic<uint32_t> calls_before{kCallsForMpi};

// What rank 0 tells the others of a communicator.
struct Invitation {
  moecclUniqueId id = {};
  uint64_t staging_bytes = 0;  // 0: the default
};

// MPI sets no limit to waiting, so MoECCL does only where the user asks for one.
ShimConfig config_of(const Invitation& invitation) {
  ShimConfig config;
  if (variable("MOECCL_TIMEOUT_MS").empty()) config.config.timeout_ms = INT32_MAX;
  config.config.staging_bytes = invitation.staging_bytes;
  return config;
}

// A thread that has ended when this object has. If an exception ends this object first, it cancels the thread's call.
class Joined {
 public:
  Joined(std::thread thread, std::atomic<bool>& cancelled) : thread_(std::move(thread)), cancelled_(cancelled) {}
  ~Joined() {
    cancelled_ = true;
    thread_.join();
  }
  Joined(const Joined&) = delete;
  Joined& operator=(const Joined&) = delete;

 private:
  std::thread thread_;
  std::atomic<bool>& cancelled_;
};

std::thread start_without_signals(const std::function<void()>& body) {
  const BlockedSignals blocked;
  return std::thread(body);
}

// Returns the reason why not, or nothing. In a group of the calling thread's, MoECCL would only queue the call, so
// another thread makes it. This one lets MPI work meanwhile: the invitation may still be on its way to a rank.
std::string init(Served& served, const Invitation& invitation) {
  ShimConfig config = config_of(invitation);
  std::atomic<bool> ended{false}, cancelled{false};
  config.cancelled = &cancelled;
  constexpr std::chrono::microseconds kLongNap{320};
  std::string why;
  try {
    served.layout.reset(new size_t[4 * static_cast<size_t>(served.n_ranks)]);
    const auto work = [&] {
      if (moecclCommInitRankConfig(&served.comm, served.n_ranks, invitation.id, served.rank, &config.config) !=
          moecclSuccess) {
        why = moecclGetLastError(nullptr);
      }
      ended.store(true, std::memory_order_release);  // acquired below
    };
    const Joined thread(start_without_signals(work), cancelled);
    // The thread may need this core.
    for (std::chrono::microseconds nap{20}; !ended.load(std::memory_order_acquire); nap = std::min(2 * nap, kLongNap)) {
      progress();
      std::this_thread::sleep_for(nap);
    }
  } catch (const std::exception& e) {
    why = std::string("no memory or no thread: ") + e.what();
  }
  return why;
}

}  // namespace

uint32_t patience() { return calls_before.load(); }

bool can_join() { return n_joined.load() < kMostJoined && !failed.load(); }

void join(MPI_Comm comm, Served& served) {
  Invitation invitation;
  std::string why;
  if (served.rank == 0 && moecclGetUniqueId(&invitation.id) != moecclSuccess) why = moecclGetLastError(nullptr);
  bool good = all_agree(comm, why.empty());
  if (good) {
    if (n_full.load() > 0 && variable("MOECCL_STAGING_BYTES").empty()) invitation.staging_bytes = kLaterStaging;
    mpi().Bcast(&invitation, sizeof invitation, MPI_BYTE, 0, comm);
    why = init(served, invitation);
    good = all_agree(comm, why.empty());
  }
  if (!why.empty()) {
    std::fprintf(stderr, "moeccl-mpi: leaves a communicator, and all that its ranks make later, to MPI: %s\n",
                 why.c_str());
  }
  if (!good) {
    failed = true;
    if (served.comm != nullptr) (void)moecclCommDestroy(std::exchange(served.comm, nullptr));
    return;
  }
  served.full_staging = invitation.staging_bytes == 0;
  if (served.full_staging) ++n_full;
  ++n_joined;
  announce(served);
}

void leave(Served& served) {
  calls_before = served.earned >= kEarns ? kCallsForMpi : std::min(2 * calls_before.load(), kEarns);
  if (served.full_staging) --n_full;
  --n_joined;
  (void)moecclCommDestroy(std::exchange(served.comm, nullptr));
}

}  // namespace moeccl::shim
