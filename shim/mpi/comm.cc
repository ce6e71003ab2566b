// SPDX-License-Identifier: Apache-2.0
#include "shim/mpi/comm.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "shim/mpi/below.h"
#include "shim/mpi/gpu.h"
#include "shim/mpi/join.h"
#include "shim/mpi/progress.h"

namespace moeccl::shim {
namespace {

struct State {
  std::mutex mutex;
  int keyval = MPI_KEYVAL_INVALID;
  std::set<Served*> live;  // owned: freed by MPI_Comm_free through the attribute, or by release_all()
};
State& state() {
  static auto* const s = new State;  // never destroyed: attributes are deleted at any time until MPI_Finalize ends
  return *s;
}

// Counts what was released, so that a thread notices when the communicator that it remembers may be gone.
std::atomic<uint64_t> n_released{0};
// Set by release_all(). What the attributes name is gone then, but while MPI_Finalize deletes the attributes of
// MPI_COMM_SELF, the program's own functions for that may call MPI on any communicator.
std::atomic<bool> leaving{false};

void release(Served* served) {
  {
    const std::lock_guard lock(state().mutex);
    if (state().live.erase(served) == 0) return;  // already released
  }
  n_released.fetch_add(1, std::memory_order_relaxed);
  if (served->comm != nullptr) leave(*served);
  delete served;
}

int on_delete(MPI_Comm, int, void* value, void*) {
  release(static_cast<Served*>(value));
  return MPI_SUCCESS;
}

bool running() {
  if (leaving.load(std::memory_order_acquire)) return false;  // released in release_all()
  int started = 0, ended = 0;
  PMPI_Initialized(&started);
  PMPI_Finalized(&ended);
  return started != 0 && ended == 0;
}

enum class Wish { kOn, kAlways, kOff };
Wish wish() {
  static const Wish wished = [] {
    const char* value = std::getenv("MOECCL_SHIM_MPI");
    if (value == nullptr || std::strcmp(value, "on") == 0) return Wish::kOn;
    if (std::strcmp(value, "always") == 0) return Wish::kAlways;
    if (std::strcmp(value, "off") == 0) return Wish::kOff;
    std::fprintf(stderr, "moeccl-mpi: MOECCL_SHIM_MPI=%s is not understood and ignored: give on, always or off\n",
                 value);
    return Wish::kOn;
  }();
  return wished;
}

// Taking a communicator over costs some milliseconds (docs/shims.md). A communicator that a program makes for a call or
// two would never earn them back. All ranks make the same calls on a communicator, so their counts agree. Calls that
// MPI refuses do not count, because one rank may try them alone.
constexpr uint32_t kCallsForMpi = 8;
// The communicator of the call that MPI now runs for this thread.
thread_local struct {
  Served* served;
  MPI_Comm comm;
} undecided;
thread_local int n_passing_on = 0;

// Returns the least of what the ranks give.
int least(MPI_Comm comm, int mine) {
  int out = 0;
  return mpi().Allreduce(&mine, &out, 1, MPI_INT, MPI_MIN, comm) == MPI_SUCCESS ? out : 0;
}

// Returns whether all ranks can meet: without an address, MoECCL's ranks meet on one host only. Collective.
bool reachable(MPI_Comm comm, int n_ranks) {
  MPI_Comm host = MPI_COMM_NULL;
  int here = 0;
  if (PMPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host) != MPI_SUCCESS) return false;
  PMPI_Comm_size(host, &here);
  PMPI_Comm_free(&host);
  return here == n_ranks || std::getenv("MOECCL_SOCKET_ADDR") != nullptr;
}

// With `mine` on each rank, returns whether MoECCL may serve comm. When only a GPU is in the way, the world's rank
// 0 says so once.
bool all_want(MPI_Comm comm, bool mine) {
  enum : int { kNo, kGpu, kYes };
  const bool gpu = wish() != Wish::kAlways && may_use_gpu();
  const int common = least(comm, !mine ? kNo : gpu ? kGpu : kYes);
  static std::once_flag once;
  int world_rank = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  if (common == kGpu && world_rank == 0 && !quiet()) {
    std::call_once(once, [] {
      std::fprintf(
          stderr,
          "moeccl-mpi: leaves communicators to MPI: a rank may use a GPU (CUDA's, ROCm's or Level Zero's driver is "
          "loaded, or its machine has a CUDA device), and this shim serves host memory only. For a program without "
          "device memory, hide the device (CUDA_VISIBLE_DEVICES=) or set MOECCL_SHIM_MPI=always; MOECCL_SHIM_QUIET=1 "
          "hides this line\n");
    });
  }
  return common == kYes;
}

// Collective over comm; every rank comes to the same result.
void connect(MPI_Comm comm, Served& served) {
  int between_groups = 0;
  PMPI_Comm_test_inter(comm, &between_groups);
  PMPI_Comm_size(comm, &served.n_ranks);
  PMPI_Comm_rank(comm, &served.rank);
  if (between_groups != 0 || served.n_ranks < 2) return;
  const bool near = reachable(comm, served.n_ranks);  // collective, so it is called whatever this rank wants
  if (all_want(comm, can_join() && wish() != Wish::kOff && near)) join(comm, served);
}

}  // namespace

