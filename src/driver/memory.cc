// SPDX-License-Identifier: Apache-2.0
#include "src/driver/memory.h"

#include <fcntl.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "src/base/clock.h"
#include "src/base/random.h"
#include "src/driver/affinity.h"
#include "src/driver/limits.h"

namespace moeccl::driver {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

constexpr int kCollapse = 25;  // MADV_COLLAPSE, Linux 6.1: huge pages whatever the machine's setting for shared memory

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// Reserves `bytes` of addresses that begin at a huge-page boundary. Nothing usable is mapped there yet.
Result<std::byte*> aligned_room(size_t bytes) {
  const size_t room = bytes + kHugePageBytes;
  void* base = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return system_error(format("addresses for {} bytes", bytes), errno);
  auto* first = static_cast<std::byte*>(base);
  auto* aligned = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(base), kHugePageBytes));
  if (aligned > first) munmap(first, static_cast<size_t>(aligned - first));
  const size_t kept = static_cast<size_t>(aligned - first) + bytes;
  if (room > kept) munmap(first + kept, room - kept);
  return aligned;
}

}  // namespace

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (base_) munmap(base_, bytes_);
}

Result<Fd> shared_segment(const std::string& name, size_t bytes) {
  Fd fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) return system_error("memfd_create for " + name, errno);
  bytes = round_up(bytes, page_bytes());
  // Beyond this limit, the kernel would kill the process (SIGXFSZ).
  rlimit limit = {};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && bytes > limit.rlim_cur) {
    return error(moecclSystemError,
                 "size of {} bytes for shared segment {}: this process may make no file of more than {} bytes; raise "
                 "the limit (ulimit -f)",
                 bytes, name, limit.rlim_cur);
  }
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return system_error(format("size of {} bytes for shared segment {}", bytes, name), errno);
  }
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) return system_error("seal of " + name, errno);
  return fd;
}

Result<Mapping> map_segment(const Fd& fd, size_t expected_bytes, bool populate) {
  expected_bytes = round_up(expected_bytes, page_bytes());
  struct stat st {};
  if (fstat(fd.get(), &st) != 0) return system_error("fstat of a shared segment", errno);
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    return error(moecclRemoteError, "a peer's segment is not sealed: refusing to map memory that it could shrink");
  }
  if (static_cast<uint64_t>(st.st_size) < expected_bytes) {
    return error(moecclRemoteError,
                 "a peer's segment has {} bytes where {} are needed: do all ranks run the same build?", st.st_size,
                 expected_bytes);
  }
  std::byte* room = nullptr;
  if (expected_bytes >= kHugePageBytes) {
    MOECCL_ASSIGN_OR_RETURN(room, aligned_room(expected_bytes));
  }
  const int flags = MAP_SHARED | MAP_NORESERVE | (populate ? MAP_POPULATE : 0) | (room != nullptr ? MAP_FIXED : 0);
  void* base = mmap(room, expected_bytes, PROT_READ | PROT_WRITE, flags, fd.get(), 0);
  if (base == MAP_FAILED) {
    const int failure = errno;
    if (room != nullptr) munmap(room, expected_bytes);
    return system_error(format("map of a segment of {} bytes", expected_bytes), failure);
  }
  return Mapping(base, expected_bytes);
}

void leave_out_of_cores(const Mapping& mapping) { (void)madvise(mapping.data(), mapping.size(), MADV_DONTDUMP); }

void enter_pages(const Mapping& mapping) {
  (void)madvise(mapping.data(), mapping.size(), MADV_POPULATE_WRITE);  // Linux 5.14; else the first use enters them
}

Result<Mapping> private_memory(size_t bytes) {
  bytes = round_up(bytes, bytes >= kHugePageBytes ? kHugePageBytes : page_bytes());
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return system_error(format("{} bytes of memory", bytes), errno);
  if (bytes >= kHugePageBytes) (void)madvise(base, bytes, MADV_HUGEPAGE);  // only a hint, because small pages work too
  return Mapping(base, bytes);
}

namespace {

Status take_pages(const Fd& fd, size_t offset, size_t bytes) {
  // A signal makes an interrupted call give back everything that it has taken, so a timer can keep a large call from
  // ever finishing. Smaller pieces succeed. The last pieces are so small that more than kMostSignals interruptions of
  // one cannot come from a timer.
  constexpr size_t kLeast = size_t{1} << 20;
  constexpr int kMostSignals = 1000;
  size_t piece = bytes;
  int signals = 0;
  for (size_t done = 0; done < bytes;) {
    const size_t now = std::min(piece, bytes - done);
    if (fallocate(fd.get(), 0, static_cast<off_t>(offset + done), static_cast<off_t>(now)) == 0) {
      done += now;
      signals = 0;
      continue;
    }
    // A nameless file has no device that could be full: where the kernel never promises more memory than there is, it
    // says so when that is used up.
    if (errno != EINTR)
      return system_error(format("{} bytes of shared memory", bytes), errno == ENOSPC ? ENOMEM : errno);
    if (piece > kLeast) {
      piece = std::max(kLeast, round_up(piece / 2, page_bytes()));
    } else if (++signals > kMostSignals) {
      return error(moecclSystemError, "{} bytes of shared memory: fallocate was interrupted {} times in one MiB", bytes,
                   signals);
    }
  }
  return {};
}

// A collapse first waits until a kernel thread has run on every core, and all calls of this process that change its
// mappings wait with it. Beside programs that yield in loops this took up to a minute (decision 137). Small pages cost
// a third of a copy's rate, so after one such wait the process does without huge pages.
std::atomic<bool> collapse_stands{false};

// Collapses all pages in one call, because each call waits. The kernel may refuse; the pages then stay small, which
// works too.
void collapse(std::byte* first, size_t bytes) {
  constexpr int64_t kPatience_ns = 500'000'000, kPerByte_ns = 2;  // clearing and copying pages takes far less
  const int64_t started = now_ns();
  (void)madvise(first, bytes, kCollapse);
  if (now_ns() - started > kPatience_ns + static_cast<int64_t>(bytes) * kPerByte_ns) collapse_stands = true;
}

// The kernel does not refuse pages beyond a control group's limit or the host's memory, but kills a process.
Status there_is_room_for(size_t bytes) {
  constexpr size_t kWorthAsking = size_t{1} << 20;  // the answer takes some 100 us
  if (bytes < kWorthAsking) return {};
  MOECCL_TRY(control_groups_have(bytes));
  return host_has(bytes);
}

}  // namespace

