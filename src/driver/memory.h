// SPDX-License-Identifier: Apache-2.0
// Memory from the kernel: sealed shared segments, and copies from other processes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "src/base/fd.h"
#include "src/base/status.h"

namespace moeccl::driver {

// A mapping that is unmapped with its owner.
class Mapping {
 public:
  Mapping() = default;
  Mapping(void* base, size_t bytes) : base_(static_cast<std::byte*>(base)), bytes_(bytes) {}
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();
  std::byte* data() const { return base_; }
  size_t size() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
};

// Creates an anonymous shared file of `bytes` (rounded up to pages). It is zeroed, and sealed so that no process can
// change its size; access beyond its end (SIGBUS) therefore cannot happen. Its pages are not set aside yet: see
// reserve_pages().
Result<Fd> shared_segment(const std::string& name, size_t bytes);
// Maps a whole segment, at an address that allows huge pages. `expected_bytes` guards against a peer's file that is
// shorter, or whose size is not sealed. `populate` enters its pages into the page table now, instead of with one fault
// each at first use.
Result<Mapping> map_segment(const Fd& fd, size_t expected_bytes, bool populate = false);
// Keeps a mapping out of core files. A failure is ignored, because it only makes the core larger.
void leave_out_of_cores(const Mapping& mapping);
// Enters the pages of a mapping into the page table, as `populate` does.
void enter_pages(const Mapping& mapping);
// Allocates private zeroed memory, on huge pages where the kernel provides them.
Result<Mapping> private_memory(size_t bytes);
// Makes the kernel set the pages of a range aside, so that touching them cannot fail. OutOfMemory also where a control
// group's limit leaves no room.
Status reserve_pages(const Fd& fd, size_t offset, size_t bytes);
// Does the same for a range that `mapping` maps and that has not been used yet. Uses huge pages wherever a whole one
// fits and the kernel provides it.
Status reserve_huge_pages(const Fd& fd, const Mapping& mapping, size_t offset, size_t bytes);
inline constexpr size_t kHugePageBytes = 2u << 20;
// Gives the pages of a range of a segment back to the kernel; their contents become zero.
void release_pages(const Fd& fd, size_t offset, size_t bytes);

// Makes pages of a shared mapping private to this process. The same addresses keep the same bytes, but later stores of
// other processes into the segment do not arrive here. `offset` and `bytes` must cover whole pages.
Status make_private(const Mapping& mapping, size_t offset, size_t bytes);
// Releases the memory of the pages. Their addresses stay reserved, and using them causes a fault.
Status make_inaccessible(const Mapping& mapping, size_t offset, size_t bytes);

// A random word in this process's memory. Another program with the same pid, after an exec or because the kernel has
// reused the pid, does not have this word at this address.
struct ProcessStamp {
  uint64_t address = 0, value = 0;
};
Result<ProcessStamp> process_stamp();

// Copies from process `pid`, which must permit it (same user, ptrace rules) and must still be the process that has
// `stamp`. Copies all bytes or returns an error.
Status read_process(int pid, const ProcessStamp& stamp, uint64_t address, void* dst, size_t bytes);

size_t physical_memory_bytes();
// Returns how many addresses a process of this machine has: 2^47 on x86, 2^39 to 2^48 on Arm.
size_t all_addresses();
// Returns how many bytes this process may still map under its address-space limit (ulimit -v), or SIZE_MAX if there is
// no limit.
size_t free_addresses();
size_t page_bytes();
// The processors that this thread may use, one bit each. Processors beyond the array are left out.
using CoreSet = std::array<uint64_t, 16>;
CoreSet usable_cores();

}  // namespace moeccl::driver
