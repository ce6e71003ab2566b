#include "src/driver/memory.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace moeccl::driver {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (base_) munmap(base_, bytes_);
}

Result<Fd> shared_segment(const std::string& name, size_t bytes, bool reserve) {
  Fd fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) return system_error("memfd_create for " + name, errno);
  bytes = round_up(bytes, page_bytes());
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return system_error(format("size of {} bytes for shared segment {}", bytes, name), errno);
  }
  if (reserve) MOECCL_TRY(reserve_pages(fd, 0, bytes).with_context("shared segment " + name));
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
  void* base = mmap(nullptr, expected_bytes, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_NORESERVE | (populate ? MAP_POPULATE : 0), fd.get(), 0);
  if (base == MAP_FAILED) return system_error(format("map of a segment of {} bytes", expected_bytes), errno);
  return Mapping(base, expected_bytes);
}

Result<Mapping> private_memory(size_t bytes) {
  constexpr size_t kHuge = 2u << 20;
  bytes = round_up(bytes, bytes >= kHuge ? kHuge : page_bytes());
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return system_error(format("{} bytes of memory", bytes), errno);
  if (bytes >= kHuge) (void)madvise(base, bytes, MADV_HUGEPAGE);  // a hint: small pages work too
  return Mapping(base, bytes);
}

Status reserve_pages(const Fd& fd, size_t offset, size_t bytes) {
  int rc = 0;
  do {
    rc = fallocate(fd.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (rc != 0 && errno == EINTR);
  return rc == 0 ? Status() : system_error(format("{} bytes of shared memory", bytes), errno);
}

void release_pages(const Fd& fd, size_t offset, size_t bytes) {
  (void)fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes));
}

Status read_process(int pid, uint64_t address, void* dst, size_t bytes) {
  auto* to = static_cast<std::byte*>(dst);
  while (bytes > 0) {
    const size_t now = std::min<size_t>(bytes, 1u << 30);  // one call moves at most 2 GiB
    iovec local{to, now};
    iovec remote{reinterpret_cast<void*>(address), now};
    const ssize_t n = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (n < 0) {
      if (errno == EINTR) continue;
      return system_error(format("read of {} bytes from process {}", now, pid), errno);
    }
    if (n == 0) return error(moecclRemoteError, "process {} has no memory at the address that it announced", pid);
    to += n;
    address += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
  return {};
}

size_t physical_memory_bytes() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

CoreSet usable_cores() {
  CoreSet cores{};
  cpu_set_t set;
  static_assert(sizeof(set) == sizeof(cores));
  if (sched_getaffinity(0, sizeof(set), &set) == 0) std::memcpy(cores.data(), &set, sizeof(set));
  return cores;
}

}  // namespace moeccl::driver
