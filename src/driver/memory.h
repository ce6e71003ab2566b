// SPDX-License-Identifier: Apache-2.0
// Memory from the kernel: sealed shared segments, and copying from another process.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "src/base/fd.h"
#include "src/base/status.h"

namespace moeccl::driver {

// A mapping that ends with its owner.
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

// An anonymous shared file of `bytes` (rounded up to pages), zeroed, sealed so that nobody can change its size: access
// beyond the end, SIGBUS, cannot happen. `reserve` makes the kernel set the pages aside now, so that a full memory is
// an error here and not a signal later.
Result<Fd> shared_segment(const std::string& name, size_t bytes, bool reserve);
// Maps a segment whole, at an address that huge pages need. `expected_bytes` guards against a peer's file that is
// shorter, or whose size is not sealed.
// `populate` enters its pages into the page table now rather than one fault each at first use.
Result<Mapping> map_segment(const Fd& fd, size_t expected_bytes, bool populate = false);
// Keeps a mapping out of core files. A failure is none: the core is larger.
void leave_out_of_cores(const Mapping& mapping);
// Enters the pages of a mapping into the page table, as `populate` does.
void enter_pages(const Mapping& mapping);
// Private zeroed memory, on huge pages where the kernel gives them.
Result<Mapping> private_memory(size_t bytes);
// Makes the kernel set the pages of a range aside, so that touching them cannot fail.
Status reserve_pages(const Fd& fd, size_t offset, size_t bytes);
// The same for a range that `mapping` maps, and nobody has used yet: on huge pages wherever a whole one fits and the
// kernel gives it.
Status reserve_huge_pages(const Fd& fd, const Mapping& mapping, size_t offset, size_t bytes);
inline constexpr size_t kHugePageBytes = 2u << 20;
// Gives the pages of a range of a segment back to the kernel; their contents become zero.
void release_pages(const Fd& fd, size_t offset, size_t bytes);

// Makes pages of a shared mapping this process's own: the same addresses hold the same bytes, and what others store
// into the segment from now on does not arrive here. Whole pages, given in bytes.
Status make_private(const Mapping& mapping, size_t offset, size_t bytes);
// Takes the pages' memory away; their addresses stay taken, and using them is a fault.
Status make_inaccessible(const Mapping& mapping, size_t offset, size_t bytes);

// A random word in this process's memory. Another program that runs under the same number, after an exec or because the
// kernel gave the number away again, does not have it there.
struct ProcessStamp {
  uint64_t address = 0, value = 0;
};
Result<ProcessStamp> process_stamp();

// Copies from process `pid`, which must permit it (same user, ptrace rules), and must still be the one that has
// `stamp`. All bytes or an error.
Status read_process(int pid, const ProcessStamp& stamp, uint64_t address, void* dst, size_t bytes);

size_t physical_memory_bytes();
// What this process may still map under its limit of addresses (ulimit -v); SIZE_MAX without one.
size_t free_addresses();
size_t page_bytes();
// The processors that this thread may use, one bit each; those beyond the array are left out.
using CoreSet = std::array<uint64_t, 16>;
CoreSet usable_cores();

}  // namespace moeccl::driver
