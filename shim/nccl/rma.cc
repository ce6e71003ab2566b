// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl/rma.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>
#include <utility>

#include "shim/nccl/rma_board.h"
#include "shim/nccl/settings.h"

namespace moeccl::shim {
namespace {

uint64_t hash(const std::string& text) {
  uint64_t h = 0xcbf29ce484222325u;  // FNV-1a
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return h;
}

// Identifies one boot of one kernel and one table of process numbers: containers of a host may not see each other's.
uint64_t host_id() {
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  struct stat s = {};
  if (text.empty() || stat("/proc/self/ns/pid", &s) != 0) return 0;
  return hash(text + "/" + std::to_string(s.st_ino)) | 1;
}

// A wait that begins at once and does not burn a core for long.
class Pause {
 public:
  // Returns true every millisecond or so: it is time to check whether there is still something to wait for.
  bool operator()() {
    if (++n_ < 200) return false;
    if (n_ < 400) {
      std::this_thread::yield();
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    return n_ % 16 == 0;
  }

 private:
  int n_ = 0;
};

ncclResult_t no_board(const char* function) {
  return fail(ncclSystemError, std::string(function) + ": this rank has no memory to share signals (memfd_create)");
}

bool ended(int process) {
  pollfd p = {process, POLLIN, 0};
  return process >= 0 && poll(&p, 1, 0) > 0;
}

}  // namespace

Rma::~Rma() {
  {
    RanksHere& ranks = ranks_here();
    const std::lock_guard lock(ranks.mutex);
    std::erase(ranks.all, this);
  }
  if (board_ != nullptr && process_ == getpid())
    board_->is_over.store(1, std::memory_order_release);  // acquired where others wait for it
  for (const auto& p : peers_) {
    if (p->board != nullptr && p->board != board_) munmap(p->board, board_bytes_);
    if (p->process >= 0) close(p->process);
    for (const int file : p->files) close(file);
  }
  if (board_ != nullptr) munmap(board_, board_bytes_);
  if (file_ >= 0) close(file_);
}

Door Rma::open(int n_ranks, int device) {
  n_ranks_ = n_ranks;
  device_ = device;
  board_bytes_ = sizeof(Board) + static_cast<size_t>(n_ranks) * sizeof(From);
  Door door{.host = host_id(), .self = reinterpret_cast<uint64_t>(&nonce_), .pid = getpid()};
  if (getrandom(&nonce_, sizeof nonce_, 0) != static_cast<ssize_t>(sizeof nonce_)) return door;
  file_ = memfd_create("moeccl-shim-rma", MFD_CLOEXEC);
  if (file_ < 0 || fchmod(file_, 0600) != 0 || ftruncate(file_, static_cast<off_t>(board_bytes_)) != 0) return door;
  // Pages that are never touched take no memory.
  void* memory = mmap(nullptr, board_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
  if (memory == MAP_FAILED) return door;
  board_ = static_cast<Board*>(memory);
  board_->nonce = nonce_;
  door.nonce = nonce_;
  door.file = file_;
  return door;
}

void Rma::meet(int rank, std::vector<Door> doors) {
  rank_ = rank;
  peers_.clear();
  for (const Door& d : doors) {
    peers_.push_back(std::make_unique<Peer>());
    peers_.back()->door = d;
  }
  if (board_ == nullptr) return;
  RanksHere& ranks = ranks_here();
  const std::lock_guard lock(ranks.mutex);
  ranks.all.push_back(this);
}

bool Rma::reaches_all() const {
  if (peers_.empty()) return false;
  const uint64_t host = peers_[static_cast<size_t>(rank_)]->door.host;
  return host != 0 && std::all_of(peers_.begin(), peers_.end(),
                                  [&](const auto& p) { return p->door.file >= 0 && p->door.host == host; });
}

uint32_t Rma::add_window(void* buffer, size_t bytes, bool on_device) {
  const std::lock_guard lock(mutex_);
  if (board_ == nullptr) return kNoWindow;
  const uint32_t number = board_->n_windows.load(std::memory_order_relaxed);
  Board::Window* const w = board_->free_place(number);
  if (w != nullptr) {
    std::atomic_thread_fence(std::memory_order_release);  // pairs with the fence in find_target()
    w->on_device.store(on_device ? 1 : 0, std::memory_order_relaxed);
    w->address.store(reinterpret_cast<uint64_t>(buffer), std::memory_order_relaxed);
    w->bytes.store(bytes, std::memory_order_relaxed);
    w->name.store(uint64_t{number} + 1, std::memory_order_release);  // acquired in find()
  }
  // One that found no place counts, too: the next one belongs to the next one of the other ranks.
  board_->n_windows.store(number + 1, std::memory_order_release);  // acquired in find_target()
  return w != nullptr ? number : kNoWindow;
}

void Rma::skip_window() {
  const std::lock_guard lock(mutex_);
  if (board_ != nullptr) board_->n_windows.fetch_add(1, std::memory_order_release);  // acquired in find_target()
}

void Rma::remove_window(uint32_t number) {
  const std::lock_guard lock(mutex_);
  Board::Window* w = board_ != nullptr ? board_->find(number) : nullptr;
  if (w != nullptr) w->name.store(0, std::memory_order_release);  // acquired in find()
}

ncclResult_t Rma::reach(const char* function, int rank, Peer** found) {
  const std::string where = std::string(function) + ": " + rank_text(rank);
  const std::lock_guard lock(mutex_);
  if (board_ == nullptr) return no_board(function);
  Peer& peer = *peers_[static_cast<size_t>(rank)];
  *found = &peer;
  if (rank == rank_) peer.board = board_;
  if (peer.board != nullptr) return ncclSuccess;
  if (peer.door.file < 0 || peer.door.host == 0 || peer.door.host != peers_[static_cast<size_t>(rank_)]->door.host) {
    return fail(ncclInvalidUsage,
                where +
                    " is on another host or in another container: MoECCL's puts reach ranks of one "
                    "host: use ncclSend and ncclRecv, or run this program with MOECCL_SHIM_MODE=nccl");
  }
  const std::string path = "/proc/" + std::to_string(peer.door.pid) + "/fd/" + std::to_string(peer.door.file);
  // Open its process first: as long as this says that the process lives, what is found afterwards belongs to that
  // process.
  const int process = static_cast<int>(syscall(SYS_pidfd_open, peer.door.pid, 0));
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  const int why = errno;
  struct stat s = {};
  void* memory = MAP_FAILED;
  if (file >= 0 && fstat(file, &s) == 0 && static_cast<size_t>(s.st_size) == board_bytes_) {
    memory = mmap(nullptr, board_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  }
  if (file >= 0) close(file);
  auto* board = memory == MAP_FAILED ? nullptr : static_cast<Board*>(memory);
  if (board != nullptr && board->nonce == peer.door.nonce) {
    peer.board = board;
    peer.process = process;
    return ncclSuccess;
  }
  if (board != nullptr) munmap(memory, board_bytes_);
  if (process >= 0) close(process);
  return fail(ncclRemoteError,
              where + " (process " + std::to_string(peer.door.pid) +
                  ") is gone or cannot be reached: " + (file < 0 ? std::strerror(why) : "not its board"));
}

ncclResult_t Rma::find_target(const Put& put, Peer& peer, const GivenUp& given_up, uint64_t* address, bool* on_device) {
  const std::string where = std::string(put.function) + ": the window of " + rank_text(put.peer);
  std::string why;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(settings().timeout_ms);
  // Released in add_window().
  for (Pause pause; peer.board->n_windows.load(std::memory_order_acquire) <= put.window;) {
    if (peer.board->is_over.load(std::memory_order_acquire) != 0) break;  // released in ~Rma()
    if (!pause()) continue;
    if (ended(peer.process)) return fail(ncclRemoteError, where + " is gone: its process has ended");
    if (const ncclResult_t over = given_up(&why); over != ncclSuccess) return fail(over, where + ": " + why);
    if (std::chrono::steady_clock::now() > end) {
      return fail(ncclRemoteError, where + " was not registered within " + std::to_string(settings().timeout_ms) +
                                       " ms: all ranks register their windows in the same order");
    }
  }
  Board::Window* w = peer.board->find(put.window);
  uint64_t bytes = 0;
  if (w != nullptr) {
    bytes = w->bytes.load(std::memory_order_relaxed);
    *address = w->address.load(std::memory_order_relaxed) + put.offset;
    *on_device = w->on_device.load(std::memory_order_relaxed) != 0;
    // What was read is the window's only if the window is still there.
    std::atomic_thread_fence(std::memory_order_acquire);
    if (w->name.load(std::memory_order_relaxed) != uint64_t{put.window} + 1) w = nullptr;
  }
  if (w == nullptr || peer.board->is_over.load(std::memory_order_acquire) != 0)
    return fail(ncclInvalidUsage, where + " was deregistered");
  if (put.offset > bytes || put.n_bytes > bytes - put.offset) {
    return fail(ncclInvalidArgument, where + " has " + std::to_string(bytes) + " bytes: offset " +
                                         std::to_string(put.offset) + " and " + std::to_string(put.n_bytes) +
                                         " bytes lie beyond it");
  }
  return ncclSuccess;
}

// Where the system forbids writing, sets peer.fetches and writes nothing.
ncclResult_t Rma::write(const Put& put, Peer& peer, uint64_t address) {
  if (peer.door.pid == getpid()) {
    std::memmove(reinterpret_cast<void*>(address), put.bytes, put.n_bytes);
    return ncclSuccess;
  }
  const std::string where =
      std::string(put.function) + ": " + rank_text(put.peer) + " (process " + std::to_string(peer.door.pid) + ")";
  const auto forbidden = [&] {
    if (errno != EPERM && errno != ENOSYS) return false;
    peer.fetches = true;
    return true;
  };
  // Do not write to a process that has ended or become another program.
  uint64_t said = 0;
  iovec mine = {&said, sizeof said}, its = {reinterpret_cast<void*>(peer.door.self), sizeof said};
  errno = 0;
  const bool same = !ended(peer.process) &&
                    process_vm_readv(peer.door.pid, &mine, 1, &its, 1, 0) == static_cast<ssize_t>(sizeof said) &&
                    said == peer.door.nonce;
  if (!same && forbidden()) return ncclSuccess;
  if (!same) return fail(ncclRemoteError, where + " has ended or runs another program");
  const auto* from = static_cast<const char*>(put.bytes);
  for (size_t done = 0; done < put.n_bytes;) {
    constexpr size_t kMost = size_t{1} << 30;  // the kernel takes less than 2 GiB at a time
    const size_t n = std::min(put.n_bytes - done, kMost);
    mine = {const_cast<char*>(from + done), n};
    its = {reinterpret_cast<void*>(address + done), n};
    const ssize_t went = process_vm_writev(peer.door.pid, &mine, 1, &its, 1, 0);
    if (went < 0 && errno == EINTR) continue;
    if (went < 0 && forbidden()) return ncclSuccess;
    if (went <= 0) {
      const std::string why = std::strerror(errno);
      return fail(errno == EFAULT ? ncclInvalidUsage : ncclRemoteError,
                  where + ": " + std::to_string(n) + " bytes cannot be written to its window (" + why +
                      "): is the memory still there, and writable?");
    }
    done += static_cast<size_t>(went);
  }
  return ncclSuccess;
}

ncclResult_t Rma::leave(const Put& put, Peer& peer, const GivenUp& given_up) {
  std::string why;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(settings().timeout_ms);
  for (Pause pause;;) {
    bool posted = false;
    {
      const std::lock_guard lock(mutex_);
      const ncclResult_t result = post(put, peer, &posted);
      if (result != ncclSuccess || posted) return result;
    }
    fetch_for_others();  // the peer may be waiting for room here, too, or may be a rank of this thread
    if (!pause()) continue;
    const std::string where = std::string(put.function) + ": " + rank_text(put.peer);
    if (ended(peer.process)) return fail(ncclRemoteError, where + " is gone: its process has ended");
    if (peer.board->is_over.load(std::memory_order_acquire) != 0)  // released in ~Rma()
      return fail(ncclRemoteError, where + " has ended its communicator");
    if (const ncclResult_t over = given_up(&why); over != ncclSuccess) return fail(over, where + ": " + why);
    if (std::chrono::steady_clock::now() > end) {
      return fail(ncclRemoteError,
                  where + " has not fetched " + std::to_string(kParcels) + " puts within " +
                      std::to_string(settings().timeout_ms) +
                      " ms: windows on a device, and all where processes may not write into one another "
                      "(kernel.yama.ptrace_scope, seccomp), get their bytes in ncclWaitSignal");
    }
  }
}

ncclResult_t Rma::put(const Put& put, const GivenUp& given_up) {
  Peer* peer = nullptr;
  ncclResult_t result = reach(put.function, put.peer, &peer);
  if (result != ncclSuccess) return result;
  if (put.window != kNoWindow) {
    uint64_t address = 0;
    bool on_device = false;
    result = find_target(put, *peer, given_up, &address, &on_device);
    // Only its own process can write a device's memory.
    const bool writes = put.n_bytes > 0 && !on_device;
    if (result == ncclSuccess && writes && !peer->fetches) result = write(put, *peer, address);
    const bool leaves = put.n_bytes > 0 && (on_device || peer->fetches);
    if (result == ncclSuccess && leaves) result = leave(put, *peer, given_up);
    if (result != ncclSuccess) return result;
  }
  // After the bytes; acquired in wait_for().
  of(*peer->board, rank_).signals[put.context][put.signal].fetch_add(1, std::memory_order_release);
  return ncclSuccess;
}

ncclResult_t Rma::wait_for(const ncclWaitSignalDesc_t& wanted, const GivenUp& given_up) {
  if (board_ == nullptr) return no_board("ncclWaitSignal");
  std::atomic<uint64_t>& count = of(*board_, wanted.peer).signals[wanted.ctx][wanted.sigIdx];
  uint64_t before = 0;
  {
    const std::lock_guard lock(mutex_);
    uint64_t& taken = taken_[{wanted.peer, wanted.ctx * kSignals + wanted.sigIdx}];
    before = taken;
    taken += static_cast<uint64_t>(wanted.opCnt);
  }
  const uint64_t until = before + static_cast<uint64_t>(wanted.opCnt);
  if (count.load(std::memory_order_acquire) >= until) return fetch(wanted.peer, true);  // released in put()
  // A rank that has signalled may have ended since. A rank must be there only if there is something to wait for.
  Peer* peer = nullptr;
  const ncclResult_t result = reach("ncclWaitSignal", wanted.peer, &peer);
  if (result != ncclSuccess && result != ncclRemoteError) return result;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(settings().timeout_ms);
  for (Pause pause; count.load(std::memory_order_acquire) < until;) {  // released in put()
    // The peer's next puts may wait for room here, and its signals with them.
    if (has_left(wanted.peer)) {
      const ncclResult_t fetched = fetch(wanted.peer, true);
      if (fetched != ncclSuccess) return fetched;
    }
    if (!pause() && result == ncclSuccess) continue;
    fetch_for_others();
    const bool gone = result != ncclSuccess || ended(peer->process);
    const bool left = !gone && peer->board->is_over.load(std::memory_order_acquire) != 0;  // released in ~Rma()
    const bool late = std::chrono::steady_clock::now() > end;
    std::string why;
    const ncclResult_t over = given_up(&why);
    const uint64_t came = count.load(std::memory_order_acquire);
    if (came >= until) break;  // it signalled before it ended
    if (!gone && !left && !late && over == ncclSuccess) continue;
    const std::string where = "ncclWaitSignal: " + rank_text(wanted.peer) + " has sent " +
                              std::to_string(came > before ? came - before : 0) + " of " +
                              std::to_string(wanted.opCnt) + " signals (index " + std::to_string(wanted.sigIdx) +
                              ", context " + std::to_string(wanted.ctx) + ")";
    if (over != ncclSuccess) return fail(over, where + ", and " + why);
    return fail(ncclRemoteError,
                where + (gone   ? ", and its process has ended or has freed its communicator"
                         : left ? ", and has ended its communicator"
                                : " within " + std::to_string(settings().timeout_ms) + " ms (MOECCL_TIMEOUT_MS)"));
  }
  return fetch(wanted.peer, true);
}

ncclResult_t Rma::wait(std::span<const ncclWaitSignalDesc_t> signals, const GivenUp& given_up) {
  for (const ncclWaitSignalDesc_t& s : signals) {
    const ncclResult_t result = wait_for(s, given_up);
    if (result != ncclSuccess) return result;
  }
  return ncclSuccess;
}

}  // namespace moeccl::shim
