// SPDX-License-Identifier: Apache-2.0
// Puts whose bytes their peer has to fetch.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "shim/nccl/device.h"
#include "shim/nccl/rma_board.h"
#include "shim/nccl/settings.h"

namespace moeccl::shim {

// A forked child has ranks of its own: its parent's are not its to fetch for, and their mutex may be held for ever. No
// object is destroyed, because communicators may end after the program's own objects.
RanksHere& ranks_here() {
  static std::atomic<RanksHere*> ranks{nullptr};
  RanksHere* now = ranks.load(std::memory_order_acquire);  // pairs with the release below
  while (now == nullptr || now->process != getpid()) {
    auto made = std::make_unique<RanksHere>();
    if (ranks.compare_exchange_strong(now, made.get(), std::memory_order_release, std::memory_order_acquire))
      now = made.release();
  }
  return *now;
}

// Leaves a parcel for the peer. *posted stays false when the peer has too many already. Called under the lock.
ncclResult_t Rma::post(const Put& put, Peer& peer, bool* posted) {
  From& box = of(*peer.board, rank_);
  const uint64_t n = box.posted.load(std::memory_order_relaxed);
  const uint64_t fetched = box.fetched.load(std::memory_order_acquire);  // released in fetch()
  while (peer.closed < fetched) {
    close(peer.files.front());
    peer.files.erase(peer.files.begin());
    ++peer.closed;
  }
  if (n - fetched == kParcels) return ncclSuccess;
  const int file = memfd_create("moeccl-shim-put", MFD_CLOEXEC);
  bool good = file >= 0 && fchmod(file, 0600) == 0;
  for (size_t done = 0; good && done < put.n_bytes;) {
    const ssize_t went = ::write(file, static_cast<const char*>(put.bytes) + done, put.n_bytes - done);
    if (went < 0 && errno == EINTR) continue;
    good = went > 0;
    if (good) done += static_cast<size_t>(went);
  }
  if (!good) {
    const std::string why = std::strerror(errno);
    if (file >= 0) close(file);
    return fail(ncclSystemError, std::string(put.function) + ": " + std::to_string(put.n_bytes) + " bytes for " +
                                     rank_text(put.peer) + " find no memory (memfd_create): " + why);
  }
  peer.files.push_back(file);
  box.parcels[n % kParcels] = {put.window, file, put.offset, put.n_bytes};
  box.posted.store(n + 1, std::memory_order_release);  // acquired in fetch()
  *posted = true;
  return ncclSuccess;
}

// Copies one parcel into its window; *text says what went wrong. Called under the lock.
ncclResult_t Rma::take(uint64_t number, int from, std::string* text) {
  const From::Parcel p = of(*board_, from).parcels[number % kParcels];
  const Board::Window* w = board_->find(p.window);
  const uint64_t bytes = w != nullptr ? w->bytes.load(std::memory_order_relaxed) : 0;
  const bool fits = w != nullptr && p.offset <= bytes && p.bytes <= bytes - p.offset;
  *text = "ncclWaitSignal: " + std::to_string(p.bytes) + " bytes of " + rank_text(from);
  if (!fits) {
    *text += " were for a window that was deregistered";
    return ncclInvalidUsage;
  }
  const Door& door = peers_[static_cast<size_t>(from)]->door;
  const std::string path = "/proc/" + std::to_string(door.pid) + "/fd/" + std::to_string(p.file);
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool on_device = w->on_device.load(std::memory_order_relaxed) != 0;
  auto* target = reinterpret_cast<char*>(w->address.load(std::memory_order_relaxed) + p.offset);
  std::vector<char> for_device(on_device ? p.bytes : 0);
  char* to = on_device ? for_device.data() : target;
  uint64_t done = 0;
  while (file >= 0 && done < p.bytes) {
    const ssize_t went = pread(file, to + done, p.bytes - done, static_cast<off_t>(done));
    if (went < 0 && errno == EINTR) continue;
    if (went <= 0) break;
    done += static_cast<uint64_t>(went);
  }
  if (file >= 0) close(file);
  if (file < 0 || done < p.bytes) {
    *text += " cannot be fetched: its process has ended or freed its communicator too early";
    return ncclRemoteError;
  }
  // The thread that fetches may use another device, or serve ranks of several.
  const device::Current on(on_device ? device_ : -1);
  if (!for_device.empty() && !(on.ok() && device::put(target, to, p.bytes, nullptr))) {
    *text += " cannot be copied into a window on the device";
    return ncclUnhandledCudaError;
  }
  return ncclSuccess;
}

// Fetches what rank `from` has left here, before its signals are reported. A parcel that cannot be fetched is dropped,
// or else stays for the wait that wants it, which reports the failure.
ncclResult_t Rma::fetch(int from, bool drops) {
  From& box = of(*board_, from);
  const std::lock_guard lock(mutex_);
  uint64_t n = box.fetched.load(std::memory_order_relaxed);
  for (; n < box.posted.load(std::memory_order_acquire); ++n) {  // released in post()
    std::string text;
    const ncclResult_t result = take(n, from, &text);
    if (result != ncclSuccess && !drops) return result;
    box.fetched.store(n + 1, std::memory_order_release);  // acquired in post()
    if (result != ncclSuccess) return fail(result, text);
  }
  return ncclSuccess;
}

// Fetches what any rank has left for any rank of this process, because it may be unable to go on before. Called while a
// rank of this process waits itself.
void Rma::fetch_for_others() {
  RanksHere& ranks = ranks_here();
  const std::unique_lock lock(ranks.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return;  // another thread does so
  for (Rma* rank : ranks.all) {
    for (int from = 0; from < rank->n_ranks_; ++from) {
      if (rank->has_left(from)) (void)rank->fetch(from, false);
    }
  }
}

bool Rma::has_left(int from) {
  const From& box = of(*board_, from);
  return box.posted.load(std::memory_order_relaxed) != box.fetched.load(std::memory_order_relaxed);
}

}  // namespace moeccl::shim
