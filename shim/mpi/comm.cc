// SPDX-License-Identifier: Apache-2.0
#include "shim/mpi/comm.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>

#include "shim/mpi/gpu.h"
#include "shim/mpi/join.h"
#include "shim/mpi/progress.h"

namespace moeccl::shim {
namespace {

struct State {
  std::mutex mutex;
  int keyval = MPI_KEYVAL_INVALID;
  int end_keyval = MPI_KEYVAL_INVALID;
  std::set<Served*> live;  // owned: freed by MPI_Comm_free through the attribute, or by release_all()
};
State& state() {
  static auto* const s = new State;  // never destroyed: attributes are deleted at any time until MPI_Finalize ends
  return *s;
}
const moecclMpiBelow* own = nullptr;

// Counts what was released, so that a thread notices when the communicator that it remembers may be gone.
std::atomic<uint64_t> n_released{0};
// Set by release_all(). What the attributes name is gone then, but the program's own functions for attributes may still
// call MPI on any communicator.
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

int on_delete(MPI_Comm, int, void* value, void*) {
  release(static_cast<Served*>(value));
  return MPI_SUCCESS;
}
int on_end(MPI_Comm, int, void*, void*) {
  release_all();
  return MPI_SUCCESS;
}

// Makes the attribute of communicators, and lets MPI_Finalize end everything: it begins with the attributes of
// MPI_COMM_SELF, the latest first. What a program has set there after its first collective still finds all
// communicators served as before; on another rank, the same call may come before MPI_Finalize. Copies nothing: a
// duplicate of a communicator needs a MoECCL communicator of its own.
bool make_keys(State& s) {
  return PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, on_end, &s.end_keyval, nullptr) == MPI_SUCCESS &&
         PMPI_Comm_set_attr(MPI_COMM_SELF, s.end_keyval, nullptr) == MPI_SUCCESS &&
         PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, on_delete, &s.keyval, nullptr) == MPI_SUCCESS;
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
    const std::string_view value = variable("MOECCL_SHIM_MPI");
    if (value.empty() || value == "on") return Wish::kOn;
    if (value == "always") return Wish::kAlways;
    if (value == "off") return Wish::kOff;
    std::fprintf(stderr, "moeccl-mpi: MOECCL_SHIM_MPI=%s is not understood and ignored: give on, always or off\n",
                 value.data());
    return Wish::kOn;
  }();
  return wished;
}

// Tells this host from others: FNV-1a of its name and of the number of its boot.
uint64_t this_host() {
  char text[512] = "";
  (void)gethostname(text, 256);
  if (std::FILE* boot = std::fopen("/proc/sys/kernel/random/boot_id", "r"); boot != nullptr) {
    (void)!std::fgets(text + std::strlen(text), 64, boot);
    std::fclose(boot);
  }
  uint64_t h = 14695981039346656037u;
  for (const char* c = text; *c != '\0'; ++c) h = (h ^ static_cast<unsigned char>(*c)) * 1099511628211u;
  return h;
}

// Returns after how many calls MoECCL serves comm, or nothing if a rank does not want it to, or if the ranks cannot
// meet: without an address, MoECCL's ranks meet on one host only. When only a GPU is in the way, the world's rank 0
// says so once. Collective. Makes no communicator of MPI's, because other threads of the program may be making theirs.
std::optional<uint32_t> all_want(MPI_Comm comm) {
  enum : uint64_t { kNo, kGpu, kYes };
  const bool mine = can_join() && wish() != Wish::kOff;
  const bool gpu = wish() != Wish::kAlways && may_use_gpu();
  const uint64_t host = this_host(), after = wish() == Wish::kAlways ? 0 : patience();
  const uint64_t in[] = {!mine ? kNo
                         : gpu ? kGpu
                               : kYes,
                         variable("MOECCL_SOCKET_ADDR").empty() ? 0u : 1u, host, ~host, ~after};
  uint64_t least[5] = {};
  if (mpi().Allreduce(in, least, 5, MPI_UINT64_T, MPI_MIN, comm) != MPI_SUCCESS) return {};
  if (least[2] != ~least[3] && least[1] == 0) return {};
  static std::once_flag once;
  if (least[0] == kGpu && gives_notices()) {
    std::call_once(once, [] {
      std::fprintf(
          stderr,
          "moeccl-mpi: leaves communicators to MPI: a rank may use a GPU (CUDA's, ROCm's or Level Zero's driver is "
          "loaded, or its machine has a CUDA device), and this shim serves host memory only. For a program without "
          "device memory, hide the device (CUDA_VISIBLE_DEVICES=) or set MOECCL_SHIM_MPI=always; MOECCL_SHIM_QUIET=1 "
          "hides this line\n");
    });
  }
  if (least[0] != kYes) return {};
  return static_cast<uint32_t>(~least[4]);  // the largest of the ranks' numbers
}