Status reserve_pages(const Fd& fd, size_t offset, size_t bytes) {
  MOECCL_TRY(there_is_room_for(bytes));
  return take_pages(fd, offset, bytes);
}

Status reserve_huge_pages(const Fd& fd, const Mapping& mapping, size_t offset, size_t bytes) {
  MOECCL_TRY(there_is_room_for(bytes));
  const size_t first = round_up(offset, kHugePageBytes), end = (offset + bytes) / kHugePageBytes * kHugePageBytes;
  if (first < end && !collapse_stands) {
    // A huge page of a file needs one small page to grow from.
    for (size_t at = first; at < end; at += kHugePageBytes) MOECCL_TRY(take_pages(fd, at, page_bytes()));
    collapse(mapping.data() + first, end - first);
  }
  return take_pages(fd, offset, bytes);
}

void release_pages(const Fd& fd, size_t offset, size_t bytes) {
  (void)fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes));
}

Status make_private(const Mapping& mapping, size_t offset, size_t bytes) {
  void* const copy = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) return system_error(format("{} bytes of memory", bytes), errno);
  std::memcpy(copy, mapping.data() + offset, bytes);
  // Moves the pages and unmaps the old ones in one step, so that other threads see either the old memory or the new.
  if (mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, mapping.data() + offset) != MAP_FAILED) return {};
  const int failure = errno;
  munmap(copy, bytes);
  return system_error(format("{} bytes of memory in another place", bytes), failure);
}

Status make_inaccessible(const Mapping& mapping, size_t offset, size_t bytes) {
  void* const at =
      mmap(mapping.data() + offset, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return at != MAP_FAILED ? Status() : system_error(format("addresses for {} bytes", bytes), errno);
}

Result<ProcessStamp> process_stamp() {
  static uint64_t value = 0;
  static const Status made = random_bytes(&value, sizeof(value));
  if (!made.ok()) return Status(made);
  return ProcessStamp{reinterpret_cast<uint64_t>(&value), value};
}

Status read_process(int pid, const ProcessStamp& stamp, uint64_t address, void* dst, size_t bytes) {
  auto* to = static_cast<std::byte*>(dst);
  while (bytes > 0) {
    const size_t now = std::min<size_t>(bytes, 1u << 30);  // one call moves at most 2 GiB
    // One call sees the memory of one program, so the stamp that is read along with the bytes tells whose they are.
    uint64_t found = 0;
    const iovec local[] = {{to, now}, {&found, sizeof(found)}};
    const iovec remote[] = {{reinterpret_cast<void*>(address), now},
                            {reinterpret_cast<void*>(stamp.address), sizeof(found)}};
    const ssize_t n = process_vm_readv(pid, local, 2, remote, 2, 0);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == ESRCH) return error(moecclRemoteError, "process {} has ended", pid);
      return system_error(format("read of {} bytes from process {}", now, pid), errno);
    }
    if (static_cast<size_t>(n) < now)
      return error(moecclRemoteError, "process {} has no memory at the address that it announced", pid);
    if (static_cast<size_t>(n) < now + sizeof(found) || found != stamp.value)
      return error(moecclRemoteError, "process {} runs another program than the one that joined", pid);
    to += now;
    address += now;
    bytes -= now;
  }
  return {};
}

size_t free_addresses() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return SIZE_MAX;
  unsigned long pages = 0;
  if (std::FILE* statm = std::fopen("/proc/self/statm", "re"); statm != nullptr) {
    if (std::fscanf(statm, "%lu", &pages) != 1) pages = 0;
    std::fclose(statm);
  }
  const size_t used = pages * page_bytes();
  return limit.rlim_cur > used ? static_cast<size_t>(limit.rlim_cur) - used : 0;
}

size_t physical_memory_bytes() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// The first thread's stack is at their end, and the program's name at the end of the stack.
size_t all_addresses() { return std::bit_ceil(static_cast<size_t>(getauxval(AT_EXECFN))); }

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

CoreSet usable_cores() {
  CoreSet cores{};
  if (const std::optional<Affinity> own = Affinity::of_this_thread(); own.has_value())
    std::copy_n(own->words().begin(), cores.size(), cores.begin());
  return cores;
}

}  // namespace moeccl::driver