bool quiet() {
  const char* value = std::getenv("MOECCL_SHIM_QUIET");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

bool all_agree(MPI_Comm comm, bool mine) { return least(comm, mine ? 1 : 0) == 1; }

int no_memory(const char* function, const std::exception& thrown) {
  std::fprintf(stderr, "moeccl-mpi: MPI_%s: the process has no memory left (%s)\n", function, thrown.what());
  PMPI_Comm_call_errhandler(MPI_COMM_WORLD, MPI_ERR_NO_MEM);
  return MPI_ERR_NO_MEM;
}

const Served* served_by_moeccl(MPI_Comm comm) {
  // The last answer holds until any communicator is freed, because MPI may give its handle to another one.
  thread_local struct {
    MPI_Comm comm = MPI_COMM_NULL;
    const Served* served = nullptr;
    uint64_t n_released = 0;
  } last;
  if (comm == MPI_COMM_NULL) return nullptr;
  // Relaxed: MPI forbids freeing a communicator while a thread calls on it, so the program has ordered the two.
  const uint64_t released = n_released.load(std::memory_order_relaxed);
  if (last.comm == comm && last.n_released == released) return last.served;
  if (!running()) return nullptr;
  {
    const std::lock_guard lock(state().mutex);
    if (state().keyval == MPI_KEYVAL_INVALID &&
        // A duplicate of a communicator needs a MoECCL communicator of its own, so attributes are not copied.
        PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, on_delete, &state().keyval, nullptr) != MPI_SUCCESS) {
      return nullptr;
    }
  }
  void* value = nullptr;
  int found = 0;
  if (PMPI_Comm_get_attr(comm, state().keyval, &value, &found) != MPI_SUCCESS) return nullptr;
  auto* served = static_cast<Served*>(value);
  if (found == 0) {
    served = new Served;
    {
      const std::lock_guard lock(state().mutex);
      state().live.insert(served);
    }
    if (PMPI_Comm_set_attr(comm, state().keyval, served) != MPI_SUCCESS) {
      release(served);
      return nullptr;
    }
  }
  if (!served->decided) {
    if (wish() != Wish::kAlways) {
      undecided = {served, comm};
      return nullptr;
    }
    served->decided = true;
    connect(comm, *served);
  }
  last = {comm, served->comm != nullptr ? served : nullptr, released};
  return last.served;
}

PassingOn::PassingOn() { ++n_passing_on; }
PassingOn::~PassingOn() { --n_passing_on; }
bool PassingOn::here() { return n_passing_on != 0; }

void call_begins() { undecided = {}; }

void call_succeeded() {
  const auto call = std::exchange(undecided, {});
  if (call.served == nullptr || ++call.served->calls < kCallsForMpi) return;
  call.served->decided = true;
  connect(call.comm, *call.served);
}

void release_all() {
  leaving.store(true, std::memory_order_release);  // acquired in running()
  std::set<Served*> all;
  {
    const std::lock_guard lock(state().mutex);
    all = state().live;
  }
  for (Served* served : all) release(served);
  end_progress();
}

}  // namespace moeccl::shim