// Collective over comm; every rank comes to the same result.
void connect(MPI_Comm comm, Served& served) {
  served.decided = true;
  int between_groups = 0;
  PMPI_Comm_test_inter(comm, &between_groups);
  PMPI_Comm_size(comm, &served.n_ranks);
  PMPI_Comm_rank(comm, &served.rank);
  if (between_groups != 0 || served.n_ranks == 1) return;
  const std::optional<uint32_t> after = all_want(comm);
  if (!after.has_value()) return;
  served.decided = served.calls >= *after;
  served.ask_at = *after;
  if (served.decided) join(comm, served);
}

}  // namespace

void use_mpi(const moecclMpiBelow& after_pmpi) { own = &after_pmpi; }

const moecclMpiBelow& mpi() { return *own; }

bool gives_notices() {
  int world_rank = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  return world_rank == 0 && variable("MOECCL_SHIM_QUIET") != "1";
}

bool all_agree(MPI_Comm comm, bool mine) {
  const int in = mine ? 1 : 0;
  int least = 0;
  return mpi().Allreduce(&in, &least, 1, MPI_INT, MPI_MIN, comm) == MPI_SUCCESS && least == 1;
}

int no_memory(const char* function, const std::exception& thrown) {
  std::fprintf(stderr, "moeccl-mpi: MPI_%s: the process has no memory left (%s)\n", function, thrown.what());
  PMPI_Comm_call_errhandler(MPI_COMM_WORLD, MPI_ERR_NO_MEM);
  return MPI_ERR_NO_MEM;
}

Served* find(MPI_Comm comm) {
  // The last answer holds until any communicator is freed, because MPI may give its handle to another one.
  thread_local struct {
    MPI_Comm comm = MPI_COMM_NULL;
    Served* served = nullptr;
    uint64_t n_released = 0;
  } last;
  if (comm == MPI_COMM_NULL) return nullptr;
  // Relaxed: MPI forbids freeing a communicator while a thread calls on it, so the program has ordered the two.
  const uint64_t released = n_released.load(std::memory_order_relaxed);
  if (last.comm == comm && last.n_released == released) return last.served;
  if (!running()) return nullptr;
  State& s = state();
  {
    const std::lock_guard lock(s.mutex);
    if (s.keyval == MPI_KEYVAL_INVALID && !make_keys(s)) return nullptr;
  }
  void* value = nullptr;
  int found = 0;
  if (PMPI_Comm_get_attr(comm, s.keyval, &value, &found) != MPI_SUCCESS) return nullptr;
  auto* served = static_cast<Served*>(value);
  if (found == 0) {
    served = new Served;
    served->ask_at = kCallsForMpi;
    {
      const std::lock_guard lock(s.mutex);
      s.live.insert(served);
    }
    if (PMPI_Comm_set_attr(comm, s.keyval, served) != MPI_SUCCESS) {
      release(served);
      return nullptr;
    }
  }
  if (!served->decided && wish() == Wish::kAlways) connect(comm, *served);
  last = {comm, served, released};
  return served;
}

void served_by_mpi(Served& served, const char* function, MPI_Comm comm, int code) {
  if (code != MPI_SUCCESS) {
    // A rank whose buffer was too small took part in a call that succeeded on the others. Open MPI returns the same
    // from Alltoall and Alltoallv before they begin, if a rank's own block has two sizes.
    int kind = MPI_SUCCESS;
    PMPI_Error_class(code, &kind);
    if (kind != MPI_ERR_TRUNCATE || std::string_view(function).starts_with("Alltoall")) return;
    const std::lock_guard lock(state().mutex);
    if (!state().live.contains(&served)) return;  // the error handler has freed the communicator
  }
  if (++served.calls >= served.ask_at) connect(comm, served);
}

}  // namespace moeccl::shim
